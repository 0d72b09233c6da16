"""Products of 16-bit matrices on a CPU that allocate what a GPU's do: no copies of their operands in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gspo_hpc.ops import logprobs


class OnCard(logprobs._Blocks):
    """Blocks as they are on a GPU: 16-bit operands are multiplied as they are."""

    def __init__(self, hidden: torch.Tensor, *others: Any) -> None:
        super().__init__(hidden, *others)
        self.narrow = hidden.dtype if hidden.itemsize == 2 else None

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` in the dtype of the products' operands."""
        return x if x.itemsize == 2 else super().operand(x)


class Wide:
    """torch with products of 16-bit matrices in fp32, which it has for GPUs only.

    They are made of copies in fp32 that no count sees, or not at all, where tensors have no memory.
    """

    def __init__(self, *, computes: bool = True) -> None:
        self._computes = computes

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def mm(self, a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, out: Any = None) -> torch.Tensor:
        """Multiply two matrices."""
        if out is None:
            out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)
        if self._computes:
            with _disable_current_modes():
                torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
        return out
