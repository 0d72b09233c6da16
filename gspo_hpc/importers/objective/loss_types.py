"""Convert the objective by the names that TRL and ms-swift share: loss_type, importance_sampling_level and others."""

from __future__ import annotations

from gspo_hpc.importers import report
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.objective import advantages, divergence
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.versions import swift
from gspo_hpc.system.text import near_miss

_PRESETS = {"sequence": "gspo", "sequence_token": "gspo_token", "token": "grpo"}
# Values of loss_type in TRL and ms-swift, and those of one of them alone.
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
_ELSEWHERE = {"TRL": ("luspo", "vespo")}


def put(draft: Draft, level: str, loss: str, high: float | None, low: float, beta: float) -> None:
    """Put the algorithm of ms-swift's and TRL's names. Refuse any other objective."""
    name = _PRESETS[level]
    draft.put("algorithm.kl_beta", beta, "beta")
    _reference(draft, beta)
    if beta and draft.source.project != "TRL" and not advantages.in_reward(draft) and not swift.third(draft):
        divergence.bounded(draft, "k3, the KL term", " since 4.0.4")
    if loss in ("cispo", "sapo") and name == "grpo":
        draft.credit("algorithm.name", "importance_sampling_level")
        draft.put("algorithm.name", loss, "loss_type")
        _without_clipping(draft, loss, low if high is None else high)
        unread = ("delta", "epsilon", "epsilon_high") if loss == "sapo" else ("delta",)
        for other in filter(draft.given, unread):
            draft.drop(other, f"loss_type {loss} does not read it")
    else:
        draft.put("algorithm.name", name, "importance_sampling_level")
        draft.put("algorithm.clip_low", low, "epsilon")
        draft.put("algorithm.clip_high", low if high is None else high, "epsilon" if high is None else "epsilon_high")
        _two_sided(draft, low if high is None else high)
    draft.credit("algorithm.aggregation", "loss_type")
    if loss in ("dapo", "bnpo") and name == "grpo":
        draft.put("algorithm.aggregation", "token", "loss_type", f"{loss}: the mean of all tokens")
        if loss == "bnpo":
            draft.differs.append(
                "loss_type bnpo: the mean is over the tokens of an update here, there of a micro-batch"
            )
    elif loss in ("dapo", "bnpo"):
        text = (
            f"weighs a sequence by its length, which contradicts a ratio per sequence; {name} is the plain mean over "
            "sequences here (loss_type grpo there)"
        )
        draft.drop("loss_type", text)
        if not draft.given("loss_type"):
            draft.differs.append(f"loss_type {loss}, the default there, {text}")
    elif loss == "dr_grpo" and name == "grpo":
        draft.put("algorithm.aggregation", "fixed_length", "loss_type", "the sum of tokens by a fixed length")
    elif loss not in ("grpo", "cispo", "sapo") or (loss != "grpo" and name != "grpo"):
        _refuse(draft, level, loss)
    advantages.put(draft)


def _two_sided(draft: Draft, high: float) -> None:
    """Put the bound of ratios, whatever the sign of the advantage; `high`: of the clip range."""
    bound = draft.number("delta")
    if not bound:
        return
    if bound <= 1:
        draft.wrong("delta", "must be above 1: it bounds ratios")
    elif bound < 1 + high:
        text = f"delta {bound:g} bounds ratios of positive advantages, too, and is below 1 + {high:g}"
        draft.put("algorithm.clip_high", round(bound - 1, 12), comment=text, of=("delta", "epsilon_high"))
        text = f"1 + {high:g}, above which negative advantages have no gradient there"
        draft.put("algorithm.dual_clip", 1 + high, comment=text, of=("delta",))
    else:
        draft.put("algorithm.dual_clip", bound, "delta")


def _refuse(draft: Draft, level: str, loss: str) -> None:
    """Say why a loss_type is not converted."""
    given = f"loss_type {loss}"
    theirs = (*_LOSSES, *_ELSEWHERE.get(draft.source.project, ("real", "fipo")))
    if is_unset(loss):
        draft.refuse(f"{given} chooses the objective: {draft.why_unset(loss)}")
    elif loss not in theirs:
        near = near_miss(loss, theirs) or f"; {draft.source.project} has {', '.join(theirs)}"
        draft.refuse(f"{given}: {draft.source.project} has no loss_type of this name{near}")
    elif loss not in _LOSSES:
        draft.refuse(
            f"{given} is another objective: here are a mean over sequences (loss_type grpo), over tokens (dapo) and by "
            "a fixed length (dr_grpo), cispo and sapo"
        )
    else:
        draft.refuse(
            f"{given} with importance_sampling_level {level}: a ratio per sequence has the mean over sequences here "
            f"(loss_type grpo); {loss} needs importance_sampling_level token"
        )


