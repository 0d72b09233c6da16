"""Everything that this room uses of Megatron's ``dist_checkpointing`` beyond its public interface.

Megatron's own save strategy forks writers from a process that by then has the threads of gloo, of vLLM's client and of
W&B, and it leaves a manager process behind when the rank is killed. :class:`InProcess` writes the same files from this
process, and to do so stands on Megatron's insides. Everything of that kind is in this module. Each part says what it
relies on, since which version, and what to check on an upgrade; ``tests/torch/checkpoint/test_compat.py`` lists the
versions that these names were checked against and finds each of them in the sources of the installed one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystem

from gspo_hpc.system import direct_io
from gspo_hpc.system.files import Entry

_FORMAT = ("torch_dist", 1)  # name and version of the shards' format

Copy = Callable[[dict[str, list[ShardedBase]]], None]  # make Megatron's state, by key, one that nothing changes


class InProcess(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by this process into the folder that it is given.

    Relies on ``dist_checkpointing.save`` calling ``async_save`` and taking its AsyncRequest (async_fn, async_fn_args,
    finalize_fns), on ``_replace_state_dict_keys_with_sharded_keys`` and ``mcore_to_pyt_state_dict``, which make torch's
    state from Megatron's, and on ``MCoreSavePlanner`` (megatron-core 0.16 to 0.19; 0.19 adds `async_strategy`). On an
    upgrade compare :meth:`async_save` with Megatron's own, of which it is the part that does not fork.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        copy: Copy | None,  # writes a copy of the state, which may change meanwhile; None: the state itself
        staging: Path,
        written: dict[str, Entry],
        planner: MCoreSavePlanner | None = None,
    ) -> None:
        """Write with the collectives of `group`; note every shard in `written`, by its path below `staging`."""
        super().__init__(*_FORMAT)
        self._group, self._copy, self._files = group, copy, _Hashing(staging, written)
        self._planner = planner or MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> AsyncRequest:
        """Return the request whose function writes the shards of this rank into `checkpoint_dir`."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        if self._copy is not None:
            self._copy(renamed)
        state = mcore_to_pyt_state_dict(renamed, False)

        def write() -> None:
            checksums = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)  # every file gets a hash instead
            writer = torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=False)  # the commit syncs them
            writer.fs = self._files
            try:
                torch_checkpoint.save(state, storage_writer=writer, planner=self._planner, process_group=self._group)
            finally:
                torch.serialization.set_crc32_options(checksums)

        return AsyncRequest(write, (), [])


class _Hashing(FileSystem):
    """The files of torch's FileSystemWriter, with shards hashed while they are written.

    Relies on the writer's attribute ``fs`` and on ``FileSystem.create_stream(path, mode)``, neither of which torch
    documents (read in 2.13), and on shards being the files whose names end in ``.distcp``.
    """

    def __init__(self, staging: Path, written: dict[str, Entry]) -> None:
        self._staging, self._written = staging, written

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb" or Path(path).suffix != ".distcp":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with direct_io.Writer(Path(path)) as shard:
            yield shard
        assert shard.entry is not None
        self._written[str(Path(path).relative_to(self._staging))] = shard.entry


class FillingPlanner(MCoreSavePlanner):
    """A planner that gets every tensor from `fill` when it is written, and keeps none.

    Relies on ``MCoreSavePlanner``, whose arguments and ``resolve_data`` are those of torch's DefaultSavePlanner
    (0.16 to 0.19).
    """

    def __init__(self, fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._fill = fill

    def resolve_data(self, write_item: Any) -> Any:
        """Return what torch writes for `write_item`: a tensor filled by `fill`, anything else unchanged."""
        found = super().resolve_data(write_item)
        return self._fill(found) if isinstance(found, torch.Tensor) else found


def write_format(shards: Path) -> None:
    """Write the file by which Megatron recognizes the format of the folder `shards`, metadata.json.

    Relies on ``save_config`` and ``CheckpointingConfig`` of ``dist_checkpointing.core`` (0.16 to 0.19). Megatron writes
    it at the end of an asynchronous save, with a barrier of the default group; here it is written before, without one.
    """
    save_config(CheckpointingConfig(*_FORMAT), str(shards))
