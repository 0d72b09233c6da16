"""Carry over on-policy distillation: a teacher whose log-probs of sampled tokens are a signal of their own.

verl and ms-swift may have log q - log pi of every sampled token as its advantage, which has the gradient of the KL
term against a teacher here, with the estimator unbiased. verl may also have an estimate of the divergence as a term of
the loss. Divergences over the whole vocabulary, or its likeliest tokens, have no counterpart.
"""

from __future__ import annotations

from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.objective import divergence

TEACHER, WEIGHT = "algorithm.teacher", "algorithm.kl_beta"
_ALONE = "no reward has a part in it"


def _put(draft: Draft, estimator: str, *, alone: bool) -> None:
    draft.put("algorithm.kl_estimator", estimator)
    if alone:
        draft.put("reward.functions", [], comment=_ALONE)


def _unbounded(draft: Draft) -> None:
    draft.differs.append(
        "the teacher's advantage of a token is multiplied by the clipped ratio there; here its term has the token's "
        "own ratio without a range, which is the same in the first update of a rollout"
    )


# -- verl

_LOSS = "distillation.distillation_loss"
_MODELS = "distillation.teacher_models."
# Estimates of the divergence that are a term of the loss, as they are called there.
_TERMS = {"abs": "absolute", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def of_verl(draft: Draft) -> None:
    """Put verl's distillation; refuse what has no counterpart."""
    mode, coef = f"{_LOSS}.loss_mode", f"{_LOSS}.distillation_loss_coef"
    gradient, rewards = f"{_LOSS}.use_policy_gradient", f"{_LOSS}.use_task_rewards"
    if not is_on(draft):
        draft.credit(TEACHER, "distillation.enabled")
        return
    draft.credit(TEACHER, "distillation.enabled")
    _teacher_of_verl(draft)
    for name in ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss"):
        if draft.switch(name):
            draft.refuse(f"{draft.label(name)}: {_REFERENCE}")
    kind, as_advantage = draft.text(mode) or "k3", draft.switch(gradient)
    given = draft.label(mode) if draft.given(mode) else f"{mode} is not given (its default is k3)"
    alone = not draft.switch(rewards, True)
    if kind not in ("kl", "k1", *_TERMS):
        why = (
            "a divergence over several tokens of the vocabulary has no counterpart, and k1 with use_policy_gradient has"
        )
        draft.refuse(f"{given}: {why}")
    elif as_advantage and kind not in ("kl", "k1"):
        draft.refuse(f"{given} with use_policy_gradient: the advantage is no log-ratio then; k1 has a counterpart here")
    elif not as_advantage and kind not in _TERMS:
        draft.refuse(f"{given} without use_policy_gradient: as a term of the loss k1 has no gradient in expectation")
    if as_advantage and (policy := draft.text(f"{_LOSS}.policy_loss_mode") or "vanilla") != "vanilla":
        draft.refuse(f"{draft.label(f'{_LOSS}.policy_loss_mode')}: the teacher's term has no {policy} here")
    _put(draft, "unbiased" if as_advantage else _TERMS.get(kind, "k3"), alone=alone)
    draft.credit("algorithm.kl_estimator", mode, gradient)
    draft.credit("reward.functions", rewards)
    draft.put(WEIGHT, 1.0 if alone else draft.number(coef, 1.0), None if alone else coef)
    if alone and draft.given(coef):
        draft.drop(coef, "it is read with use_task_rewards only")
    if as_advantage:
        _unbounded(draft)
    elif _TERMS.get(kind) == "k3":
        divergence.bounded(draft, "low_var_kl")
    bounds = [name for name in (f"{_LOSS}.loss_max_clamp", f"{_LOSS}.log_prob_min_clamp") if draft.given(name)]
    if bounds:
        named = " and ".join(draft.label(name) for name in bounds)
        draft.differs.append(f"{named}: a token's signal from the teacher is bounded there, and not here")
    for name in bounds:
        draft.drop(name, "a token's signal from the teacher has no bound here")
    if (own := draft.whole("distillation.nnodes", 0, least=0) or 0) > 0:
        draft.differs.append(
            f"distillation.nnodes {own}: the teacher has GPUs of its own there; here its weights take turns with the "
            "trainer's on the same GPUs, in the trainer's layout and dtype"
        )


_REFERENCE = "a KL term against the model's start beside the teacher's, which takes the place of that reference here"


def is_on(draft: Draft) -> bool:
    """Tell whether a run of verl distils."""
    return draft.switch("distillation.enabled")


def is_alone(draft: Draft) -> bool:
    """Tell whether a run of verl distils, and rewards have no part in it."""
    return is_on(draft) and not draft.switch(f"{_LOSS}.use_task_rewards", True)


def _teacher_of_verl(draft: Draft) -> None:
    paths = [name for name in draft.values if name.startswith(_MODELS) and name.endswith(".model_path")]
    single = f"{_MODELS}teacher_model.model_path"
    if len(paths) > 1:
        paths = [name for name in paths if name != single]  # verl takes that one away beside others
    if len(paths) > 1:
        named = ", ".join(map(draft.label, paths))
        draft.refuse(f"{named}: here one teacher (algorithm.teacher) teaches on every prompt")
    elif not paths or not (path := draft.text(paths[0])):
        draft.refuse(f"distillation.enabled=True: the teacher is missing ({single})")
    else:
        draft.keep(TEACHER, paths[0], path)


# -- ms-swift


def least_group(draft: Draft) -> int:
    """Return how many completions of a prompt ms-swift's GRPO needs at least: one where a teacher alone teaches."""
    return 1 if _alone_in_swift(draft) else 2


def _alone_in_swift(draft: Draft) -> bool:
    return draft.given("teacher_model") and not draft.given("reward_funcs") and not draft.given("reward_model")


def of_swift(draft: Draft) -> None:
    """Put ms-swift's teacher of a run of GRPO, after the KL term, whose weight is the teacher's here."""
    if draft.text("rlhf_type") != "grpo":  # which is refused
        return
    if draft.text("teacher_model_server"):
        draft.refuse(
            f"{draft.label('teacher_model_server')}: the teacher is a server there, and a model in the trainer's "
            "layout here: name its folder or its name on the hub (--teacher_model)"
        )
        return
    if not (path := draft.text("teacher_model")):
        for name in filter(draft.given, ("teacher_kl_coef", "teacher_adapters")):
            draft.drop(name, "it is read with teacher_model only")
        return
    if draft.texts("teacher_adapters"):
        draft.refuse(f"{draft.label('teacher_adapters')}: a teacher has no adapters here; merge them into its weights")
    if beta := draft.number("beta", 0.04):
        given = draft.label("beta") if draft.given("beta") else f"--beta {beta:g}, its default"
        draft.refuse(f"{draft.label('teacher_model')} with {given}: {_REFERENCE}; with --beta 0 there is none")
    level = "importance_sampling_level"
    if draft.text(level) == "sequence":
        draft.refuse(
            f"{draft.label(level)} with a teacher: the ratio of the sequence carries the signal of one token to all "
            "others there; here the teacher's term has the token's own ratio, as with token and sequence_token there"
        )
    weight = draft.number("teacher_kl_coef", 1.0)
    if not weight:
        draft.refuse(f"{draft.label('teacher_kl_coef')}: the teacher has no part in what is learnt then")
    draft.keep(TEACHER, "teacher_model", path)
    draft.put(WEIGHT, weight, "teacher_kl_coef")
    _put(draft, "unbiased", alone=_alone_in_swift(draft))
    _unbounded(draft)
