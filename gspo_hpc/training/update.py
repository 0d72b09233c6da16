"""Advantages, log-prob passes and the optimizer step of graded groups.

Every rank knows the table of all groups and decides alike. It gets only the samples of the micro-batches that it
computes, from the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gspo_hpc.algorithms.objective import BatchSize, Objective
from gspo_hpc.algorithms.terms import top_entropy
from gspo_hpc.algorithms.terms.advantages import batch_scale, by_reward, group_advantages
from gspo_hpc.config.algorithm import Advantage
from gspo_hpc.config.derived import PassName, PassSize, pass_sizes, router_replay
from gspo_hpc.config.schema import Config
from gspo_hpc.data.packing import Assignment, evenness, pack, token_count
from gspo_hpc.data.records import Completion, Experts, Floats, Group
from gspo_hpc.data.table import EXCLUDED, TRUNCATED, GroupTable, ShardedGroups
from gspo_hpc.exchange.exchange import Exchange, Key
from gspo_hpc.ops.batch import PackedBatch, build, split_by_sample, split_experts
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.schedule import StepResult, response_logprobs, train_step


def with_advantages(
    groups: Sequence[Group], normalize: bool, kind: Advantage = "group", weights: Mapping[str, float] | None = None
) -> list[Group]:
    """Return the groups with the advantage of every completion, computed from the rewards of its group.

    `weights`: those of the reward functions by their names in `reward_parts`, for the kind "gdpo" alone. A function
    that failed where that is no reason to leave the completion out gave 0.
    """
    result = []
    for group in groups:
        excluded = np.array([c.excluded for c in group.completions], dtype=np.bool_)
        if kind == "gdpo":
            assert weights, "gdpo needs the names and weights of the reward functions"
            parts = [[c.reward_parts.get(name, 0.0) for name in weights] for c in group.completions]
            advantages = by_reward(np.array(parts, dtype=np.float64), [*weights.values()], excluded)
        else:
            rewards = np.array([c.reward for c in group.completions], dtype=np.float32)
            advantages = group_advantages(rewards, excluded, normalize, kind)
        completions = (replace(c, advantage=float(a)) for c, a in zip(group.completions, advantages, strict=True))
        result.append(group.with_completions(tuple(completions)))
    return result


def without_truncated(groups: Sequence[Group], config: Config) -> list[Group]:
    """Return the groups in which completions that were cut off are excluded, if rollout.truncated says so.

    They have no part in advantages and loss then, as those without a reward. This follows from what the journal has.
    """
    if config.rollout.truncated != "exclude":
        return list(groups)

    def judged(c: Completion) -> Completion:
        return replace(c, excluded=c.excluded or c.finish_reason == "length")

    return [group.with_completions(tuple(map(judged, group.completions))) for group in groups]


def in_loss(table: GroupTable, config: Config) -> npt.NDArray[np.bool_]:
    """Return True for every row that has a part in the loss and in what it is divided by."""
    left_out = EXCLUDED | TRUNCATED if config.rollout.truncated == "mask" else EXCLUDED
    return ~table.flagged(left_out)


def signals(table: GroupTable, config: Config) -> dict[int, bool]:
    """Return by slot whether a group has anything to learn from, before the reference has a say.

    It has if a completion that counts in the loss has an advantage, or where rollout.dynamic_sampling_metric names a
    reward function, if completions that count have different values of it.
    """
    found = dict.fromkeys(table.slots, False)
    metric = config.rollout.dynamic_sampling_metric
    if metric is None:
        moves = in_loss(table, config) & (table.rows["advantage"] != 0.0)
        return found | dict.fromkeys(table.select(moves).slots, True)
    if metric not in table.names:  # nothing was graded
        return found
    column = table.names.index(metric)
    counted = table.select(~table.flagged(EXCLUDED) & table.graded[:, column])
    if not len(counted):
        return found
    slots, first = np.unique(counted.rows["slot"], return_index=True)  # rows are in the order of slots
    values = counted.reward_parts[:, column]
    differ = np.maximum.reduceat(values, first) > np.minimum.reduceat(values, first)
    return found | dict(zip(slots.tolist(), differ.tolist(), strict=True))


def with_penalised_advantages(groups: ShardedGroups, objective: Objective, exchange: Exchange) -> ShardedGroups:
    """Return the groups with advantages of rewards that have the KL term taken off: of every token, added up.

    The divergence is that of the policy that sampled, as the engine has its log-probs, from the reference. Rewards
    themselves stay as they were graded. Collective.
    """

    def penalty(c: Completion) -> float:
        if not len(c.tokens):
            return 0.0
        assert c.reference_logprobs is not None, "a KL term needs the reference's log-probs"
        moved = torch.from_numpy(c.reference_logprobs.astype(np.float64) - c.logprobs.astype(np.float64))
        return objective.kl_beta * float(objective.kl(moved).sum())

    lowered = [
        group.with_completions(tuple(replace(c, reward=c.reward - penalty(c)) for c in group.completions))
        for group in groups.own.values()
    ]
    advantages = with_advantages(lowered, objective.normalize_advantage, objective.advantage)
    found = with_batch_advantages(exchange.gather_table(advantages), objective.advantage).table
    assert (found.rows[["slot", "index"]] == groups.table.rows[["slot", "index"]]).all(), "rows in another order"
    return _with_table_advantages(groups, found.rows["advantage"])


def with_batch_advantages(groups: ShardedGroups, kind: Advantage) -> ShardedGroups:
    """Return the groups with advantages divided by what the whole rollout says, if this kind of advantage does that.

    It follows from the table, which every rank has, so it is the same on every rank and for every layout.
    """
    rows = groups.table.rows
    scale = batch_scale(rows["reward"], rows["advantage"], groups.table.flagged(EXCLUDED), kind)
    if scale == 1.0:
        return groups
    return _with_table_advantages(groups, rows["advantage"] / scale)


def _with_table_advantages(groups: ShardedGroups, advantages: npt.NDArray[np.floating]) -> ShardedGroups:
    """Return the groups with these advantages, one for each row of the table, in the table and in the completions."""
    rows = groups.table.rows.copy()
    rows["advantage"] = np.float32(advantages)
    here = rows[["slot", "index", "advantage"]][np.isin(rows["slot"], list(groups.own))]
    found = {(slot, index): a for slot, index, a in here.tolist()}
    scaled = with_values(groups, found, lambda c, a: replace(c, advantage=a))
    return replace(scaled, table=replace(groups.table, rows=rows))


def minibatch(groups: ShardedGroups, config: Config, update: int) -> ShardedGroups:
    """Return the whole groups of optimizer step `update` of a rollout; later iterations over it repeat them."""
    assert config.batch.global_batch_size and config.batch.num_generations
    slots = groups.table.slots
    count = config.batch.global_batch_size // config.batch.num_generations
    index = update % (len(slots) // count)
    return groups.at(slots[index * count : (index + 1) * count])


@dataclass(frozen=True)
class GroupLogprobs:
    """The result of a log-prob pass, of the groups that this rank holds."""

    logprobs: dict[Key, Floats]
    entropies: dict[Key, Floats]  # empty where they were not asked for
    experts: dict[Key, Experts]  # those of a prompt at (slot, -1); empty where they were not recorded


def logprob_pass(
    policy: Policy,
    groups: ShardedGroups,
    name: PassName,
    config: Config,
    *,
    replay: bool = True,
    record: bool = False,
    entropies: bool = False,
    monitor: PassMonitor | None = None,
) -> GroupLogprobs:
    """Return the log-probs of all completions under the current weights, on the ranks that hold them. Collective.

    `name` decides the size of its micro-batches. `replay`: tokens go to the experts that they had before, where that is
    known. `record`: the result has the experts that they went to. `entropies`: it has the entropy of every token, too.
    """
    distributed = _distribute(policy, groups.table.samples(), pass_sizes(config)[name], config)

    def run() -> tuple[dict[Key, Floats], dict[Key, Experts]]:
        """Return what the micro-batches of this rank give, by sample; they and their tensors are gone by then."""
        values: dict[Key, Floats] = {}
        experts: dict[Key, Experts] = {}
        batches = _pack_own(policy, groups, distributed, config, training=False, replay=replay)
        if not batches:
            return values, experts
        temperature = config.rollout.temperature
        result = response_logprobs(policy, batches, temperature, name=name, record_experts=record, monitor=monitor)
        for batch, logprobs, entropy in zip(batches, result.logprobs, result.entropies, strict=True):
            found = split_by_sample(logprobs, batch)
            beside = split_by_sample(entropy, batch) if entropies else {}
            values |= {key: np.stack((found[key], beside[key])) if entropies else found[key] for key in found}
        for batch, chosen in zip(batches, result.experts, strict=True) if record else ():
            experts = split_experts(chosen, batch) | experts
        return values, experts

    values, experts = run()
    values, experts = policy.ranks.exchange.return_results(groups, distributed, values, experts if record else None)
    if not entropies:
        return GroupLogprobs(values, {}, experts)
    return GroupLogprobs({key: v[0] for key, v in values.items()}, {key: v[1] for key, v in values.items()}, experts)


def with_old_logprobs(
    policy: Policy,
    groups: ShardedGroups,
    moved: ShardedGroups,
    config: Config,
    *,
    monitor: PassMonitor | None = None,
) -> ShardedGroups:
    """Return the groups with old log-probs in `moved`, those of them that are trained on after a first update.

    They also have the experts that their tokens went to, if updates are to repeat these. With
    algorithm.top_entropy_quantile below 1 the pass is over all of the groups, and says which tokens are trained.
    Collective.
    """
    record = router_replay(config) == "old_logprobs" and policy.arch.experts is not None
    share = config.algorithm.top_entropy_quantile
    passed = logprob_pass(
        policy,
        moved if share == 1 else groups,
        "old_logprobs",
        config,
        record=record,
        entropies=share < 1,
        monitor=monitor,
    )
    slots = set(moved.table.slots)
    old = {key: values for key, values in passed.logprobs.items() if key[0] in slots}
    found = with_values(groups, old, lambda c, v: replace(c, old_logprobs=v))
    if share < 1:
        found = with_selected_tokens(found, passed.entropies, config, policy.ranks.exchange)
    if not record:
        return found
    return with_experts(found, {key: chosen for key, chosen in passed.experts.items() if key[0] in slots})


def with_experts(groups: ShardedGroups, experts: Mapping[Key, Experts]) -> ShardedGroups:
    """Return the groups with experts [tokens, layers, top_k] that updates repeat; those of a prompt at (slot, -1)."""
    found = with_values(groups, experts, lambda c, v: replace(c, experts=v))
    own = {slot: replace(g, prompt_experts=experts.get((slot, -1), g.prompt_experts)) for slot, g in found.own.items()}
    return found.with_own(own)


def with_selected_tokens(
    groups: ShardedGroups, entropies: Mapping[Key, Floats], config: Config, exchange: Exchange
) -> ShardedGroups:
    """Return the groups whose completions say which tokens are the most uncertain of their update.

    These are the share algorithm.top_entropy_quantile of the tokens that have a part in the loss. `entropies`
    [sampled_len] are those of completions that this rank holds, under the weights that sampled: so the choice is the
    same for every update that repeats a completion, and is saved with the rollout. Collective.
    """
    assert config.batch.global_batch_size and config.batch.num_generations
    updates = len(groups.table.slots) * config.batch.num_generations // config.batch.global_batch_size
    here = groups.table.select(np.isin(groups.table.rows["slot"], list(groups.own)))
    counted = set(here.rows[["slot", "index"]][in_loss(here, config)].tolist())
    parts = [minibatch(groups, config, number).own for number in range(updates)]
    own = [[key for key in sorted(entropies) if key[0] in part and key in counted] for part in parts]
    nothing = np.zeros(0, np.float32)
    mine = [np.concatenate([nothing, *(entropies[key] for key in keys)]) for keys in own]
    lowest = top_entropy.thresholds(mine, config.algorithm.top_entropy_quantile, exchange.transport.sum)
    chosen = {
        key: top_entropy.reached(entropies[key], threshold)
        for keys, threshold in zip(own, lowest, strict=True)
        for key in keys
    }
    return with_values(groups, chosen, lambda c, flags: replace(c, selected=flags))


def with_engine_logprobs(groups: ShardedGroups) -> ShardedGroups:
    """Return the groups with the engine's log-probs of sampled tokens as old ones."""
    old = {
        slot: group.with_completions(tuple(replace(c, old_logprobs=c.logprobs) for c in group.completions))
        for slot, group in groups.own.items()
    }
    return groups.with_own(old)


