"""The plugin that vLLM's own processes load: a weight-transfer backend, and an end when their owner ends.

vLLM finds :func:`register` through the entry point group ``vllm.general_plugins`` and calls it in each of its
processes, and in the one that owns the engine. It supports vLLM 0.22 to 0.33: older versions run the layerwise reload
in their worker and hand a loader to the backend; from about 0.24 on, the backend does both itself.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from gspo_hpc.engine import compat
from gspo_hpc.engine.transfer import BACKEND
from gspo_hpc.system import leftovers
from gspo_hpc.system.environment import ENGINE_OWNER, MARK
from gspo_hpc.system.processes import die_with_parent

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


def register() -> None:
    """Prepare a process of vLLM and register the backend; vLLM may call this several times in a process."""
    owner = os.environ.get(ENGINE_OWNER)
    parent = multiprocessing.parent_process()
    if owner is not None and int(owner) != os.getpid() and parent is not None:
        assert parent.pid is not None
        die_with_parent(parent.pid)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # a signal that preempts or interrupts the owner's process group must not reach us
        if MARK in os.environ:
            leftovers.claim(os.environ[MARK])
        compat.use_cpu_kernels()
        compat.pack_new_experts()
    compat.register_backend(BACKEND, SharedMemoryReceiver)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Path and size of the owner's buffer: an anonymous file, below the owner's /proc, that only this user can open."""

    path: str
    size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The tensors that are in the buffer now: each list has one entry per tensor; offsets are in bytes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedMemoryReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The worker's end of :class:`gspo_hpc.engine.transfer.SharedMemory`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _buffer: mmap.mmap | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compat.patch_older_worker()

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
        compat.start_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo, load_weights: Loader | None = None) -> None:
        """Load the tensors of one bucket; only older versions of vLLM give `load_weights`."""
        assert self._buffer is not None, "init_transfer_engine comes first"
        tensors = []
        fields = (update_info.names, update_info.dtypes, update_info.shapes, update_info.offsets)
        for name, dtype_name, shape, offset in zip(*fields, strict=True):
            dtype = getattr(torch, dtype_name)
            count = torch.Size(shape).numel()
            view = torch.frombuffer(memoryview(self._buffer), dtype=dtype, count=count, offset=offset).view(shape)
            # vLLM keeps tensors until their layer is complete, maybe longer than this bucket stays in the buffer.
            tensors.append((name, view.clone()))
        (load_weights or self.model.load_weights)(tensors)

    def finish_weight_update(self) -> None:
        """Repack the layers that are not repacked yet."""
        compat.finish_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Unmap the buffer."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise RuntimeError: the base class of older versions demands this method, and here the owner sends."""
        raise RuntimeError("weights are sent by gspo_hpc.engine.engine.Engine.update_weights")
