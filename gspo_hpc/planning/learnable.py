"""Warnings about settings that are allowed, and with which a run learns nothing, or next to nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gspo_hpc.config.constants import COLD, NARROW_K, NARROW_P
from gspo_hpc.config.derived import rewards_count, updates_per_rollout
from gspo_hpc.planning.builder import PlanBuilder

_SHORT = 4  # tokens: shorter completions hardly ever end by themselves
_STILL = 1e-9  # a learning rate with which weights of 0.02 do not change even in float32
_WILD = 0.01  # a learning rate with which Adam moves every weight by half of what it is
_HELD = 1.0  # a weight of the KL term with which it outweighs advantages
_NARROW = 1e-5  # a clip range of which nothing is left between two updates
_HASTY = 0.01  # seconds: a call of a reward function takes longer than this by being sent to its process
_FEWEST, _MOST = 1e6, 1e13  # parameters of a model that is not known, at least, and of any model
_SPARSE = 0.01  # share of tokens that are trained


def warnings(plan: PlanBuilder) -> Iterator[str]:
    """Yield a line for each reason why groups have no signal, or why an update changes nothing or destroys weights."""
    yield from _samples(plan)
    yield from _rewards(plan)
    yield from _objective(plan)
    yield from _optimizer(plan)


def _samples(plan: PlanBuilder) -> Iterator[str]:
    rollout = plan.config.rollout
    greedy = [
        *([f"rollout.temperature ({rollout.temperature:g})"] if rollout.temperature < COLD else []),
        *([f"rollout.top_p ({rollout.top_p:g})"] if rollout.top_p < NARROW_P else []),
        *([f"rollout.top_k ({rollout.top_k})"] if 0 < rollout.top_k < NARROW_K else []),
    ]
    if greedy:
        yield (
            f"{' and '.join(greedy)} nearly always take{'s' * (len(greedy) == 1)} the likeliest token: the completions "
            "of a group are then alike, and a group whose rewards are all the same has no advantage and trains "
            "nothing; recipes sample with temperature 0.6 to 1, top_p 1 and top_k -1"
        )
    if (longest := rollout.max_response_length) < _SHORT:
        lost = ", and rollout.truncated leaves those out of the loss" if rollout.truncated != "train" else ""
        yield (
            f"rollout.max_response_length ({longest}) cuts off nearly every completion, since its end is a token as "
            f"well{lost}"
        )


def _rewards(plan: PlanBuilder) -> Iterator[str]:
    reward = plan.config.reward
    if rewards_count(plan.config) and reward.functions and not any(term.weight for term in reward.functions):
        yield "every weight of reward.functions is 0: all rewards are 0, so no group has an advantage"
    limits = {term.timeout: "timeout of a reward function" for term in reward.functions if term.timeout is not None}
    for seconds, setting in (limits | {reward.timeout: "reward.timeout"}).items():
        if seconds >= _HASTY:
            continue
        yield (
            f"{setting} ({seconds:g} s) ends calls of reward functions before they can answer: sending a "
            "call to its process takes longer, so no completion gets a reward"
        )


def _objective(plan: PlanBuilder) -> Iterator[str]:
    settings = plan.config.algorithm
    if settings.kl_beta >= _HELD and not settings.has_teacher:
        yield (
            f"algorithm.kl_beta ({settings.kl_beta:g}) holds the policy where it is: the KL term outweighs advantages, "
            "which are about 1; recipes have 0 to 0.1"
        )
    narrowest = min(settings.clip_low, settings.clip_high)
    if (
        (settings.trust_region, settings.ratio == "token") == ("clip", False)  # of single tokens others warn
        and narrowest < _NARROW
        and updates_per_rollout(plan.config.batch) > 1
    ):
        yield (
            f"a clip range of {narrowest:g} leaves nothing to the updates of a rollout after its first: every ratio "
            "has left the range by then; the GSPO paper has 3e-4 and 4e-4"
        )
    if settings.top_entropy_quantile < _SPARSE:
        yield (
            f"algorithm.top_entropy_quantile ({settings.top_entropy_quantile:g}) is the share of tokens that are "
            "trained; its paper has 0.2"
        )


def _optimizer(plan: PlanBuilder) -> Iterator[str]:
    optimizer, steps = plan.config.optimizer, plan.quantities.get("max_steps")
    rate = optimizer.lr
    if rate == 0:
        yield "optimizer.lr (0) changes no weight"
        return
    if rate < _STILL:
        yield (
            f"optimizer.lr ({rate:g}) is too small to change weights: Adam moves a weight by about the learning rate, "
            "and a weight of 0.02 resolves 2e-9 in float32; recipes have 1e-7 to 1e-5"
        )
    if rate >= _WILD:
        yield (
            f"optimizer.lr ({rate:g}) destroys a model: Adam moves every weight by about the learning rate in each "
            "step, and weights are about 0.02; recipes have 1e-7 to 1e-5"
        )
    warmup = optimizer.lr_warmup_steps
    if steps is not None and warmup >= steps:
        yield (
            f"optimizer.lr_warmup_steps ({warmup}) is not below the {int(steps)} steps of the run: the learning rate "
            f"still rises at its end, at {rate * float(steps) / warmup:.2g} of {rate:g}"
        )
    if (shrunk := rate * optimizer.weight_decay) >= _WILD:
        yield (
            f"optimizer.weight_decay ({optimizer.weight_decay:g}) takes {min(shrunk, 1):.0%} off every weight in each "
            "step; recipes have 0 to 0.1"
        )
    if not optimizer.clip_grad or optimizer.clip_grad / math.sqrt(_MOST) >= optimizer.adam_eps:
        return
    if (each := optimizer.clip_grad / math.sqrt(_parameters(plan))) < optimizer.adam_eps:
        yield (
            f"optimizer.clip_grad ({optimizer.clip_grad:g}) leaves a weight a gradient of about {each:.1g}, which is "
            f"below optimizer.adam_eps ({optimizer.adam_eps:g}): Adam's steps shrink with it; usual are 1 and 1e-8"
        )


def _parameters(plan: PlanBuilder) -> float:
    from gspo_hpc.planning.estimates.parameters import parameters  # only here: most optimizers are as they should be

    return _FEWEST if plan.architecture is None else parameters(plan.architecture)