def step(
    policy: Policy,
    groups: ShardedGroups,
    objective: Objective,
    config: Config,
    *,
    recorded: Sequence[int] = (),
    sampled_by_this: bool = False,
    monitor: PassMonitor | None = None,
) -> StepResult | None:
    """Make one optimizer step on the groups of a global batch; None if nothing in it can move the weights. Collective.

    `recorded`: slots whose log-probs the result has, on the ranks that hold them; none of what was not computed.
    `sampled_by_this`: the present weights sampled all of it.

    Raises Abandoned on all ranks, with nothing changed, if `monitor` requests a stop on one of them.
    """
    table = groups.table
    counted = in_loss(table, config)
    lengths, slots = table.rows["sampled_len"][counted], table.rows["slot"][counted]
    size = BatchSize(int(counted.sum()), int(lengths.sum()), len(np.unique(slots)), config.rollout.max_response_length)
    denominator = objective.denominator(size)
    # Without a KL term in the loss or an entropy bonus, a completion of advantage 0 has a gradient of exactly 0: it
    # counts in N and is not computed.
    moving = counted if objective.moves_all else counted & (table.rows["advantage"] != 0.0)
    samples = table.select(moving).samples()
    if not len(samples):
        policy.scheduler.step(1)  # the learning rate follows the steps of the run, as after every other update
        return None
    pass_size = pass_sizes(config)["update"]
    distributed = _distribute(policy, samples, pass_size, config)
    batches = _pack_own(policy, groups, distributed, config, training=True)
    if objective.aggregation == "prompt":
        tokens = dict(zip(*_sums(slots, lengths), strict=True))
        batches = [_with_prompt_tokens(batch, tokens) for batch in batches]
    temperature = config.rollout.temperature
    keep = frozenset(recorded)
    result = train_step(
        policy,
        batches,
        objective,
        float(denominator),
        temperature,
        keep=keep,
        sampled_by_this=sampled_by_this,
        monitor=monitor,
    )
    logprobs = result.logprobs
    if keep:
        logprobs, _ = policy.ranks.exchange.return_results(groups, distributed.only(keep), result.logprobs, None)
    tokens_here = sum(token_count(batch, config.batch.share_prompts) for batch in distributed.batches)
    most, total = policy.ranks.exchange.spread(tokens_here)
    packing = evenness(most, total, policy.ranks.dp_size, len(distributed.batches), pass_size.micro_batch_tokens)
    return replace(result, packing=packing, logprobs=logprobs)


