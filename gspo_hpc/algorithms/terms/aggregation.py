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
        on_cpu = ids.device.type == "cpu"
        # True where all tokens here are known to count: a GPU would have to be waited for. all() is 20 times as slow.
        self.all_count = on_cpu and mask.numel() > 0 and bool(mask.view(torch.uint8).amin())
        # [S], tokens here of each sample, whose tokens follow each other; None on a GPU, which adds by index.
        self.runs = torch.searchsorted(ids, torch.arange(count + 1)).diff() if on_cpu else None
        # [S], tokens that count on this rank
        self.here = self.sums_here(mask.to(dtype)) if self.runs is None or not self.all_count else self.runs.to(dtype)
        self.tokens = cp_reduce(self.here.clone())  # [S], tokens that count; Megatron's sum is made in place
        self.lengths = self.tokens.clamp(min=1.0)  # [S], to divide by
        self.prompt_tokens = prompt_tokens  # [S], tokens of all samples of the same prompt, wherever they are computed

    def clean(self, values: Tensor) -> Tensor:
        """Return values [R] in the dtype of the loss, with 0 where the mask is False, whatever is there."""
        return values.to(self.dtype) if self.all_count else torch.where(self.mask, values.to(self.dtype), 0.0)

    def at_tokens(self, values: Tensor) -> Tensor:
        """Return for each token [R] the value of its sample, from values [S]."""
        return values.index_select(0, self.ids)

    def reduce(self, parts: Tensor) -> Tensor:
        """Return sums of what each context-parallel rank has of its tokens."""
        return self._cp_reduce(parts)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums [S] of values [R] over each sample."""
        return self._cp_reduce(self.sums_here(values))

    def sums_here(self, values: Tensor) -> Tensor:
        """Return the sums [S] of values [R] over the tokens that this rank has of each sample.

        Both ways add in the order of the tokens and give the same bits; the first is several times as fast on a CPU.
        """
        if self.runs is not None:
            return torch.segment_reduce(values, "sum", lengths=self.runs, unsafe=True)
        return values.new_zeros(self.count).index_add(0, self.ids, values)


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
