"""verl's objective: mode of the policy loss, mean, clip range, divergence, and what has no counterpart."""

from __future__ import annotations

from gspo_hpc.importers import report
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.objective import corrections, divergence, reward_models, teachers
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.verl_layout import ACTOR

OTHER_METHOD = ": convert reads runs with the advantages of grpo, which needs no critic; algorithm.advantage has others"


def _named(draft: Draft, name: str, default: str, allowed: tuple[str, ...], why: str) -> str:
    """Return which of several objectives is given; refuse any other, and one that is not known."""
    value = draft.text(name)
    found = default if value is None else value
    if found not in allowed:
        given = draft.label(name) if value is not None else f"{name} is not given (its default is {default})"
        draft.refuse(f"{given}: {draft.why_unset(found)}" if is_unset(found) else f"{given}{why}")
    return found


# Modes of verl's policy loss, and the algorithms here.
_MODES = {"vanilla": "grpo", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo"}
# Estimators of the divergence; those with a plus have the gradient of k2.
_KLS = {"kl": "k1", "k1": "k1", "abs": "absolute", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def put(draft: Draft) -> None:
    """Put the algorithm and its settings; refuse another objective."""
    estimators = ("grpo", "grpo_vectorized")
    _named(draft, "algorithm.adv_estimator", "gae", estimators, OTHER_METHOD)
    draft.credit("algorithm.name", "algorithm.adv_estimator")
    reward_models.of_verl(draft)
    name = f"{ACTOR}.policy_loss.loss_mode"
    text = f" is another objective: {', '.join(_MODES)} have a counterpart here (vanilla is grpo)"
    _other_objectives(draft)
    mode = _named(draft, name, "vanilla", tuple(_MODES), text)
    draft.put("algorithm.name", _MODES.get(mode, "grpo"), name)
    for ours, theirs, default in (("positive", "pos", 1.0), ("negative", "neg", 1.05)) if mode == "sapo" else ():
        places = [f"{ACTOR}.tau_{theirs}", f"{ACTOR}.policy_loss.tau_{theirs}"]
        if (found := next(filter(draft.given, places), None)) is not None:
            draft.put(f"algorithm.gate_{ours}", draft.number(found, default), found)
    for side in ("low", "high"):
        name = f"{ACTOR}.clip_ratio_{side}"
        empty = name in draft.values and draft.text(name) is None  # only then is clip_ratio read
        if empty:
            value = draft.number(f"{ACTOR}.clip_ratio", 0.2)
            draft.put(f"algorithm.clip_{side}", value, f"{ACTOR}.clip_ratio")
            draft.drop(name, f"it is null, so clip_ratio ({value:g}) takes its place")
        elif mode == "cispo" and side == "low" and (draft.number(name, 0.2) or 0.0) > 1:
            draft.put("algorithm.clip_low", 1.0, name, "no lower bound: weights are above 0")
        else:
            draft.put(f"algorithm.clip_{side}", draft.number(name, 0.2), name)
    alone = f"{ACTOR}.clip_ratio"
    if draft.number(alone, 0.2) != 0.2 and not {f"{alone}_low", f"{alone}_high"} & {*draft.values}:
        text = (
            "verl does not read it since 0.4, and clips at 0.2; a script for 0.3 means algorithm.clip_low and clip_high"
        )
        draft.assumed.append(f"{draft.label(alone)}: {text}")
    _aggregation(draft, mode)
    _divergence(draft)
    _reference(draft)
    corrections.of_verl(draft, mode)
    weight = draft.number(f"{ACTOR}.entropy_coeff", 0.0, least=-1.0) or 0.0
    if weight > 0:
        draft.put("algorithm.entropy_coef", weight, f"{ACTOR}.entropy_coeff")
    elif weight:
        draft.drop(f"{ACTOR}.entropy_coeff", "a bonus below 0 is a penalty, which the loss does not have here")
    elif draft.given(f"{ACTOR}.entropy_coeff"):
        draft.drop(f"{ACTOR}.entropy_coeff", report.OFF)
    teachers.of_verl(draft)


# What decides the objective, whatever stands before it in a name.
_OBJECTIVE = ("loss_mode", "loss_type", "adv_estimator", "policy_loss_type")


def _other_objectives(draft: Draft) -> None:
    """Refuse an argument that is not verl's and names an objective, as repositories with a verl of their own have."""
    for name in draft.values:
        if name.startswith("distillation."):  # of a loss that follows a teacher
            continue
        if name.rpartition(".")[2] in _OBJECTIVE and name not in draft.source.table.known:
            draft.refuse(f"{draft.label(name)}: verl has no argument of this name, and it seems to choose an objective")


_MEANS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "fixed_length"}


def _aggregation(draft: Draft, mode: str) -> None:
    name, plain = f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean"
    if mode in ("gspo", "sapo", "geo_mean"):
        given = draft.text(name) or "token-mean"
        if given != plain:
            policy = f"the policy's term of {_MODES.get(mode, mode)} is always a mean over sequences"
            draft.drop(name, f"{policy}, there and here; verl reads this for the terms of divergence and entropy")
            beside = draft.switch(f"{ACTOR}.use_kl_loss") or teachers.is_on(draft)
            if beside or draft.number(f"{ACTOR}.entropy_coeff", 0.0, least=-1.0):
                draft.differs.append(
                    f"loss_agg_mode {given}: verl takes so the mean of divergence and entropy, and here it is one over "
                    "sequences, as of the policy's term"
                )
        if mode == "geo_mean":
            draft.differs.append(
                "loss_mode geo_mean: since 0.8 verl adds up the means of the micro-batches, which weigh as many times "
                "against the divergence and clip_grad; here it is the mean of the update"
            )
        draft.credit("algorithm.name", name)
        draft.drop(f"{ACTOR}.clip_ratio_c", f"{_MODES.get(mode, mode)} does not use it; verl ignores it too")
        return
    text = (
        f" is another objective: here are the means over tokens (token-mean), over sequences ({plain}) and by a fixed "
    )
    text += "length (seq-mean-token-sum-norm)"
    kind = _named(draft, name, "token-mean", tuple(_MEANS), text)
    draft.put("algorithm.aggregation", _MEANS.get(kind, "token"), name)
    if kind == "token-mean":
        draft.differs.append(
            f"{name} token-mean: up to verl 0.7 a mean over the tokens of each micro-batch (but in 0.7 "
            "with use_legacy_worker_impl disable); here, as in 0.8 and later, over those of the whole update"
        )
    if mode == "vanilla":
        draft.put("algorithm.dual_clip", draft.number(f"{ACTOR}.clip_ratio_c", 3.0), f"{ACTOR}.clip_ratio_c")
    else:
        draft.drop(f"{ACTOR}.clip_ratio_c", f"{_MODES.get(mode, mode)} does not use it; verl ignores it too")


def _divergence(draft: Draft) -> None:
    """Put the KL term, in the loss or in the reward."""
    draft.credit("algorithm.kl_beta", f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    if draft.switch("algorithm.use_kl_in_reward"):
        _divergence_in_reward(draft)
        return
    for name in _OF_REWARDS:
        if draft.given(name):
            draft.drop(name, "it is read with use_kl_in_reward only (up to 0.3.0 without use_kl_loss)")
    if draft.switch(f"{ACTOR}.use_kl_loss"):
        weight = draft.number(f"{ACTOR}.kl_loss_coef", 0.001)
        draft.put("algorithm.kl_beta", weight, f"{ACTOR}.kl_loss_coef")
        kind = f"{ACTOR}.kl_loss_type"
        draft.credit("algorithm.kl_beta", kind)
        given = draft.text(kind) or "low_var_kl"
        found = "k2" if given.endswith("+") else _KLS.get(given, "k1")
        if found == "k1":
            draft.drop(kind, "k1 has no gradient in expectation; the estimator here is k3 (low_var_kl)")
        else:
            text = "its gradient is that of k2" if given.endswith("+") else ""
            draft.put("algorithm.kl_estimator", found, kind, text)
            if found == "k3" and weight:
                divergence.bounded(draft, "low_var_kl")


def _reference(draft: Draft) -> None:
    """Put a reference that is another model, which is a teacher here."""
    name, own = "actor_rollout_ref.ref.model.path", "actor_rollout_ref.model.path"
    if not draft.given(name):
        return
    if draft.values[name] == draft.values.get(own):
        draft.credit("model.path", name)
        return
    path, weight = draft.text(name), draft.settings["algorithm.kl_beta"][0] if _has_divergence(draft) else 0.0
    if not path or not weight:
        draft.drop(name, "there is no KL term, so no reference is read" if not weight else "it names no model")
        return
    draft.keep("algorithm.teacher", name, path)
    if "algorithm.kl_estimator" not in draft.settings:  # a teacher has another default
        draft.put("algorithm.kl_estimator", "k3")


def _has_divergence(draft: Draft) -> bool:
    return bool(draft.switch("algorithm.use_kl_in_reward") or draft.switch(f"{ACTOR}.use_kl_loss"))


_OF_REWARDS = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type", "algorithm.kl_penalty")


def _divergence_in_reward(draft: Draft) -> None:
    coefficient, control, kind = _OF_REWARDS
    if draft.switch(f"{ACTOR}.use_kl_loss"):
        draft.refuse("algorithm.use_kl_in_reward=True with use_kl_loss=True: here the KL term is in one of them")
    if (name := draft.text(control) or "fixed") != "fixed":
        draft.refuse(f"{control}={name}: the weight of a KL term in the reward is fixed here")
    draft.credit("algorithm.kl_beta", control)
    draft.put("algorithm.kl_beta", draft.number(coefficient, 0.001), coefficient)
    text = "from the log-probs of the engine here, and of the trainer there"
    draft.put("algorithm.kl_placement", "reward", "algorithm.use_kl_in_reward", text)
    given = (draft.text(kind) or "kl").removesuffix("+")  # which is about a gradient, and rewards have none
    if given not in _KLS:
        draft.refuse(f"{kind}={given}: estimators of a KL term are {', '.join(_KLS)}")
    draft.put("algorithm.kl_estimator", _KLS.get(given, "k1"), kind)
