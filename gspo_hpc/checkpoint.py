"""Save and load everything that a run needs to go on: sharded by Megatron-Core, committed by ``gspo_hpc.commit``.

Floor 3. A checkpoint directory holds ``megatron/`` (model and optimizer shards, independent of the layout that wrote
them), ``rng-RANK.json`` (generator states), ``cursor.json`` (where the run stands, plain JSON) and ``rollout.jsonl``
(the groups of the rollout in use, with what later updates of it need). All ranks call :func:`prepare` and
:func:`load`; ``gspo_hpc.saver`` lets a thread write what was prepared.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from gspo_hpc import direct, optimizer_state
from gspo_hpc.commit import Entry
from gspo_hpc.durable import plain_disk_full
from gspo_hpc.policy import Policy
from gspo_hpc.process_groups import Ranks, barrier


class Copies:
    """Host memory that a save writes from while training goes on: a whole copy of what this rank saves.

    It is kept from save to save, since getting it anew takes longer than copying. On CUDA it is pinned.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, tuple[int, ...], str], torch.Tensor] = {}

    def take(self, state: dict[str, list[ShardedBase]]) -> None:
        """Make `state`, Megatron's by key, one that nothing changes any more."""
        on_gpu = False
        for key, parts in state.items():
            for part in parts:
                if isinstance(part, ShardedTensor):
                    name = (key, tuple(part.global_offset), str(part.flattened_range))
                    on_gpu |= part.data.is_cuda
                    part.data = self._copy(name, part.data)
                else:
                    part.data = copy.deepcopy(part.data)
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    def _copy(self, name: tuple[str, tuple[int, ...], str], source: torch.Tensor) -> torch.Tensor:
        target = self._tensors.get(name)
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._tensors[name] = target
        return target.copy_(source.detach(), non_blocking=True)


class _Hashing(FileSystem):
    """Where torch's writer puts its files: shards are hashed on the way."""

    def __init__(self, staging: Path, written: dict[str, Entry]) -> None:
        self._staging, self._written = staging, written

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb" or Path(path).suffix != ".distcp":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with direct.Writer(Path(path)) as shard:
            yield shard
        assert shard.entry is not None
        self._written[str(Path(path).relative_to(self._staging))] = shard.entry


class InProcess(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by this process.

    Megatron's own strategy forks writers from a process that by then has the threads of gloo, vLLM's client and W&B,
    and leaves a manager process behind when the rank is killed. The files are the same.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        copies: Copies | None,  # that are written instead of what is saved, which may then change
        staging: Path,
        written: dict[str, Entry],
        planner: MCoreSavePlanner | None = None,
    ) -> None:
        super().__init__("torch_dist", 1)
        self._group, self._copies, self._files = group, copies, _Hashing(staging, written)
        self._planner = planner or MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> AsyncRequest:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        if self._copies is not None:
            self._copies.take(renamed)
        state = mcore_to_pyt_state_dict(renamed, False)

        def write() -> None:
            checksums = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)  # there is a hash of each file
            writer = torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=False)  # commit.py syncs them
            writer.fs = self._files
            try:
                torch_checkpoint.save(
                    state,
                    storage_writer=writer,
                    planner=self._planner,
                    process_group=self._group,
                )
            finally:
                torch.serialization.set_crc32_options(checksums)

        return AsyncRequest(write, (), [])


def _state(policy: Policy) -> dict[str, Any]:
    model = _model_state(policy)
    optimizer = optimizer_state.sharded(policy.optimizer, model)
    return {"model": model, "optimizer": optimizer, "scheduler": policy.scheduler.state_dict()}


def prepare(
    policy: Policy, staging: Path, group: dist.ProcessGroup, copies: Copies, *, check: bool = True
) -> Callable[[], dict[str, Entry]]:
    """Copy this rank's part of the state, and return what writes it into a staging directory that exists.

    All ranks call both. The second may run in a thread, beside training: its collectives are those of `group`, over
    gloo and all ranks; once it is back on rank 0, all ranks have written. `check`: whether all ranks together hold
    every piece of every parameter once, which costs a gather and need not be asked twice.
    """
    policy.fetch()
    policy.settle()
    shards = staging / "megatron"
    written: dict[str, Entry] = {}
    if policy.ranks.rank == 0:
        shards.mkdir(mode=0o700, exist_ok=True)
    barrier(policy.ranks.device)
    with plain_disk_full(staging):
        request = dist_checkpointing.save(
            _state(policy),
            str(shards),
            sharded_strategy=InProcess(group, copies, staging, written),
            validate_access_integrity=check,
            async_sharded_save=True,
        )
        assert request is not None and request.async_fn is not None
        (staging / f"rng-{policy.ranks.rank}.json").write_text(json.dumps(_rng_state(policy.ranks)), "utf-8")
        if policy.ranks.rank == 0:  # what the request would do at its end, with a barrier of the default group
            save_config(CheckpointingConfig("torch_dist", 1), str(shards))
    write_shards = request.async_fn

    def write() -> dict[str, Entry]:
        with plain_disk_full(staging):
            try:
                write_shards()
            except CheckpointException as error:  # one for all ranks, around what was the matter with each
                raise next(
                    (cause for cause, _ in error.failures.values() if isinstance(cause, OSError)), error
                ) from None
        return written

    return write


def load(policy: Policy, path: Path) -> None:
    """Bring model, optimizer, schedule and this rank's generators to what `path` holds."""
    loaded = dist_checkpointing.load(_state(policy), str(path / "megatron"))
    _load_model(policy, loaded["model"])
    optimizer_state.load(policy.optimizer, _model_state(policy), loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    mine = path / f"rng-{policy.ranks.rank}.json"
    if mine.exists():  # another number of ranks than the one that saved has no state of its own
        _set_rng_state(json.loads(mine.read_text("utf-8")), policy.ranks)


def load_weights(policy: Policy, path: Path) -> None:
    """Only the model, for export and evaluation."""
    loaded = dist_checkpointing.load({"model": _model_state(policy)}, str(path / "megatron"))
    _load_model(policy, loaded["model"])


def _model_state(policy: Policy) -> dict[str, Any]:
    return {str(number): chunk.sharded_state_dict() for number, chunk in enumerate(policy.chunks)}


def _load_model(policy: Policy, state: dict[str, Any]) -> None:
    for number, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(state[str(number)])


def _rng_state(ranks: Ranks) -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if ranks.device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(ranks.device))
    return state


def _set_rng_state(state: dict[str, Any], ranks: Ranks) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if ranks.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode(state["cuda"]), ranks.device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
