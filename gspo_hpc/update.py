"""From graded groups to an optimizer step: advantages, the passes that are needed, packing, the update.

Floor 4. Every rank holds all groups and decides alike; only the micro-batches it computes differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gspo_hpc.advantages import group_advantages
from gspo_hpc.algorithms import Objective
from gspo_hpc.batch import PackedBatch, build, split_by_sample
from gspo_hpc.config import Config
from gspo_hpc.packing import Sample, pack
from gspo_hpc.pipeline import Policy, StepResult, response_logprobs, train_step
from gspo_hpc.plan import PassSize, pass_sizes
from gspo_hpc.process_groups import gather_bytes
from gspo_hpc.records import Completion, Floats, Group

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


def logprob_pass(policy: Policy, groups: Sequence[Group], size: PassSize, config: Config) -> dict[Key, Floats]:
    """Log-probs of all completions under the current weights, on every rank. Collective."""
    mine: dict[Key, Floats] = {}
    batches = _pack(policy, groups, _samples(groups), size, config)
    if batches:
        for batch, values in zip(batches, response_logprobs(policy, batches, config.rollout.temperature), strict=True):
            mine.update(split_by_sample(values, batch))
    ranks = policy.ranks
    first = ranks.tp_rank == 0 and ranks.pp_rank == 0 and ranks.cp_rank == 0
    payload = _encode(mine) if first else b""
    result: dict[Key, Floats] = {}
    for part in gather_bytes(payload, ranks.device):
        result.update(_decode(part))
    return result


def with_old_logprobs(groups: Sequence[Group], values: dict[Key, Floats]) -> list[Group]:
    """The groups with the old log-probs that the pass gave; completions it did not cover keep theirs."""
    return _with(groups, values, lambda c, v: replace(c, old_logprobs=v))


def with_reference_logprobs(groups: Sequence[Group], values: dict[Key, Floats]) -> list[Group]:
    """The groups with the reference model's log-probs."""
    return _with(groups, values, lambda c, v: replace(c, reference_logprobs=v))


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
    batches = _pack(policy, groups, samples, pass_sizes(config)["update"], config)
    return train_step(policy, batches, objective, float(denominator), config.rollout.temperature)


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [
        Sample(group.slot, index, len(group.prompt.tokens), len(completion.tokens))
        for group in groups
        for index, completion in enumerate(group.completions)
        if len(completion.tokens)
    ]


def _completion(groups: Sequence[Group], sample: Sample) -> Completion:
    return groups[sample.group - groups[0].slot].completions[sample.index]


def _pack(
    policy: Policy, groups: Sequence[Group], samples: Sequence[Sample], size: PassSize, config: Config
) -> list[PackedBatch]:
    if not samples:
        return []
    dealt = pack(
        samples,
        dp_size=policy.ranks.dp_size,
        micro_batch_size=size.micro_batch_size,
        micro_batch_tokens=size.micro_batch_tokens,
        share_prompts=config.batch.share_prompts,
        multiple=policy.ranks.pp_size if len(policy.chunks) > 1 else 1,  # Megatron's interleaved schedule wants it so
    )
    by_slot = {group.slot: group for group in groups}
    return [
        build(by_slot, chosen, share_prompts=config.batch.share_prompts).to(policy.ranks.device)
        for chosen in dealt[policy.ranks.dp_rank]
    ]


def _with(groups: Sequence[Group], values: dict[Key, Floats], change: object) -> list[Group]:
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


def _encode(values: dict[Key, Floats]) -> bytes:
    header = json.dumps([[slot, index, len(array)] for (slot, index), array in values.items()]).encode()
    body = b"".join(array.astype("<f4").tobytes() for array in values.values())
    return len(header).to_bytes(8, "little") + header + body


def _decode(payload: bytes) -> dict[Key, Floats]:
    if not payload:
        return {}
    size = int.from_bytes(payload[:8], "little")
    result: dict[Key, Floats] = {}
    position = 8 + size
    for slot, index, length in json.loads(payload[8 : 8 + size]):
        result[slot, index] = np.frombuffer(payload, "<f4", length, position).astype(np.float32)
        position += 4 * length
    return result


class Reference:
    """The model as it was at the start, kept in host memory and swapped in for its pass."""

    def __init__(self, policy: Policy) -> None:
        self._weights = [p.detach().cpu().clone() for p in policy.parameters()]

    def logprobs(self, policy: Policy, groups: Sequence[Group], size: PassSize, config: Config) -> dict[Key, Floats]:
        """Log-probs of all completions under the reference's weights. Collective."""
        policy.settle()
        parameters = list(policy.parameters())
        with torch.no_grad():
            current = [p.detach().cpu().clone() for p in parameters]
            try:
                _copy(parameters, self._weights)
                return logprob_pass(policy, groups, size, config)
            finally:
                _copy(parameters, current)


def _copy(parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
