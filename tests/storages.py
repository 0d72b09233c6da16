"""A count of the memory of tensors that operations allocate within a block, at its peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Count the storages that come into being within the block, also of tensors without memory.

    Not counted: storages of fewer than `least` bytes, and those that were there before.
    """

    def __init__(self, least: int = 1, there: Iterable[torch.Tensor] = ()) -> None:
        """Take `there`: tensors of before that operations may return without having been given them."""
        super().__init__()
        self.bytes = self.peak = 0
        self._least = least
        self._known = {tensor.untyped_storage()._cdata for tensor in there}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        before = {one.untyped_storage()._cdata for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)}
        found = function(*arguments, **(named or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._take(tensor.untyped_storage(), before)
        return found

    def _take(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._known or place in before or size < self._least:
            return
        self._known.add(place)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._free, place, size)

    def _free(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.bytes -= size
