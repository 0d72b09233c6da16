"""The trainer's memory lent to the engines: what a rank trains with goes to the host while they generate.

Floor 3. Engines on the same GPUs want the memory for their cache. Weights, the optimizer's state and its fp32 masters
are copied into host memory that is kept from one time to the next (pinned on CUDA), gradients are dropped; then the
storages are emptied in place, so that every view of them stays what it is and finds its values again when they are
back. Megatron-Core's own offloading allocates everything anew each time, and does not know weights that are their own
masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


class Lender:
    """Puts tensors to sleep, and wakes them. All of them, or none."""

    def __init__(self) -> None:
        self._host: dict[int, torch.Tensor] = {}  # by place in the order of storages
        self._asleep: list[tuple[torch.UntypedStorage, int, bool]] = []  # with its size, and whether it was copied
        self.asleep = False

    def sleep(self, kept: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor] = ()) -> int:
        """Empty the storages of all these tensors; those of `dropped` come back as zeros. Bytes that this has freed.

        The tensors come in the same order every time.
        """
        assert not self.asleep
        self.asleep = True
        seen: set[int] = set()
        found = [(storage, True) for storage in _storages(kept, seen)]
        found += [(storage, False) for storage in _storages(dropped, seen)]
        for place, (storage, copied) in enumerate(found):
            if copied:
                self._copy(place, storage)
            self._asleep.append((storage, storage.nbytes(), copied))
        if any(storage.device.type == "cuda" for storage, _ in found):
            torch.cuda.current_stream().synchronize()  # before the memory is somebody else's
        for storage, _, _ in self._asleep:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else torch keeps it
        return sum(size for _, size, _ in self._asleep)

    def wake(self) -> None:
        """Everything is as it was, but for what was dropped. Does nothing to what is awake."""
        for place, (storage, size, copied) in enumerate(self._asleep):
            storage.resize_(size)
            target = _bytes(storage)
            if copied:
                target.copy_(self._host[place], non_blocking=True)
            else:
                target.zero_()
        self._asleep.clear()
        self.asleep = False

    def _copy(self, place: int, storage: torch.UntypedStorage) -> None:
        host = self._host.get(place)
        if host is None or host.numel() != storage.nbytes():
            cuda = storage.device.type == "cuda"
            host = self._host[place] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=cuda)
        host.copy_(_bytes(storage), non_blocking=True)


def _storages(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Each storage once: buffers hold many parameters."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