def _sums(slots: npt.NDArray[np.integer], values: npt.NDArray[np.integer]) -> tuple[list[int], list[int]]:
    """Return every slot once, and the sum of its values."""
    found, places = np.unique(slots, return_inverse=True)
    return found.tolist(), np.bincount(places, weights=values).astype(np.int64).tolist()


def _with_prompt_tokens(batch: PackedBatch, tokens: Mapping[int, int]) -> PackedBatch:
    """Return the micro-batch with the response tokens of the prompt of each of its samples."""
    values = [tokens.get(slot, 0) for slot, _ in batch.keys]
    return replace(batch, prompt_tokens=torch.tensor(values, dtype=torch.int64, device=batch.tokens.device))


def _distribute(policy: Policy, samples: npt.NDArray[np.int64], size: PassSize, config: Config) -> Assignment:
    """Return which data-parallel rank computes each sample, and the micro-batches of this one."""
    return pack(
        samples,
        dp_size=policy.ranks.dp_size,
        rank=policy.ranks.dp_rank,
        micro_batch_size=size.micro_batch_size,
        micro_batch_tokens=size.micro_batch_tokens,
        share_prompts=config.batch.share_prompts,
        multiple=policy.ranks.pp_size if len(policy.chunks) > 1 else 1,  # for Megatron's interleaved schedule
    )


def _pack_own(
    policy: Policy,
    groups: ShardedGroups,
    distributed: Assignment,
    config: Config,
    *,
    training: bool,
    replay: bool = True,
) -> list[PackedBatch]:
    """Return the micro-batches of this rank, packed, from samples that other ranks hold. Collective."""
    ranks = policy.ranks
    by_slot = ranks.exchange.fetch(groups, distributed, training=training, experts=replay)
    share = config.batch.share_prompts
    return [build(by_slot, chosen, share_prompts=share).to(ranks.device) for chosen in distributed.batches]


def with_values(
    groups: ShardedGroups, values: Mapping[Key, Any], change: Callable[[Completion, Any], Completion]
) -> ShardedGroups:
    """Return the groups with `change(completion, value)` in the place of every completion here that has a value."""
    return groups.with_own(
        {
            slot: group.with_completions(
                tuple(change(c, values[slot, i]) if (slot, i) in values else c for i, c in enumerate(group.completions))
            )
            for slot, group in groups.own.items()
        }
    )
