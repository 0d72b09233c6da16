"""From graded groups to an optimizer step: advantages, the passes that are needed, packing, the update.

Floor 4. Every rank holds all groups and decides alike; only the micro-batches it computes differ.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gspo_hpc.advantages import group_advantages
from gspo_hpc.algorithms import Objective
from gspo_hpc.batch import PackedBatch, build, split_by_sample, split_experts
from gspo_hpc.config import Config
from gspo_hpc.packing import MicroBatch, Sample, evenness, pack
from gspo_hpc.passes import PassSize, pass_sizes, router_replay
from gspo_hpc.pipeline import StepResult, response_logprobs, train_step
from gspo_hpc.policy import Policy
from gspo_hpc.process_groups import gather_bytes
from gspo_hpc.records import Completion, Experts, Floats, Group

Key = tuple[int, int]  # slot and index of a completion


def with_advantages(groups: Sequence[Group], normalize: bool) -> list[Group]:
    """The groups with the advantage of every completion set from the rewards of its group."""
    result = []
    for group in groups:
        rewards = np.array([c.reward for c in group.completions], dtype=np.float32)
        excluded = np.array([c.excluded for c in group.completions], dtype=np.bool_)
        advantages = group_advantages(rewards, excluded, normalize)
        completions = (replace(c, advantage=float(a)) for c, a in zip(group.completions, advantages, strict=True))
        result.append(group.with_completions(tuple(completions)))
    return result


def minibatch(groups: Sequence[Group], config: Config, update: int) -> list[Group]:
    """The whole groups of optimizer step `update` of a rollout; passes over the rollout repeat them."""
    assert config.batch.global_batch_size and config.batch.num_generations
    count = config.batch.global_batch_size // config.batch.num_generations
    index = update % (len(groups) // count)
    return list(groups[index * count : (index + 1) * count])


@dataclass(frozen=True)
class Passed:
    """What a pass without gradient told, on every rank."""

    logprobs: dict[Key, Floats]
    experts: dict[Key, Experts]  # those of a prompt at (slot, -1); empty where they were not recorded


def logprob_pass(
    policy: Policy,
    groups: Sequence[Group],
    size: PassSize,
    config: Config,
    *,
    replay: bool = True,
    record: bool = False,
) -> Passed:
    """Log-probs of all completions under the current weights. Collective.

    `replay`: tokens go to the experts that they had before, where that is known. `record`: tell which they went to.
    """
    logprobs: dict[Key, Floats] = {}
    experts: dict[Key, Experts] = {}
    batches = _built(policy, groups, _dealt(policy, _samples(groups), size, config), config, replay=replay)
    if batches:
        with policy.routing.recording() if record else contextlib.nullcontext():
            results = response_logprobs(policy, batches, config.rollout.temperature)
        for batch, values in zip(batches, results, strict=True):
            logprobs.update(split_by_sample(values, batch))
        if record:
            recorded = policy.routing.recorded(batches, policy.token_share, policy.sample_share)
            for batch, chosen in zip(batches, recorded, strict=True):
                experts = split_experts(chosen, batch) | experts
    ranks = policy.ranks
    first = ranks.tp_rank == 0 and ranks.pp_rank == 0 and ranks.cp_rank == 0

    def gathered(mine: Mapping[Key, Any]) -> dict[Key, Any]:
        result: dict[Key, Any] = {}
        for part in gather_bytes(_encode(mine) if first else b"", ranks.device):
            result = _decode(part) | result
        return result

    return Passed(gathered(logprobs), gathered(experts) if record else {})


def with_old_logprobs(policy: Policy, groups: Sequence[Group], moved: Sequence[Group], config: Config) -> list[Group]:
    """The groups with the old log-probs of those of them for which the policy will have `moved`. Collective.

    And with the experts that their tokens went to, where the updates are to repeat these.
    """
    record = router_replay(config) == "old_logprobs" and policy.arch.experts is not None
    passed = logprob_pass(policy, moved, pass_sizes(config)["old_logprobs"], config, record=record)
    found = _with(groups, passed.logprobs, lambda c, v: replace(c, old_logprobs=v))
    if not record:
        return found
    found = _with(found, passed.experts, lambda c, v: replace(c, experts=v))
    return [replace(g, prompt_experts=passed.experts.get((g.slot, -1), g.prompt_experts)) for g in found]


def step(policy: Policy, groups: Sequence[Group], objective: Objective, config: Config) -> StepResult | None:
    """One optimizer step on the groups of a global batch; None where nothing in it can move the weights. Collective."""
    counted = [c for group in groups for c in group.completions if not c.excluded]
    tokens = sum(len(c.tokens) for c in counted)
    denominator = tokens if objective.aggregation == "token" else len(counted)
    # Without a KL term a completion of advantage 0 has a gradient of exactly 0: it counts in N and is not computed.
    samples = [
        sample
        for sample in _samples(groups)
        if not _completion(groups, sample).excluded
        and (objective.kl_beta > 0 or _completion(groups, sample).advantage != 0.0)
    ]
    if not samples:
        return None
    size = pass_sizes(config)["update"]
    dealt = _dealt(policy, samples, size, config)
    batches = _built(policy, groups, dealt, config)
    result = train_step(policy, batches, objective, float(denominator), config.rollout.temperature)
    return replace(result, packing=evenness(dealt, size.micro_batch_tokens, config.batch.share_prompts))


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [
        Sample(group.slot, index, len(group.prompt.tokens), len(completion.tokens))
        for group in groups
        for index, completion in enumerate(group.completions)
        if len(completion.tokens)
    ]


def _completion(groups: Sequence[Group], sample: Sample) -> Completion:
    return groups[sample.group - groups[0].slot].completions[sample.index]


def _dealt(policy: Policy, samples: Sequence[Sample], size: PassSize, config: Config) -> list[list[MicroBatch]]:
    """The micro-batches of every data-parallel rank."""
    return pack(
        samples,
        dp_size=policy.ranks.dp_size,
        micro_batch_size=size.micro_batch_size,
        micro_batch_tokens=size.micro_batch_tokens,
        share_prompts=config.batch.share_prompts,
        multiple=policy.ranks.pp_size if len(policy.chunks) > 1 else 1,  # Megatron's interleaved schedule wants it so
    )


def _built(
    policy: Policy,
    groups: Sequence[Group],
    dealt: Sequence[Sequence[MicroBatch]],
    config: Config,
    *,
    replay: bool = True,
) -> list[PackedBatch]:
    """Those of this rank, packed."""
    by_slot = {group.slot: group for group in groups}
    batches = [
        build(by_slot, chosen, share_prompts=config.batch.share_prompts) for chosen in dealt[policy.ranks.dp_rank]
    ]
    return [(one if replay else replace(one, experts=None)).to(policy.ranks.device) for one in batches]


def _with(groups: Sequence[Group], values: Mapping[Key, Any], change: object) -> list[Group]:
    assert callable(change)
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


class Reference:
    """The model as it was at the start, kept in host memory and swapped in for its pass."""

    def __init__(self, policy: Policy) -> None:
        self._weights = [p.detach().cpu().clone() for p in policy.parameters()]

    def with_logprobs(self, policy: Policy, groups: Sequence[Group], config: Config) -> list[Group]:
        """The groups with the log-probs of all completions under the reference's weights, which choose experts
        themselves. Collective."""
        policy.settle()
        parameters = list(policy.parameters())
        with torch.no_grad():
            current = [p.detach().cpu().clone() for p in parameters]
            try:
                _copy(parameters, self._weights)
                passed = logprob_pass(policy, groups, pass_sizes(config)["reference"], config, replay=False)
            finally:
                _copy(parameters, current)
        return _with(groups, passed.logprobs, lambda c, v: replace(c, reference_logprobs=v))


def _copy(parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
