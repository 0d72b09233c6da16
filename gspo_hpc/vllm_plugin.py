"""What vLLM's own processes load of this package: a weight-transfer backend, and an end that comes with their owner's.

Floor 3. vLLM finds :func:`register` through the entry point group ``vllm.general_plugins`` and calls it in each of its
processes, also in the one that owns the engine. vLLM 0.22 to 0.33: the older versions run the layerwise reload in their
worker and hand a loader to the backend; from about 0.24 on, the backend does both itself.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from gspo_hpc import leftovers, vllm_cpu
from gspo_hpc.engine_process import OWNER
from gspo_hpc.orphans import MARK, die_with_parent
from gspo_hpc.weight_transfer import BACKEND

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


def register() -> None:
    """Called by vLLM, possibly several times in one process."""
    owner = os.environ.get(OWNER)
    parent = multiprocessing.parent_process()
    if owner is not None and int(owner) != os.getpid() and parent is not None:
        assert parent.pid is not None
        die_with_parent(parent.pid)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # signals for the owner's process group, to preempt or to interrupt it, are not for us
        if MARK in os.environ:
            leftovers.claim(os.environ[MARK])
        vllm_cpu.use_own_kernels()
        vllm_cpu.pack_new_experts()
    registry = WeightTransferEngineFactory._registry
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryReceiver)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the owner's buffer is: an anonymous file that only this user can open, by way of the owner's process."""

    path: str
    size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Tensors that lie in the buffer now: one entry a tensor in each list, offsets in bytes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedMemoryReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The worker's end of :class:`gspo_hpc.weight_transfer.SharedMemory`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _buffer: mmap.mmap | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(WeightTransferEngine, "finish_weight_update"):
            vllm_cpu.mend_older_worker()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Map the owner's buffer. Raises PermissionError if it belongs to another user."""
        descriptor = os.open(init_info.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or status.st_size < init_info.size:
                raise PermissionError(f"{init_info.path} is not the weight buffer of this user")
            self._buffer = mmap.mmap(descriptor, init_info.size)
        finally:
            os.close(descriptor)

    def start_weight_update(self) -> None:
        """Let the layers take weights in the checkpoint's format again (they were repacked when first loaded)."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo, load_weights: Loader | None = None) -> None:
        """Load the tensors of one bucket. `load_weights` is given by the older versions of vLLM only."""
        assert self._buffer is not None, "init_transfer_engine comes first"
        tensors = []
        fields = (update_info.names, update_info.dtypes, update_info.shapes, update_info.offsets)
        for name, dtype_name, shape, offset in zip(*fields, strict=True):
            dtype = getattr(torch, dtype_name)
            count = torch.Size(shape).numel()
            view = torch.frombuffer(memoryview(self._buffer), dtype=dtype, count=count, offset=offset).view(shape)
            # vLLM keeps tensors until their layer is complete, maybe past this bucket, whose place is used again.
            tensors.append((name, view.clone()))
        (load_weights or self.model.load_weights)(tensors)

    def finish_weight_update(self) -> None:
        """Repack what is still to be repacked."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        vllm_cpu.repack_heads(self.model)

    def shutdown(self) -> None:
        """Let go of the buffer."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Demanded by the older versions' base class; here the owner drives, not the backend."""
        raise RuntimeError("weights are sent by gspo_hpc.engine.Engine.update_weights")
