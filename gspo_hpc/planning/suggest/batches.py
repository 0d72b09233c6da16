"""Advice on batch sizes for a layout: the update, the updates of a rollout, and the token budget, each with its reason.

Sizes are tried with the same estimates that rank layouts. They change what is learned as well as how fast, so
`suggest` gives them as advice and leaves the config's own in its layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.derived import every_ratio_is_one, passes_needed, updates_per_rollout
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.planning.estimates import memory
from gspo_hpc.planning.estimates.phases import HEADROOM
from gspo_hpc.planning.plan import judge

if TYPE_CHECKING:
    from gspo_hpc.planning.layouts import Candidate, Search

ENOUGH = 0.9  # of the most tokens a second that any size reaches: a larger one gains little
USUAL_UPDATES = 4  # of a rollout, in the paper
_USUAL_ROLLOUT, _USUAL_GROUP = 64, 8  # completions of a rollout for each GPU, and for each prompt
_LARGER = (1, 2, 4, 8, 16)  # times the rollout that is given
_BUDGETS = (1, 2, 4, 8)  # longest sequences in a micro-batch


@dataclass(frozen=True)
class Advice:
    """A size, and why."""

    key: str
    value: Any
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc suggest --json` prints them."""
        return vars(self)

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.reason}"


def assumed(config: Config) -> dict[str, int]:
    """Return the batch sizes by which layouts are timed where the config gives none: of a rollout and of its updates.

    Without them every layout would be timed for a single completion, in which nothing but latency shows.
    """
    batch = config.batch
    sizes: dict[str, int] = {} if batch.num_generations else {"num_generations": _USUAL_GROUP}
    if batch.global_batch_size:
        return sizes
    rollout = batch.generation_batch_size or _USUAL_ROLLOUT * config.num_ranks
    if batch.generation_batch_size is None:
        sizes["generation_batch_size"] = rollout
    return sizes | {"global_batch_size": max(1, rollout // (batch.steps_per_generation or USUAL_UPDATES))}


def with_assumed(config: Config) -> Config:
    """Return the config with batch sizes that are assumed in place of those that it does not give."""
    return replace(config, batch=replace(config.batch, **sizes)) if (sizes := assumed(config)) else config


def completions(config: Config) -> int:
    """Return the completions of a rollout of a config whose batch sizes are given."""
    batch = config.batch
    return batch.generation_batch_size or (batch.global_batch_size or 1) * (batch.steps_per_generation or 1)


def advise(search: Search, one: Candidate) -> Iterator[Advice]:
    """Yield advice for a layout whose config gives the size of an update and of a group."""
    batch = one.config.batch
    if not batch.global_batch_size or not batch.num_generations:
        return
    yield from _rollout(search, one)
    if batch.micro_batch_tokens:
        yield from _budget(search, one)


def _rollout(search: Search, one: Candidate) -> Iterator[Advice]:
    """Yield the smallest rollout that keeps the GPUs busy, and the updates that it is divided into."""
    config, gbs = one.config, one.config.batch.global_batch_size
    assert gbs is not None
    updates = max(1, updates_per_rollout(config.batch) // config.batch.num_iterations)
    tried = {}
    for factor in _LARGER:
        changed = _with_batch(config, gbs * factor, updates)
        if not judge(changed, models=search.models, enough=0).broken:
            times = search.times(changed, one.memory)
            tried[gbs * factor] = times.tokens / times.rollout
    if not tried:
        return
    most = max(tried.values())
    size = min(size for size, rate in tried.items() if rate >= ENOUGH * most)
    larger = max((other for other in tried if other > size), key=lambda other: (tried[other], other), default=None)
    more = "" if larger is None else f"{max(0.0, tried[larger] / tried[size] - 1.0):.0%} more"
    if size == gbs and larger is not None:
        reason = f"enough: {larger} completions would bring {more} tokens a second"
    else:
        gain = tried[size] / tried[gbs] - 1.0 if gbs in tried else 0.0
        beyond = "none larger was tried" if larger is None else f"{larger} would bring {more}"
        reason = (
            f"{gain:.0%} more tokens a second than with {gbs}; {beyond}. "
            "The run learns differently, though: it makes fewer updates on the same data"
        )
    yield Advice("batch.global_batch_size", size, reason)
    if updates > USUAL_UPDATES:
        reason = f"the last of {updates} updates of a rollout are far from the policy that sampled, so more is clipped"
    elif updates == 1:
        if every_ratio_is_one(config) and not passes_needed(config).old_logprobs:
            reason = "on-policy: every ratio is 1, nothing is clipped, and no pass for old log-probs is made"
        else:
            reason = (
                "a pass over a rollout is one update, so all completions are as near the policy that sampled as can be"
            )
    else:
        reason = (
            f"at most {USUAL_UPDATES}, as in the paper, so that the last update is still near the policy that sampled"
        )
    yield Advice("batch.steps_per_generation", min(updates, USUAL_UPDATES), reason)


def _budget(search: Search, one: Candidate) -> Iterator[Advice]:
    """Yield the token budget with the shortest step among those that leave enough of the GPU."""
    config, rollout = one.config, one.config.rollout
    longest = rollout.max_prompt_length + rollout.max_response_length
    tried = {}
    for count in _BUDGETS:
        changed = replace(config, batch=replace(config.batch, micro_batch_tokens=count * longest))
        found = memory.estimate(search.arch, changed, search.device)
        if memory.fits(found, changed) and found.headroom >= min(HEADROOM, one.memory.headroom):
            tried[count * longest] = search.times(changed, found).rollout
    if not tried:
        return
    best = min(tried, key=lambda tokens: (tried[tokens], tokens))
    alike = [tokens for tokens, seconds in tried.items() if seconds <= 1.01 * tried[best]]
    count = min(alike) // longest
    reason = (
        f"room for {count} of the longest sequences; the smallest budget whose step is about as short as memory allows"
    )
    yield Advice("batch.micro_batch_tokens", min(alike), reason)


def _with_batch(config: Config, gbs: int, updates: int) -> Config:
    batch = replace(config.batch, global_batch_size=gbs, steps_per_generation=updates, generation_batch_size=None)
    return replace(config, batch=batch)
