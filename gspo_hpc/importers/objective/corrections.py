"""Carry over corrections of the gap between engine and trainer, where the weights are the same here.

``algorithm.correction`` weighs the terms of a policy: tokens by rho = pi_old / pi_engine, sequences by the exponential
of the mean of log rho. verl 0.9 and TRL 1.9 weigh a sequence by the product of its tokens' rho instead, and ms-swift
4.5 by that of the mean: what has no equal here is left out, with the reason.
"""

from __future__ import annotations

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers import report
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null
from gspo_hpc.importers.versions import trl as versions

# As good as no lower bound: weights below it are 0 here, and nearly 0 there.
_NO_LOWER = 1e-9
_PRODUCT = "a sequence is weighed by the product of its tokens' ratios there, and by their geometric mean here"
_BY_TOKENS = (
    "tokens of a sequence have a weight each there, and the sequence has one here (its ratio is the sequence's)"
)
_ONE = "there is one correction here: algorithm.correction"


def _put(draft: Draft, name: str, kind: str, low: tuple[float, str], high: tuple[float, str], comment: str) -> None:
    """Put a correction; `name`: the argument that chooses it; `low`, `high`: bounds, and the arguments of them."""
    if not low[0] <= 1 <= high[0] or low[0] == high[0]:
        draft.drop(name, f"its bounds ({low[0]:g} to {high[0]:g}) must lie around 1, the ratio of equal policies")
        return
    draft.put("algorithm.correction", kind, name, comment)
    if kind != "truncated":
        draft.put("algorithm.correction_low", low[0], comment="no lower bound there" if low[0] == _NO_LOWER else "")
        draft.credit("algorithm.correction_low", low[1])
    draft.put("algorithm.correction_high", high[0], of=(high[1],))


def _drop(draft: Draft, why: str, *names: str) -> None:
    for name in names:
        if draft.given(name):
            draft.drop(name, why)


# -- verl

_VERL = "algorithm.rollout_correction"
_IS, _LIMIT, _RS = f"{_VERL}.rollout_is", f"{_VERL}.rollout_is_threshold", f"{_VERL}.rollout_rs"
_RS_LIMIT, _RS_LOW = f"{_VERL}.rollout_rs_threshold", f"{_VERL}.rollout_rs_threshold_lower"
_BYPASS, _LOSS, _EVEN = f"{_VERL}.bypass_mode", f"{_VERL}.loss_type", f"{_VERL}.rollout_is_batch_normalize"
_CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"
_OF_06 = "algorithm.rollout_is"  # verl 0.6.0 alone has this and five arguments that begin with its name
_LEVEL, _BOUNDS, _VETO = f"{_OF_06}_level", f"{_OF_06}_mode", f"{_OF_06}_veto_threshold"
_MODES_06 = ("truncate", "mask")
_VETOED = "verl 0.6 leaves out a sequence with a token whose ratio is below a threshold (1e-4), and no sequence is here"
_LOGPROBS = "actor_rollout_ref.rollout.calculate_log_probs"


def of_verl(draft: Draft, mode: str) -> None:
    """Put the correction of verl's ``algorithm.rollout_correction``; `mode`: of the policy loss."""
    draft.credit("algorithm.correction", _BYPASS, _IS, _RS, _CAP)
    if draft.given(_IS) or draft.given(_RS):
        parts.earlier(draft, "verl 0.9", {_LOGPROBS: "False (up to 0.8), with which nothing is corrected"})
    if draft.given(_LOGPROBS) and not draft.switch(_LOGPROBS):
        why = f"verl corrects nothing with {_LOGPROBS}=False"
        _drop(draft, why, _BYPASS, _LOSS, _IS, _LIMIT, _RS, _RS_LIMIT, _RS_LOW, _EVEN, _CAP)
        return
    if draft.switch(_BYPASS):
        _verl_bypass(draft, mode)
        return
    _drop(draft, "it is read with bypass_mode only", _LOSS)
    if draft.given(_CAP) and (cap := draft.number(_CAP, -1.0, least=-1.0) or 0.0) <= 0:
        draft.drop(_CAP, report.OFF)
    elif draft.given(_CAP):
        _verl_weights(draft, mode, _CAP, f"{cap}", _CAP)
    kind = draft.text(_IS)
    if draft.given(_IS) and kind == "sequence":
        _drop(draft, _PRODUCT, _IS, _LIMIT, _EVEN)
    elif draft.given(_IS) and kind == "token":
        if draft.switch(_EVEN):
            _drop(draft, "weights are not divided by their mean here", _IS, _LIMIT, _EVEN)
        else:
            _verl_weights(draft, mode, _IS, draft.text(_LIMIT) or "2.0", _LIMIT)
            _drop(draft, report.OFF, _EVEN)
    elif kind is not None:
        draft.wrong(_IS, "must be token or sequence") if draft.given(_IS) else draft.sure(_IS, "")
    else:
        _drop(draft, "it is read with rollout_is only", _LIMIT, _EVEN)
    _verl_rejection(draft)
    _verl_06(draft, mode)


