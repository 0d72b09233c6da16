"""Convert what advantages are: the estimator, what they are divided by, and whether the divergence is in the reward."""

from __future__ import annotations

from gspo_hpc.importers.draft import Draft

_SCALE, _ESTIMATOR, _IN_REWARD = "scale_rewards", "advantage_estimator", "kl_in_reward"
# Values of scale_rewards, which was true or false up to TRL 0.22 and ms-swift 3.9, and is read so since.
_SCALES = {"group": "group", "true": "group", "1": "group", "none": "none", "false": "none", "0": "none"}
_SCALES |= {"batch": "batch"}
_OF_SWIFT = {"gdpo": "gdpo"}  # since 4
_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus")
# Estimator -> scale_rewards -> the kind of advantage, and whether it is divided by the deviation of its group.
_KINDS: dict[str, dict[str, tuple[str, bool]]] = {
    "grpo": {
        "group": ("group", True),
        "none": ("group", False),
        "batch": ("batch_std", False),
        "gdpo": ("gdpo", False),
    },
    "rloo": {"group": ("leave_one_out", True), "none": ("leave_one_out", False), "gdpo": ("gdpo", False)},
    "reinforce_plus_plus": {
        "group": ("group", True),
        "none": ("group", False),
        "batch": ("reinforce_baseline", False),
        "gdpo": ("group", False),  # which that estimator does not read: nothing is divided
    },
}
_DEFAULTS = {"rloo": "none", "reinforce_plus_plus": "batch"}  # of scale_rewards in swift rlhf; else it is group


def put(draft: Draft) -> None:
    """Put the kind of advantage, and what divides it."""
    estimator, kinds = _estimator(draft), _SCALES | (_OF_SWIFT if draft.source.project != "TRL" else {})
    scale = _scale(draft, estimator)
    if scale not in kinds:
        more = "group, batch, none or gdpo" if "gdpo" in kinds else "group, batch or none"
        draft.wrong(_SCALE, f"must be {more}: what advantages are divided by")
        return
    if kinds[scale] not in _KINDS[estimator]:
        draft.refuse(
            f"--{_ESTIMATOR} {estimator} with {_SCALE} {scale}: the reward minus the mean of the others is divided by "
            "the deviation of its group or by nothing here"
        )
        return
    kind, divides = _KINDS[estimator][kinds[scale]]
    if kind != "group":
        name = _SCALE if estimator == "grpo" or kind == "gdpo" else _ESTIMATOR
        draft.put("algorithm.advantage", kind, name)
    draft.credit("algorithm.advantage" if kind != "group" else "algorithm.normalize_advantage", _SCALE, _ESTIMATOR)
    if kind == "leave_one_out":  # which is not divided by default here, and is in Megatron-SWIFT
        text = "" if draft.given(_SCALE) else f"{_SCALE} {scale}, the default of {draft.source.project}"
        draft.put("algorithm.normalize_advantage", divides, comment=text)
    elif kind == "group":
        draft.put("algorithm.normalize_advantage", divides, _SCALE)


def in_reward(draft: Draft) -> bool:
    """Return whether the divergence is taken off the reward, as swift rlhf does by default but for grpo."""
    estimator = _estimator(draft)
    found = draft.switch(_IN_REWARD, estimator != "grpo" and draft.source.project == "ms-swift")
    if found and _scale(draft, estimator) == "gdpo":
        draft.drop(_IN_REWARD, f"with {_SCALE} gdpo ms-swift leaves the divergence in the loss")
        return False
    return found


def _estimator(draft: Draft) -> str:
    if draft.source.project == "TRL":
        return "grpo"
    return draft.choice(_ESTIMATOR, _ESTIMATORS, "grpo")


def _scale(draft: Draft, estimator: str) -> str:
    """Return scale_rewards; Megatron-SWIFT has group for every estimator where it is not given."""
    if draft.given(_SCALE):
        return str(draft.values[_SCALE]).lower()
    return _DEFAULTS.get(estimator, "group") if draft.source.project == "ms-swift" else "group"
