"""Offloading of the trainer: what a rank trains with goes to host memory while engines generate on the same GPUs.

Engines need the memory for their cache. Weights, the optimizer's state and its fp32 masters are copied into host
memory that is kept from one time to the next (page-locked on CUDA); gradients are dropped. Then the storages are
emptied in place: every view of them stays valid, and finds its values again when they are back. Megatron-Core's own
offloading allocates everything anew each time, and does not know weights that are their own masters.

Trainer and engines take turns. An engine with tensor parallelism allocates on the GPUs of several ranks, and only one
of these ranks talks to it, so no rank may rely on what it has freed itself: all ranks leave, wait for each other, and
then engines take the memory; all engines sleep, ranks wait for each other, and then the trainer takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from gspo_hpc.config.derived import offloaded_parts
from gspo_hpc.ops.host_memory import HostMemory
from gspo_hpc.policy import compat
from gspo_hpc.policy.process_groups import barrier

if TYPE_CHECKING:
    from gspo_hpc.policy.policy import Policy


class OffloadBuffer:
    """Host memory for a set of tensors, all of which are offloaded or none."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._host: dict[int, torch.Tensor] = {}  # by place in the order of storages
        self._offloaded: list[tuple[torch.UntypedStorage, int, bool]] = []  # with size in bytes; True if copied
        self.is_offloaded = False

    def offload(self, kept: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor] = ()) -> int:
        """Empty the storages of all these tensors, and return the bytes that this freed.

        Those of `dropped` come back as zeros. The tensors come in the same order every time.
        """
        assert not self.is_offloaded
        self.is_offloaded = True
        seen: set[int] = set()
        found = [(storage, True) for storage in _storages(kept, seen)]
        found += [(storage, False) for storage in _storages(dropped, seen)]
        for place, (storage, copied) in enumerate(found):
            if copied:
                self._copy(place, storage)
            self._offloaded.append((storage, storage.nbytes(), copied))
        if any(storage.device.type == "cuda" for storage, _ in found):
            torch.cuda.current_stream().synchronize()  # before somebody else uses the memory
        for storage, _, _ in self._offloaded:
            storage.resize_(0)
        if torch.cuda.is_available():
            _give_back_freed()
        return sum(size for _, size, _ in self._offloaded)

    def restore(self) -> None:
        """Bring all tensors back, with zeros in what was dropped; do nothing if they are not offloaded."""
        for place, (storage, size, copied) in enumerate(self._offloaded):
            storage.resize_(size)
            target = _bytes(storage)
            if copied:
                target.copy_(self._host[place], non_blocking=True)
            else:
                target.zero_()
        self._offloaded.clear()
        self.is_offloaded = False

    def _copy(self, place: int, storage: torch.UntypedStorage) -> None:
        host = self._host.get(place)
        if host is None or host.numel() != storage.nbytes():
            locked = storage.device.type == "cuda"
            host = self._host[place] = self._memory.empty([storage.nbytes()], torch.uint8, locked=locked)
        host.copy_(_bytes(storage), non_blocking=True)


def leave_to_engines(policy: Policy, *, keep_weights: bool = False) -> None:
    """Move the trainer of every rank to host memory, if that is configured, and return when all have. Collective.

    With `keep_weights` the weights stay where they are, for they are about to be sent.
    """
    parts = offloaded_parts(policy.config)
    if parts or policy.config.memory.offload_optimizer:
        policy.offload(parts, keep_weights=keep_weights)
    if policy.ranks.device.type == "cuda" and policy.config.rollout.mode == "colocate":
        _give_back_freed()
    wait_for_all(policy)


def wait_for_all(policy: Policy) -> None:
    """Return when every rank has come here. Collective."""
    if policy.ranks.world_size > 1:
        barrier(policy.ranks.device)


def _give_back_freed() -> None:
    """Return to the GPU what torch keeps: freed memory, and workspaces of matrix products. An engine needs both."""
    compat.free_workspaces()
    torch.cuda.empty_cache()


def _storages(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Yield each storage once: buffers hold many parameters."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
