"""Sums and means over the tokens of each sample. Shapes: see :mod:`gspo_hpc.algorithms.terms`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Samples:
    """The samples that the response tokens of a micro-batch belong to."""

    def __init__(
        self,
        ids: Tensor,
        count: int,
        mask: Tensor,
        dtype: torch.dtype,
        cp_reduce: Callable[[Tensor], Tensor],
        prompt_tokens: Tensor | None = None,
    ) -> None:
        """Take the sample of each token, ids [R] int64, their number S, and the tokens that count, mask [R] bool.

        `cp_reduce` adds sums [S] up over context-parallel ranks that hold different tokens of the same samples: its
        forward is the sum, its backward passes the gradient on unchanged.
        """
        self.ids, self.count, self.mask, self.dtype = ids, count, mask, dtype
        self._cp_reduce = cp_reduce
        self.tokens = self.sum(mask.to(dtype))  # [S], tokens that count
        self.lengths = self.tokens.clamp(min=1.0)  # [S], to divide by
        self.prompt_tokens = prompt_tokens  # [S], tokens of all samples of the same prompt, wherever they are computed

    def clean(self, values: Tensor) -> Tensor:
        """Return values [R] in the dtype of the loss, with 0 where the mask is False, whatever is there."""
        return torch.where(self.mask, values.to(self.dtype), 0.0)

    def reduce(self, parts: Tensor) -> Tensor:
        """Return sums of what each context-parallel rank has of its tokens."""
        return self._cp_reduce(parts)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums [S] of values [R] over each sample."""
        return self._cp_reduce(values.new_zeros(self.count).index_add(0, self.ids, values))


def aggregate(values: Tensor, samples: Samples, aggregation: str) -> Tensor:
    """Return per-token values [R] as one value per sample [S].

    They are averaged over the sample ("sequence"), divided by the tokens of all samples of its prompt, wherever
    these are computed ("prompt"), or summed ("token" and "fixed_length").
    """
    summed = samples.sum(values)
    if aggregation == "prompt":
        assert samples.prompt_tokens is not None, "a mean over prompts needs the number of their tokens"
        return summed / samples.prompt_tokens.to(summed.dtype).clamp(min=1.0)
    return summed / samples.lengths if aggregation == "sequence" else summed