def _verl_06(draft: Draft, mode: str) -> None:
    """Put the correction of verl 0.6.0 (its ``mismatch_helper.py``): a switch, a level, a mode and bounds."""
    limit, least = f"{_OF_06}_threshold", f"{_OF_06}_threshold_lower"
    names = [name for name in (_OF_06, limit, least, _LEVEL, _BOUNDS, _VETO) if draft.given(name)]
    if not names:
        return
    draft.credit("algorithm.correction", *names)
    high, level = draft.number(limit) or 0.0, draft.choice(_LEVEL, ("token", "sequence", "geometric"), "token")
    low = (draft.number(least) or 1 / (high or 1)) if draft.choice(_BOUNDS, _MODES_06, "truncate") == "mask" else 0.0
    if not draft.switch(_LOGPROBS):
        _drop(draft, f"verl 0.6 corrects nothing without {_LOGPROBS}=True", *names)
    elif not draft.switch(_OF_06) or not high:
        _drop(draft, "verl 0.6 only measures these weights without rollout_is=True and a threshold", *names)
    elif "algorithm.correction" in draft.settings:
        _drop(draft, f"{_ONE}, which is {draft.settings['algorithm.correction'][0]}", *names)
    elif level == "sequence" or (level == "geometric" and mode != "gspo"):
        _drop(
            draft,
            _PRODUCT if level == "sequence" else "tokens have a weight each here, and one in common there",
            *names,
        )
    else:
        if level == "token":
            _verl_weights(draft, mode, _OF_06, f"{low}_{high}" if low else f"{high}", limit)
        else:
            _put(draft, _OF_06, "masked" if low else "truncated", (low, least), (high, limit), "")
        if not (_VETO in draft.values and is_null(draft.values[_VETO])) and draft.number(_VETO, 1e-4):
            draft.drop(_VETO, _VETOED)
            if not draft.given(_VETO):
                draft.assumed.append(f"algorithm.correction: {_VETOED}")


def _verl_bypass(draft: Draft, mode: str) -> None:
    if draft.text(_LOSS) == "reinforce" or draft.switch(f"{_VERL}.use_policy_gradient"):
        name = _LOSS if draft.text(_LOSS) == "reinforce" else f"{_VERL}.use_policy_gradient"
        draft.refuse(f"{draft.label(name)}: with bypass_mode it is another objective, without a clip range")
    draft.put("algorithm.correction", "bypass", _BYPASS)
    draft.credit("algorithm.correction", _LOSS)
    _drop(
        draft, "with bypass_mode the ratio itself is against the engine, and no weights are applied", _IS, _LIMIT, _EVEN
    )
    _drop(
        draft,
        f"sequences are not dropped with bypass here, nor in verl 0.9's own trainer: {_ONE}",
        _RS,
        _RS_LIMIT,
        _RS_LOW,
    )
    if mode != "vanilla":
        draft.assumed.append(
            f"{draft.label(_BYPASS)}: up to 0.8 verl does not read loss_mode then and trains vanilla's; that of 0.9 is "
            f"taken, which keeps loss_mode={mode}"
        )


def _verl_weights(draft: Draft, mode: str, name: str, limit: str, limited: str) -> None:
    """Put weights of tokens: "2.0" bounds them from above, and "0.5_5.0" drops tokens outside."""
    low, _, high = limit.rpartition("_")
    try:
        bounds = (float(low) if low else 0.0, float(high))
    except ValueError:
        draft.wrong(limited, "must be a number, or two such as 0.5_5.0") if draft.given(limited) else None
        return
    if mode == "gspo":  # whose form in verl is that of tokens with the value of their sequence
        draft.put("algorithm.name", "gspo_token", f"{name}", "with weights of tokens: verl's gspo is of this form")
    elif mode == "geo_mean":
        draft.drop(name, _BY_TOKENS)
        return
    _put(draft, name, "masked" if low else "truncated", (bounds[0], limited), (bounds[1], limited), "")


def _verl_rejection(draft: Draft) -> None:
    kind = draft.text(_RS)
    if not draft.given(_RS):
        _drop(draft, "it is read with rollout_rs only", _RS_LIMIT, _RS_LOW)
        return
    if "algorithm.correction" in draft.settings:
        _drop(draft, f"{_ONE}, which is {draft.settings['algorithm.correction'][0]}", _RS, _RS_LIMIT, _RS_LOW)
        return
    if kind not in ("seq_mean_k1", "geometric"):
        why = "sequences are dropped by the geometric mean of their ratios here (seq_mean_k1), and no tokens"
        _drop(draft, why, _RS, _RS_LIMIT, _RS_LOW)
        return
    limit = draft.text(_RS_LIMIT) or (draft.text(_LIMIT) or "2.0" if kind == "geometric" else "")
    first, _, last = limit.rpartition("_")
    try:
        high = float(last)
        low = float(first) if first else draft.number(_RS_LOW, 1 / high) or 0.0
    except (ValueError, ZeroDivisionError):
        draft.wrong(_RS_LIMIT, "must be a number, or two such as 0.99_1.01")
        return
    if kind == "seq_mean_k1":  # bounds of pi_engine / pi_old
        low, high = (1 / high, 1 / low) if low > 0 else (0.0, high)
    text = "a dropped sequence is left out of its mean over tokens there, and is 0 in it here"
    by_tokens = draft.settings.get("algorithm.aggregation", ("sequence", ""))[0] != "sequence"
    _put(draft, _RS, "rejection", (low, _RS_LOW), (high, _RS_LIMIT), text if by_tokens else "")
    draft.credit("algorithm.correction_low", _RS_LIMIT)


