"""One packed micro-batch as tensors, and the way back from its per-token results to completions.

Samples follow each other in `tokens` without padding, and `segments` says where each of them is. Only `part` pads.

Shapes: T computed tokens of the micro-batch, S completions (samples), R response tokens that the model sampled.

A completion of n tokens predicts n tokens and feeds n - 1: the last prompt token predicts its first token, and its last
token is only a target. With shared prompts, a prompt is in `tokens` once, followed by its completions::

    tokens    p p p p a a a b b c       one prompt p, completions a (4 tokens), b (3) and c (2)
    positions 0 1 2 3 4 5 6 4 5 4
    segments  [0 4 4 3 0] [0 4 7 2 0] [0 4 9 1 0]

A prefix that all prompts of the micro-batch share, such as a system message or examples, is in `tokens` once too, at
the very start. It is called the *shared prefix*, and the prompts in the table are what comes after it::

    tokens    o o p p a a q b           prompts o o p p and o o q, completions a (3 tokens) and b (2)
    positions 0 1 2 3 4 5 2 3
    segments  [2 2 4 2 2] [6 1 7 1 2]

Without sharing, every completion has its own copy of the whole prompt right before it.

Tokens of an environment are fed, and nobody predicts them: they have no part in R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_hpc.data.packing import Sample
from gspo_hpc.data.records import Completion, Experts, Flags, Floats, Group
from gspo_hpc.ops.attention import own_tokens

SHARED_PREFIX = 16  # tokens: a shorter prefix saves less than its attention mask costs


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch. An empty one has a single token that belongs to no sample, S = 0 and R = 0."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64; a completion continues its prompt's positions
    # [S, 5] int32, always on the CPU: prompt_start, prompt_len, response_start, response_tokens, shared_prefix
    segments: Tensor
    head_index: Tensor  # [R] int64, into tokens: the token whose hidden state predicts each response token
    targets: Tensor  # [R] int64, the response tokens
    cu_seqlens: Tensor  # [S + 1] int32: completion s has the places cu_seqlens[s]:cu_seqlens[s + 1] of R
    seq_ids: Tensor  # [R] int64: the completion of each response token
    loss_mask: Tensor  # [R] bool: False for samples that are excluded
    advantages: Tensor  # [S] fp32
    rollout_logprobs: Tensor  # [R] fp32, as the engine computed them when it sampled
    old_logprobs: Tensor | None  # [R] fp32, of the policy that sampled; None: the policy under update sampled
    reference_logprobs: Tensor | None  # [R] fp32
    keys: tuple[tuple[int, int], ...]  # S times (slot, index of the completion)
    # [T, layers, experts of a token] int16, always on the CPU: the experts to replay, -1 where the router is free
    experts: Tensor | None = None
    # [R] int64, of a context-parallel part: indices into the whole micro-batch's response tokens; None: all of them
    responses: Tensor | None = None
    num_cached_tokens: Tensor | None = (
        None  # [S] int64: prompt tokens that the engine took from its prefix cache; None: unknown
    )
    # [S] int64: response tokens that count of all completions of the same prompt, also of those in other micro-batches;
    # None: nothing asks for it
    prompt_tokens: Tensor | None = None
    selected: Tensor | None = None  # [R] bool: False for tokens without a policy term; None: all have one

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the batch on `device`.

        `segments` stays on the CPU, where attention reads it, and so do the experts, which take a kilobyte of a token:
        routers bring those of one micro-batch after the other.
        """
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in fields(self)
            if f.name not in ("segments", "experts") and isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def build(groups_by_slot: Mapping[int, Group], samples: Sequence[Sample], share_prompts: bool) -> PackedBatch:
    """Return the samples of one micro-batch as tensors on the CPU.

    With `share_prompts`, the completions of a group stand together, otherwise in the order of `samples`, and a prefix
    of at least SHARED_PREFIX tokens is shared. Without, they stand exactly in the order of `samples`. Old (and
    reference) log-probs must be there for all of the samples or for none.
    """
    if share_prompts:
        order: dict[int, list[Sample]] = {}
        for sample in samples:
            order.setdefault(sample.slot, []).append(sample)
        runs = list(order.values())
    else:
        runs = [[sample] for sample in samples]

    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    heads: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    segments: list[tuple[int, int, int, int, int]] = []
    completions: list[Completion] = []
    experts: list[tuple[Experts | None, int]] = []  # with the number of tokens
    keys: list[tuple[int, int]] = []
    shared = _shared_prefix([groups_by_slot[run[0].slot].prompt.tokens for run in runs]) if share_prompts else 0
    if shared:
        first = groups_by_slot[runs[0][0].slot]
        tokens.append(first.prompt.tokens[:shared])
        experts.append((_rows(first.prompt_experts, 0, shared), shared))
        positions.append(np.arange(shared))
    end = shared
    for run in runs:
        group = groups_by_slot[run[0].slot]
        prompt_start, prompt_len = end, len(group.prompt.tokens)
        tokens.append(group.prompt.tokens[shared:])
        positions.append(np.arange(shared, prompt_len))
        experts.append((_rows(group.prompt_experts, shared, prompt_len), prompt_len - shared))
        end += prompt_len - shared
        last = end - 1  # the prompt's last token predicts the first token of every completion
        for sample in run:
            completion = group.completions[sample.index]
            length = len(completion.tokens)
            assert (prompt_len, length) == (sample.prompt_len, sample.response_len), (group.slot, sample)
            sampled = completion.sampled
            assert prompt_len >= 1 and length >= 1 and len(completion.logprobs) == len(sampled), (group.slot, sample)
            assert sampled[-1] == length - 1, f"{(group.slot, sample)} ends with what the model did not sample"
            tokens.append(completion.tokens[:-1])
            positions.append(np.arange(prompt_len, prompt_len + length - 1))
            heads.append(np.concatenate(([last], np.arange(end, end + length - 1)))[sampled])
            targets.append(completion.tokens[sampled])
            segments.append((prompt_start, prompt_len - shared, end, length - 1, shared))
            completions.append(completion)
            experts.append((completion.experts, length - 1))
            keys.append((group.slot, sample.index))
            end += length - 1

    lengths = np.array([len(found) for found in targets], dtype=np.int64)
    selected = _all_or_none([c.selected for c in completions], lengths)
    included = np.array([not c.excluded for c in completions], dtype=np.bool_)
    return PackedBatch(
        tokens=_tensor(tokens or [np.zeros(1)], np.int64),
        positions=_tensor(positions or [np.zeros(1)], np.int64),
        segments=torch.from_numpy(np.array(segments, dtype=np.int32).reshape(-1, 5)),
        head_index=_tensor(heads, np.int64),
        targets=_tensor(targets, np.int64),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
        seq_ids=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        loss_mask=torch.from_numpy(np.repeat(included, lengths)),
        advantages=torch.tensor([c.advantage for c in completions], dtype=torch.float32),
        rollout_logprobs=_tensor([c.logprobs for c in completions], np.float32),
        old_logprobs=_all_or_none([c.old_logprobs for c in completions], lengths),
        reference_logprobs=_all_or_none([c.reference_logprobs for c in completions], lengths),
        selected=None if selected is None else selected.bool(),
        num_cached_tokens=torch.tensor([c.num_cached_tokens for c in completions], dtype=torch.int64),
        keys=tuple(keys),
        experts=_joined_experts(experts),
    )


