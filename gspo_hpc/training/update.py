"""Advantages, log-prob passes and the optimizer step of graded groups.

Every rank holds all groups and decides alike; only the micro-batches it computes differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gspo_hpc.algorithms.advantages import group_advantages
from gspo_hpc.algorithms.objective import Objective
from gspo_hpc.config.derived import PassName, PassSize, pass_sizes, router_replay
from gspo_hpc.config.schema import Config
from gspo_hpc.data.packing import MicroBatch, Sample, evenness, pack
from gspo_hpc.data.records import Completion, Experts, Floats, Group
from gspo_hpc.ops.batch import PackedBatch, build, split_by_sample, split_experts
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import gather_bytes
from gspo_hpc.policy.schedule import StepResult, response_logprobs, train_step

Key = tuple[int, int]  # slot and index of a completion


def with_advantages(groups: Sequence[Group], normalize: bool) -> list[Group]:
    """Return the groups with the advantage of every completion, computed from the rewards of its group."""
    result = []
    for group in groups:
        rewards = np.array([c.reward for c in group.completions], dtype=np.float32)
        excluded = np.array([c.excluded for c in group.completions], dtype=np.bool_)
        advantages = group_advantages(rewards, excluded, normalize)
        completions = (replace(c, advantage=float(a)) for c, a in zip(group.completions, advantages, strict=True))
        result.append(group.with_completions(tuple(completions)))
    return result


def minibatch(groups: Sequence[Group], config: Config, update: int) -> list[Group]:
    """Return the whole groups of optimizer step `update` of a rollout; later iterations over it repeat them."""
    assert config.batch.global_batch_size and config.batch.num_generations
    count = config.batch.global_batch_size // config.batch.num_generations
    index = update % (len(groups) // count)
    return list(groups[index * count : (index + 1) * count])


@dataclass(frozen=True)
class GroupLogprobs:
    """The result of a log-prob pass over groups, on every rank."""

    logprobs: dict[Key, Floats]
    experts: dict[Key, Experts]  # those of a prompt at (slot, -1); empty where they were not recorded


def logprob_pass(
    policy: Policy,
    groups: Sequence[Group],
    name: PassName,
    config: Config,
    *,
    replay: bool = True,
    record: bool = False,
    monitor: PassMonitor | None = None,
) -> GroupLogprobs:
    """Return the log-probs of all completions under the current weights. Collective.

    `name` decides the size of its micro-batches. `replay`: tokens go to the experts that they had before, where that is
    known. `record`: the result has the experts that they went to.
    """
    logprobs: dict[Key, Floats] = {}
    experts: dict[Key, Experts] = {}
    distributed = _distribute(policy, _samples(groups), pass_sizes(config)[name], config)
    batches = _pack_own(policy, groups, distributed, config, replay=replay)
    if batches:
        temperature = config.rollout.temperature
        result = response_logprobs(policy, batches, temperature, name=name, record_experts=record, monitor=monitor)
        for batch, values in zip(batches, result.logprobs, strict=True):
            logprobs.update(split_by_sample(values, batch))
        if record:
            for batch, chosen in zip(batches, result.experts, strict=True):
                experts = split_experts(chosen, batch) | experts
    ranks = policy.ranks
    first = ranks.tp_rank == 0 and ranks.pp_rank == 0 and ranks.cp_rank == 0

    def gathered(mine: Mapping[Key, Any]) -> dict[Key, Any]:
        result: dict[Key, Any] = {}
        for part in gather_bytes(_encode(mine) if first else b"", ranks.device):
            result = _decode(part) | result
        return result

    return GroupLogprobs(gathered(logprobs), gathered(experts) if record else {})


def with_old_logprobs(
    policy: Policy,
    groups: Sequence[Group],
    moved: Sequence[Group],
    config: Config,
    *,
    monitor: PassMonitor | None = None,
) -> list[Group]:
    """Return the groups with old log-probs in `moved`, those of them that are trained on after a first update.

    They also have the experts that their tokens went to, if updates are to repeat these. Collective.
    """
    record = router_replay(config) == "old_logprobs" and policy.arch.experts is not None
    passed = logprob_pass(policy, moved, "old_logprobs", config, record=record, monitor=monitor)
    found = with_values(groups, passed.logprobs, lambda c, v: replace(c, old_logprobs=v))
    if not record:
        return found
    found = with_values(found, passed.experts, lambda c, v: replace(c, experts=v))
    return [replace(g, prompt_experts=passed.experts.get((g.slot, -1), g.prompt_experts)) for g in found]


def step(
    policy: Policy,
    groups: Sequence[Group],
    objective: Objective,
    config: Config,
    *,
    monitor: PassMonitor | None = None,
) -> StepResult | None:
    """Make one optimizer step on the groups of a global batch; None if nothing in it can move the weights. Collective.

    Raises Abandoned on all ranks, with nothing changed, if `monitor` requests a stop on one of them.
    """
    counted = [c for group in groups for c in group.completions if not c.excluded]
    tokens = sum(len(c.tokens) for c in counted)
    denominator = objective.denominator(len(counted), tokens)
    # Without a KL term a completion of advantage 0 has a gradient of exactly 0: it counts in N and is not computed.
    samples = [
        sample
        for sample in _samples(groups)
        if not _completion(groups, sample).excluded
        and (objective.kl_beta > 0 or _completion(groups, sample).advantage != 0.0)
    ]
    if not samples:
        policy.scheduler.step(1)  # the learning rate follows the steps of the run, as after every other update
        return None
    size = pass_sizes(config)["update"]
    distributed = _distribute(policy, samples, size, config)
    batches = _pack_own(policy, groups, distributed, config)
    temperature = config.rollout.temperature
    result = train_step(policy, batches, objective, float(denominator), temperature, monitor=monitor)
    return replace(result, packing=evenness(distributed, size.micro_batch_tokens, config.batch.share_prompts))


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [
        Sample(group.slot, index, len(group.prompt.tokens), len(completion.tokens))
        for group in groups
        for index, completion in enumerate(group.completions)
        if len(completion.tokens)
    ]


def _completion(groups: Sequence[Group], sample: Sample) -> Completion:
    return groups[sample.group - groups[0].slot].completions[sample.index]


def _distribute(policy: Policy, samples: Sequence[Sample], size: PassSize, config: Config) -> list[list[MicroBatch]]:
    """Return the micro-batches of every data-parallel rank."""
    return pack(
        samples,
        dp_size=policy.ranks.dp_size,
        micro_batch_size=size.micro_batch_size,
        micro_batch_tokens=size.micro_batch_tokens,
        share_prompts=config.batch.share_prompts,
        multiple=policy.ranks.pp_size if len(policy.chunks) > 1 else 1,  # for Megatron's interleaved schedule
    )


def _pack_own(
    policy: Policy,
    groups: Sequence[Group],
    distributed: Sequence[Sequence[MicroBatch]],
    config: Config,
    *,
    replay: bool = True,
) -> list[PackedBatch]:
    """Return the micro-batches of this rank, packed."""
    by_slot = {group.slot: group for group in groups}
    batches = [
        build(by_slot, chosen, share_prompts=config.batch.share_prompts) for chosen in distributed[policy.ranks.dp_rank]
    ]
    return [(one if replay else replace(one, experts=None)).to(policy.ranks.device) for one in batches]


def with_values(
    groups: Sequence[Group], values: Mapping[Key, Any], change: Callable[[Completion, Any], Completion]
) -> list[Group]:
    """Return the groups with `change(completion, value)` in the place of every completion that has a value."""
    return [
        group.with_completions(
            tuple(
                change(c, values[group.slot, i]) if (group.slot, i) in values else c
                for i, c in enumerate(group.completions)
            )
        )
        for group in groups
    ]


def _encode(values: Mapping[Key, np.ndarray]) -> bytes:
    little = {key: array.astype(array.dtype.newbyteorder("<")) for key, array in values.items()}
    header = json.dumps([[*key, array.dtype.str, array.shape] for key, array in little.items()]).encode()
    return len(header).to_bytes(8, "little") + header + b"".join(array.tobytes() for array in little.values())


def _decode(payload: bytes) -> dict[Key, np.ndarray]:
    if not payload:
        return {}
    size = int.from_bytes(payload[:8], "little")
    result: dict[Key, np.ndarray] = {}
    position = 8 + size
    for slot, index, kind, shape in json.loads(payload[8 : 8 + size]):
        array = np.frombuffer(payload, kind, math.prod(shape), position).reshape(shape)
        result[slot, index] = array.astype(array.dtype.newbyteorder("="))
        position += array.nbytes
    return result
