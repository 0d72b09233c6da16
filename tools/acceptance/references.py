"""Textbook versions of what kernels compute, in float64 and with whole masks, to compare kernels with."""

from __future__ import annotations

import torch
from torch import Tensor

Layout = list[tuple[int, list[int]]]  # (prompt length, response tokens of its completions)


def table(layout: Layout, share: bool, shared_prefix: int = 0) -> tuple[Tensor, int]:
    """Return the segment table of a layout [S, 5], and its number of tokens."""
    rows, end = [], shared_prefix
    for prompt, responses in layout:
        if share:
            start, end = end, end + prompt
            for response in responses:
                rows.append((start, prompt, end, response, shared_prefix))
                end += response
        else:
            for response in responses:
                rows.append((end, prompt, end + prompt, response, shared_prefix))
                end += prompt + response
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 5), max(end, 1)


def visible(segments: Tensor, tokens: int) -> Tensor:
    """Return the whole mask [T, T], token by token: True where a query sees a key."""
    mask = torch.eye(tokens, dtype=torch.bool)
    for prompt_start, prompt, start, response, shared_prefix in segments.tolist():
        mask[:shared_prefix, :shared_prefix] = torch.ones(shared_prefix, shared_prefix).tril().bool()
        mask[prompt_start : prompt_start + prompt, :shared_prefix] = True
        mask[start : start + response, :shared_prefix] = True
        for i in range(prompt):
            mask[prompt_start + i, prompt_start : prompt_start + i + 1] = True
        for i in range(response):
            mask[start + i, prompt_start : prompt_start + prompt] = True
            mask[start + i, start : start + i + 1] = True
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the output of attention [T, Hq, D] with a whole mask."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probs and entropies [R] of targets, from all logits at once, in float64."""
    everything = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, dim=-1)
    return everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected| (2-norms), 0 where both are empty or zero."""
    found, expected = found.detach().double(), expected.detach().double()
    gap, size = (float(torch.linalg.vector_norm(x)) for x in (found - expected, expected))
    return gap / size if size else gap