def _reference(draft: Draft, beta: float) -> None:
    """Put the refreshes of the reference model."""
    names = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    still = _stays(draft) if draft.switch("sync_ref_model") and beta else ""
    if still:
        for name in filter(draft.given, ("sync_ref_model", *names)):
            draft.drop(name, still)
        draft.assumed.append(f"{draft.label('sync_ref_model')}: {still}")
        return
    if draft.switch("sync_ref_model") and beta:
        text = "refreshed between two rollouts here, and after that very step there"
        draft.put("algorithm.reference_interval", draft.whole(names[0], 512), names[0], text)
        draft.put("algorithm.reference_mixup", draft.number(names[1], 0.6), names[1])
        draft.credit("algorithm.reference_interval", "sync_ref_model")
        return
    for name in ("sync_ref_model", *names):
        off = name == "sync_ref_model" and not draft.switch(name)
        if draft.given(name):
            draft.drop(name, report.OFF if off else "it is read with sync_ref_model and a beta above 0 only")


def _stays(draft: Draft) -> str:
    """Return why ms-swift does not refresh the reference model although it is told to; empty if it does."""
    if draft.source.project == "ms-swift" and "adapter.type" in draft.settings:
        return "with adapters ms-swift has no reference model of its own, and refreshes nothing"
    return "" if draft.source.project in ("ms-swift", "TRL") else "Megatron-SWIFT refreshes no reference model"


def _without_clipping(draft: Draft, loss: str, high: float) -> None:
    """Put the settings of objectives that clip no ratio."""
    if loss == "sapo":
        for ours, names, default in (
            ("positive", ("sapo_temperature_pos", "tau_pos"), 1.0),
            ("negative", ("sapo_temperature_neg", "tau_neg"), 1.05),
        ):
            found = next((name for name in names if draft.given(name)), None)
            if found is not None:
                draft.put(f"algorithm.gate_{ours}", draft.number(found, default), found)
    elif high > 1:
        text = "the bound of a weight there, its distance from 1 here"
        draft.put("algorithm.clip_high", high - 1, "epsilon_high", text)
    else:
        draft.refuse(f"epsilon_high {high:g}: with loss_type cispo it bounds weights of 1, and must be above 1")


def kept_out(draft: Draft) -> None:
    """Put the completions and tokens that ms-swift and TRL leave out of the loss."""
    for name in ("mask_truncated_completions", "overlong_filter"):
        if draft.given(name) and draft.switch(name):
            if name == "overlong_filter" and draft.given("use_liger_kernel") and draft.switch("use_liger_kernel"):
                draft.drop(name, "with use_liger_kernel ms-swift does not apply it: what is cut off is trained on")
                continue
            draft.put("rollout.truncated", "mask", name)
            loss = draft.text("loss_type")
            if (
                loss in ("dapo", "cispo")
                and draft.source.project != "TRL"
                and "token" == (draft.text("importance_sampling_level") or "token")
            ):
                draft.differs.append(
                    f"{draft.label(name)}: the mean divides by the tokens of all completions there, also of those that "
                    "are cut off, and by those of the others here"
                )
            elif draft.settings.get("algorithm.aggregation", ("sequence", ""))[0] != "token":
                draft.differs.append(
                    f"{draft.label(name)}: the mean divides by all completions there, of which those that are cut off "
                    "count 0, and by those that are left here"
                )
    share = draft.number("top_entropy_quantile", 1.0) if draft.given("top_entropy_quantile") else 1.0
    if share != 1.0 and draft.text("importance_sampling_level") == "sequence":
        reason = "with one ratio per sequence it scales sequences; here it chooses tokens, with name gspo_token or grpo"
        draft.drop("top_entropy_quantile", reason)
    elif share != 1.0:
        draft.put("algorithm.top_entropy_quantile", share, "top_entropy_quantile")
        of = "of all processes" if draft.source.project == "TRL" else "of one process"
        draft.assumed.append(
            f"{draft.label('top_entropy_quantile')}: entropies are those of the policy that sampled, and the threshold "
            f"is that of a whole update; the original compares the tokens of a micro-batch {of} by their present "
            "entropies"
        )