# -- TRL

_ON, _MODE = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
_MAX, _MIN = "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"
_BOUNDED = 25  # the last version of TRL without vllm_importance_sampling_mode: 0.25
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def of_trl(draft: Draft, level: str) -> None:
    """Put TRL's correction, which is on where vLLM generates; `level`: of the importance ratio."""
    if draft.given("off_policy_mask_threshold"):
        threshold = draft.number("off_policy_mask_threshold")
        draft.put("algorithm.sequence_mask", threshold, "off_policy_mask_threshold")
        if threshold is not None and not draft.switch("use_vllm"):
            draft.differs.append(
                f"{draft.label('off_policy_mask_threshold')}: without use_vllm TRL compares with the trainer's own old "
                "log-probs, which are the present ones in the first update; here with those of the engine"
            )
    if not draft.switch("use_vllm") or not draft.switch(_ON, True):
        generates = draft.switch("use_vllm")
        _drop(draft, f"it is read with {_ON if generates else 'use_vllm'} only", _MODE, _MAX, _MIN)
        _drop(draft, report.OFF if not draft.switch(_ON, True) else "it is read with use_vllm only", _ON)
        draft.credit("algorithm.correction", _ON)
        return
    _, latest, _ = versions.span(draft)
    plain = latest <= _BOUNDED  # weights of tokens that are bounded by 2 are all that these versions have
    mode = draft.choice(_MODE, _MODES, "token_truncate" if plain else "sequence_mask")
    draft.credit("algorithm.correction", _ON)
    high = None if _MAX in draft.values and draft.text(_MAX) is None else draft.number(_MAX, 2.0 if plain else 3.0)
    low = draft.number(_MIN)
    why = ""
    if mode.startswith("sequence"):
        why = _PRODUCT
    elif level == "sequence":
        why = _BY_TOKENS
    elif high is None or (mode == "token_truncate" and low is not None):
        why = "weights are bounded from above, or tokens outside of two bounds are dropped (algorithm.correction)"
    if not why:
        kind = "truncated" if mode == "token_truncate" else "masked"
        _put(draft, _MODE, kind, (low or _NO_LOWER, _MIN), (high or 0.0, _MAX), "")
        return
    _drop(draft, why, _ON, _MODE, _MAX, _MIN)
    if not draft.given(_MODE):
        kind = f"weights of tokens of at most {high or 0:g}" if plain else f"{_MODE} {mode}"
        draft.assumed.append(
            f"{_ON} is on where vLLM generates, unless it is switched off, with {kind}: {why}, so nothing is "
            "corrected; algorithm.correction has what exists here"
        )


# -- ms-swift

_SWIFT, _THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
_DELTA = "off_policy_sequence_mask_delta"


def of_swift(draft: Draft, level: str) -> None:
    """Put the correction of ms-swift; `level`: of the importance ratio."""
    weighs = "its weights count for the KL term, too, there" if draft.settings["algorithm.kl_beta"][0] else ""
    silent = draft.source.project == "ms-swift" and not draft.switch("use_vllm")  # no log-probs of an engine
    if draft.given(_DELTA):
        if silent:
            draft.differs.append(
                f"{draft.label(_DELTA)}: without use_vllm ms-swift compares with the trainer's own old log-probs; here "
                "with those of the engine"
            )
        text = weighs and "it drops the KL term of a sequence, too, there"
        draft.put("algorithm.sequence_mask", draft.number(_DELTA), _DELTA, text)
    if not draft.given(_SWIFT):
        _drop(draft, f"it is read with {_SWIFT} only", _THRESHOLD)
        return
    if silent:
        _drop(draft, "ms-swift reads it where vLLM generates (use_vllm) only", _SWIFT, _THRESHOLD)
        return
    mode = draft.choice(_SWIFT, _MODES, "token_truncate")
    high = draft.number(_THRESHOLD, 2.0) or 0.0
    if mode.startswith("token") and level != "sequence":
        kind = "truncated" if mode == "token_truncate" else "masked"
        _put(draft, _SWIFT, kind, (_NO_LOWER, _SWIFT), (high, _THRESHOLD), weighs)
    elif mode == "sequence_truncate" and level == "sequence":
        _put(draft, _SWIFT, "truncated", (_NO_LOWER, _SWIFT), (high, _THRESHOLD), weighs)
    else:
        own = "all tokens of a sequence have its weight there, and each token its own here"
        _drop(draft, _BY_TOKENS if level == "sequence" else own, _SWIFT, _THRESHOLD)