def part(batch: PackedBatch, rank: int, size: int, multiple: int = 1) -> PackedBatch:
    """Return the part of a micro-batch that one of `size` context-parallel ranks computes: tokens and their targets.

    Samples, their order and `segments` are those of the whole; `cu_seqlens` is empty. All ranks have equally many
    tokens, a multiple of `multiple` (the number of tensor-parallel ranks, which split them further with sequence
    parallelism): the last ones are padding, at position 0.
    """
    if size == 1 and batch.tokens.numel() % multiple == 0:
        return batch
    device = batch.tokens.device
    shares = [own_tokens(batch.segments, other, size) for other in range(size)]
    length = -(-max(len(share) for share in shares) // multiple) * multiple
    on_cpu = torch.from_numpy(shares[rank])
    own = on_cpu.to(device)
    place = torch.full((batch.tokens.numel(),), -1, dtype=torch.int64, device=device)
    place[own] = torch.arange(len(own), device=device)
    responses = (place[batch.head_index] >= 0).nonzero()[:, 0]

    def padded(values: Tensor, filling: int = 0) -> Tensor:
        found = values[own if values.device == device else on_cpu]
        return torch.cat((found, values.new_full((length - len(own), *values.shape[1:]), filling)))

    def chosen(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[responses]

    return replace(
        batch,
        tokens=padded(batch.tokens),
        positions=padded(batch.positions),
        head_index=place[batch.head_index[responses]],
        targets=batch.targets[responses],
        cu_seqlens=batch.cu_seqlens[:0],
        seq_ids=batch.seq_ids[responses],
        loss_mask=batch.loss_mask[responses],
        rollout_logprobs=batch.rollout_logprobs[responses],
        old_logprobs=chosen(batch.old_logprobs),
        reference_logprobs=chosen(batch.reference_logprobs),
        selected=chosen(batch.selected),
        responses=responses,
        experts=None if batch.experts is None else padded(batch.experts, -1),
    )


def split_by_sample(values: Tensor, batch: PackedBatch) -> dict[tuple[int, int], Floats]:
    """Return per-token results [R] as one float32 array [sampled_len] per (slot, index)."""
    assert values.shape == batch.targets.shape, (values.shape, batch.targets.shape)
    array = values.detach().float().cpu().numpy()
    ends = batch.cu_seqlens.tolist()
    return {key: array[a:b].copy() for key, a, b in zip(batch.keys, ends[:-1], ends[1:], strict=True)}


def split_experts(chosen: Tensor, batch: PackedBatch) -> dict[tuple[int, int], Experts]:
    """Return the experts [T, layers, experts of a token] of every token, by (slot, index) of the completion.

    A prompt's are at (slot, -1), once; a completion's have a row for each of its tokens but the last.
    """
    array: Experts = chosen.cpu().numpy().astype(np.uint8 if int(chosen.max()) < 256 else np.uint16)
    result: dict[tuple[int, int], Experts] = {}
    for (slot, index), segment in zip(batch.keys, batch.segments.tolist(), strict=True):
        front, prompt, start, length, shared = segment
        if (slot, -1) not in result:
            result[slot, -1] = np.concatenate((array[:shared], array[front : front + prompt]))
        result[slot, index] = array[start : start + length].copy()
    return result


def _rows(experts: Experts | None, begin: int, end: int) -> Experts | None:
    return None if experts is None else experts[begin:end]


def _joined_experts(parts: Sequence[tuple[Experts | None, int]]) -> Tensor | None:
    """Join parts, each with its number of tokens, to [T, layers, experts of a token] int16; None if none is known."""
    known = next((part for part, _ in parts if part is not None), None)
    if known is None:
        return None
    unknown = [np.full((length, *known.shape[1:]), -1, np.int16) if part is None else part for part, length in parts]
    return _tensor(unknown, np.int16)


def _shared_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Return how many tokens all prompts share, leaving each at least one of its own; 0 where sharing does not pay."""
    if len(prompts) < 2:
        return 0
    same = min(len(prompt) for prompt in prompts) - 1
    for prompt in prompts[1:]:
        different = np.flatnonzero(prompt[:same] != prompts[0][:same])
        same = int(different[0]) if len(different) else same
    return same if same >= SHARED_PREFIX else 0


def _tensor(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype))


def _all_or_none(parts: Sequence[Floats | Flags | None], lengths: np.ndarray) -> Tensor | None:
    """Return the arrays joined, [R] fp32; None where none of the samples has one."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    assert len(present) == len(parts), f"{len(present)} of {len(parts)} samples have these values"
    assert [len(part) for part in present] == lengths.tolist(), "values and tokens differ in number"
    return _tensor(present, np.float32)
