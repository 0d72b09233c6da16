"""The plugin that vLLM's own processes load: a weight-transfer backend, and an end when their owner ends.

vLLM finds :func:`register` through the entry point group ``vllm.general_plugins`` and calls it in each of its
processes, the one that owns the vllm.LLM among them. It supports vLLM 0.22 to 0.33: older versions run the layerwise
reload in their worker and hand a loader to the backend; from about 0.24 on, the backend does both itself.
"""

from __future__ import annotations

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
from gspo_hpc.engine.adapters import compat as adapters_compat
from gspo_hpc.engine.adapters import loader
from gspo_hpc.engine.experts.loader import ExpertLoader
from gspo_hpc.engine.transfer import BACKEND
from gspo_hpc.engine.weight_buffers import map_buffer, view
from gspo_hpc.system import leftovers, malloc
from gspo_hpc.system.environment import ENGINE_OWNER, MARK
from gspo_hpc.system.processes import die_with_parent

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


def register() -> None:
    """Prepare a process of vLLM and register the backend; vLLM may call this several times in a process."""
    parent = multiprocessing.parent_process()
    if ENGINE_OWNER in os.environ and parent is not None:  # not the first process, which prepares itself
        assert parent.pid is not None
        die_with_parent(parent.pid)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # a signal that preempts or interrupts the owner's process group must not reach us
        prepare()
    compat.register_backend(BACKEND, WeightReceiver)


def prepare() -> None:
    """Mark what this process leaves on its node as the run's, and patch vLLM's layers before a model is built."""
    if MARK in os.environ:
        leftovers.claim(os.environ[MARK])
    compat.use_cpu_kernels()
    compat.pack_new_experts()
    compat.compute_logits_in_fp32()
    adapters_compat.multiply_whole_batches()


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The information that a worker is given at its start: none, since every bucket says where it lies."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A bucket of weights, of plain values.

    `memory` has the address of the memory for each worker, or one for all (see gspo_hpc.engine.weight_buffers). `parts`
    has for each tensor, or stack of experts' tensors, its name, dtype and shape, and where its elements lie in the
    memory: offset in bytes, size and stride of a view.
    """

    memory: list[dict[str, Any]]
    parts: list[dict[str, Any]]
    unmap: bool  # GPU memory, which its owner frees once this bucket is answered
    last: bool  # of its update


class WeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The worker's end of :class:`gspo_hpc.engine.transfer.WeightSender`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _mapped: tuple[dict[str, Any], torch.Tensor] | None = None  # address, bytes
    _experts: ExpertLoader | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._matrices: dict[str, torch.Tensor] = {}  # of adapters that are not whole yet
        compat.patch_older_worker()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is nothing to agree on."""

    def start_weight_update(self) -> None:
        """Let the layers take weights in the checkpoint's format again (they were repacked when first loaded)."""
        compat.start_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo, load_weights: Load | None = None) -> None:
        """Load a bucket; only older versions of vLLM give `load_weights`. When this returns, its memory is free."""
        addresses = update_info.memory
        memory = self._map(addresses[compat.worker_rank() if len(addresses) > 1 else 0])
        if self._experts is None:
            malloc.keep_freed_memory()  # of one layer, for the next
            self._experts = ExpertLoader(self.model)
        tensors: list[tuple[str, torch.Tensor]] = []
        for part in update_info.parts:
            tensor = view(memory, part)
            if not part["experts"]:
                tensors.append((part["name"], tensor))
            elif not self._experts.load(part["name"], part["experts"], tensor):
                names = (part["name"].format(expert) for expert in part["experts"])
                tensors += zip(names, tensor.unbind(), strict=True)
        if tensors:
            with loader.set_aside(self.model):
                (load_weights or self.model.load_weights)(tensors)
            compat.keep_pending(self.model, memory)
        if memory.is_cuda:
            torch.cuda.synchronize()
        if update_info.last:  # older versions of vLLM do not say when an update is finished
            self._experts.finish()
            self._experts = None
            malloc.return_freed_memory()
            if memory.is_cuda:
                torch.cuda.empty_cache()  # of layers that were loaded beside the engine's own
        if update_info.unmap and memory.is_cuda:
            self._mapped = None

    def receive_adapters(self, bucket: dict[str, Any]) -> list[int]:
        """Take a bucket of adapters, and let the model compute with them once it is the last of its version.

        When this returns, its memory is free. Returns the versions that the model has.
        """
        addresses = bucket["memory"]
        memory = self._map(addresses[compat.worker_rank() if len(addresses) > 1 else 0])
        for part in bucket["parts"]:
            self._matrices[part["name"]] = view(memory, part).to("cpu", copy=True)
        if bucket["unmap"] and memory.is_cuda:
            self._mapped = None
        del memory
        if bucket["last"]:
            matrices, self._matrices = self._matrices, {}
            loader.install(self.model, bucket, matrices)
        return sorted(self.model.lora_manager.list_adapters())

    def finish_weight_update(self) -> None:
        """Repack the layers that are not repacked yet."""
        compat.finish_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Unmap the memory."""
        self._mapped = None

    def _map(self, address: dict[str, Any]) -> torch.Tensor:
        """Return the bytes at an address, mapped once as long as it stays the same."""
        if self._mapped is None or self._mapped[0] != address:
            self._mapped = None
            self._mapped = address, map_buffer(address)
        return self._mapped[1]

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise RuntimeError: the base class of older versions demands this method, and here the owner sends."""
        raise RuntimeError("weights are sent by gspo_hpc.engine.engine.Engine.update_weights")
