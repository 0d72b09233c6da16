"""Everything that this room uses of the checkpoints of Megatron and torch beyond their public interfaces.

Megatron's own save forks writers from a process that by then has the threads of gloo, of vLLM's client and of W&B, and
it leaves a manager process behind when the rank is killed; its load unpickles what it finds. :func:`prepare` and
:func:`load` are the parts of these that write from this process and read nothing but tensors and plain values, and to
do so they stand on Megatron's insides. Everything of that kind is in this module. Each part says what it relies on,
since which version, and what to check on an upgrade; ``tests/torch/checkpoint/test_compat.py`` lists the versions that
these names were checked against and finds each of them in the sources of the installed one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner

from gspo_hpc.checkpoint import index
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.system import direct_io
from gspo_hpc.system.files import Entry
from gspo_hpc.system.progress import mark

_COMMON = "common.pt"  # what is not sharded: plain values, and tensors that are the same on all ranks

State = dict[str, Any]
Copy = Callable[[dict[str, list[ShardedBase]]], None]  # make Megatron's state, by key, one that nothing changes


def prepare(
    state: State,
    shards: Path,
    group: dist.ProcessGroup,
    written: dict[str, Entry],
    *,
    copy: Copy | None = None,  # writes a copy of the state, which may change meanwhile; None: the state itself
    planner: MCoreSavePlanner | None = None,
    afterwards: Callable[[], None] = lambda: None,
    check: bool = True,
) -> Callable[[], None]:
    """Return a function that writes this rank's part of a sharded state into the existing folder `shards`.

    Its collectives are those of `group`; it notes every shard in `written`, by its path below the folder of `shards`.
    It calls `afterwards` once all is written or that has failed, before it waits for what others say.
    Relies on ``save_preprocess``, on ``_replace_state_dict_keys_with_sharded_keys`` and ``mcore_to_pyt_state_dict``,
    which make torch's state from Megatron's, and on ``MCoreSavePlanner`` (0.16 to 0.19). On an upgrade compare with
    ``dist_checkpointing.save`` and ``TorchDistSaveShardedStrategy.async_save``.
    """
    tensors, common = save_preprocess(_only_tensors(state), False)
    if check:
        _check_shards(tensors, group)
    renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, True)
    if copy is not None:
        copy(renamed)
    if dist.get_rank() == 0:
        torch.save(common, shards / _COMMON)
    # The commit syncs files. Nothing is copied ahead: torch would do so on a stream of the thread's present device, and
    # wait for that one alone, whichever GPU the tensor is on. Without it every tensor is copied by `Tensor.cpu`.
    writer = _Writer(shards, sync_files=False, per_thread_copy_ahead=0)
    writer.fs, writer.afterwards = _Hashing(shards.parent, written), afterwards
    planner = planner or MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)

    def write() -> None:
        found = mcore_to_pyt_state_dict(renamed, False)  # not before the copy: training need not wait for it
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # every file gets a hash instead
        try:
            torch_checkpoint.save(found, storage_writer=writer, planner=planner, process_group=group)
        finally:
            torch.serialization.set_crc32_options(checksums)

    return write


def common(shards: Path) -> State:
    """Return what the folder `shards` has beside tensors; see :func:`load`."""
    return _common(shards)


def load(state: State, shards: Path) -> State:
    """Return a sharded state with the values that the folder `shards` has for it, read into its own tensors.

    Raises ValueError of one line for a folder that is another model's or holds anything but tensors and plain values.
    Relies on ``load_preprocess`` and the functions around it (0.16 to 0.19). On an upgrade compare with
    ``dist_checkpointing.load``.
    """
    reader = Reader(shards)
    reader.read_metadata()
    result = _common(shards)
    state = _only_tensors(state)
    force_all_tensors_to_non_fp8(state)
    wanted, local, factories = load_preprocess(_merged_in_place(state))
    merge(result, local)
    tensors, _ = extract_sharded_base(wanted)
    with _host_group() as group:
        _check_shards(tensors, group)
    merge(result, _tensors(tensors, reader))
    loaded: State = apply_factory_merges(result, factories)
    return loaded


def _check_shards(tensors: State, group: dist.ProcessGroup | None) -> None:
    """Check on rank 0 that the shards of all ranks make up whole tensors; it raises there. Collective.

    Megatron gathers what all ranks say of their shards on all of them, and over NCCL on their GPUs; only rank 0 looks
    at it. `group`: one of gloo, of all ranks. Relies on the attributes of ``ShardedTensor`` that :func:`_outline` names
    and on ``validate_sharding_integrity`` (0.16 to 0.19).
    """
    mine = json.dumps([_outline(tensor) for tensor in nested_values(tensors)]).encode()
    transport = Transport((group or dist.group.WORLD) if dist.get_world_size() > 1 else None)
    every = transport.tree_gather(mine, b"\n".join)
    if every is not None:
        validate_sharding_integrity([[_shard(**one) for one in json.loads(line)] for line in every.split(b"\n")])


def _outline(tensor: ShardedTensor) -> dict[str, Any]:
    """Return all that the check looks at of a shard, as plain values."""
    names = ("key", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id")
    found = {name: getattr(tensor, name) for name in (*names, "prepend_axis_num", "allow_shape_mismatch")}
    return found | {"dtype": str(tensor.dtype).removeprefix("torch.")}


def _shard(dtype: str, **values: Any) -> ShardedTensor:
    """Return the shard without data of which :func:`_outline` told."""
    fixed = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return ShardedTensor(data=None, dtype=getattr(torch, dtype), **fixed)


@contextmanager
def _host_group() -> Iterator[dist.ProcessGroup | None]:
    """Yield a gloo group of all ranks; None where the default group is one."""
    if dist.get_backend() == "gloo":
        yield None
        return
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def optimizer_tensors(part: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return this rank's pieces of "param", "exp_avg" and "exp_avg_sq" of a parameter of a DistributedOptimizer.

    They are the optimizer's own tensors, not copies, so a load fills them in place. That holds as long as
    ``use_precision_aware_optimizer`` is off, which this package never turns on: its moments may be scaled, and copies.
    Relies on ``DistributedOptimizer._get_main_param_and_optimizer_states(model_param)`` (0.16 to 0.19).
    """
    found: dict[str, torch.Tensor] = part._get_main_param_and_optimizer_states(parameter)
    return found


def settle_optimizer(part: Any) -> None:
    """Let an optimizer that works on the host and on the GPU spread what was set.

    Relies on ``HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers`` (0.16 to 0.19).
    """
    spread = getattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
    if spread is not None:
        spread()


def read(state: State, reader: Reader, planner: LoadPlanner) -> None:
    """Read tensors into the memory that `planner` has for them.

    Raises ValueError of one line for what is no tensor, or none of that size; OSError where the disk fails.
    """
    try:
        torch_checkpoint.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = next(cause for cause, _ in error.failures.values())
        if isinstance(cause, OSError):
            raise cause from None
        raise ValueError(f"{reader.path} cannot be loaded: {_reason(cause)}") from cause


class Reader(torch_checkpoint.FileSystemReader):
    """torch's reader of shards, with the index as JSON, read once.

    Relies on ``read_metadata`` being all that unpickles without ``weights_only`` where the index names tensors alone,
    and on the attribute ``path`` (torch 2.13).
    """

    _index: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Return the index. Raises ValueError where there is none."""
        if self._index is None:
            found = index.read(Path(self.path))
            places = {at: _StorageInfo(**vars(place)) for at, place in found.storage_data.items()}
            self._index = replace(found, storage_data=places)
        return self._index


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


class _LoadPlanner(MCoreLoadPlanner):
    """Megatron's planner, which tells the watcher of this process of every tensor that is loaded.

    Relies on ``commit_tensor`` being called after each (torch 2.13).
    """

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """Take a tensor that has been read."""
        mark("loading")
        super().commit_tensor(read_item, tensor)


class _Writer(torch_checkpoint.FileSystemWriter):
    """torch's writer of shards, with the index as JSON.

    Relies on ``write_data``, which has written when it returns, and on ``finish`` being called once, on one rank, with
    the metadata of all tensors and what every rank has written: an `index` and a `storage_data` for each piece (torch
    2.13).
    """

    afterwards: Callable[[], None]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's tensors."""
        try:
            return super().write_data(plan, planner)
        finally:
            self.afterwards()

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the index."""
        places = {
            one.index: index.Place(one.storage_data.relative_path, one.storage_data.offset, one.storage_data.length)
            for of_rank in results
            for one in of_rank
        }
        index.write(Path(self.path), metadata.state_dict_metadata, places)


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


def _only_tensors(state: State) -> State:
    """Return a sharded state whose objects are not saved, and are those of this process after a load.

    Layers give what Transformer Engine keeps beside their weights, such as scales of 8 bits, as an object, and unpickle
    what they are given back. Relies on ``ShardedObject`` and ``LocalNonpersistentObject`` (0.16 to 0.19).
    """

    def local(value: Any) -> Any:
        return LocalNonpersistentObject(value.data) if isinstance(value, ShardedObject) else value

    found: State = dict_list_map_inplace(local, state)
    return found


def _merged_in_place(state: State) -> State:
    """Return a sharded state whose tensors that are saved in parts are not copied to merge what was read into them.

    Megatron saves gate and up projection of SwiGLU, which are one tensor, as two, and merges them with ``torch.cat``
    once all tensors are read. The copies would stay until the load ends: half of the weights, and of an optimizer's
    state. Parts that are views of their tensor are in place once they are read. Relies on
    ``ShardedTensorFactory.merge_fn`` getting what was read into the parts of ``build_fn`` (0.16 to 0.19).
    """

    def in_place(value: Any) -> Any:
        if not isinstance(value, ShardedTensorFactory) or value.data is None:
            return value
        whole, merge_parts = value.data.detach(), value.merge_fn

        def merged(parts: Any) -> Any:
            tensors = list(nested_values(parts))
            memory = {one.untyped_storage().data_ptr() for one in tensors}
            if memory == {whole.untyped_storage().data_ptr()} and sum(map(torch.numel, tensors)) == whole.numel():
                return whole
            return merge_parts(parts)

        return replace(value, merge_fn=merged)

    found: State = dict_list_map_inplace(in_place, state)
    return found


def _common(shards: Path) -> State:
    """Return what is not sharded. `weights_only` admits tensors and plain values, and nothing that runs."""
    path = shards / _COMMON
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{shards} is not whole: {_COMMON} is missing") from None
    except Exception as error:  # the file may hold anything
        if isinstance(error, OSError):
            raise
        raise ValueError(f"{path} cannot be loaded: {_reason(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be loaded: it holds no state")
    return found


def _tensors(wanted: State, reader: Reader) -> State:
    """Return the tensors of a sharded state, read by `reader`.

    Relies on the functions that make torch's state from Megatron's and back, and on ``MCoreLoadPlanner`` (0.16 to
    0.19). On an upgrade compare with ``TorchDistLoadShardedStrategy.load``.
    """
    tensors = [one for one in nested_values(wanted) if isinstance(one, ShardedTensor)]
    renamed, flat, names = _replace_state_dict_keys_with_sharded_keys(wanted)
    found = mcore_to_pyt_state_dict(renamed, True)
    planner = _LoadPlanner(
        shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    read(found, reader, planner)
    plain = {key: _unwrap_pyt_sharded_tensor(value) for key, value in found.items()}
    restored: State = _replace_sharded_keys_with_state_dict_keys(plain, flat, names)
    _restore_dict_types(restored, wanted)
    return restored


def _reason(error: BaseException) -> str:
    if isinstance(error, UnpicklingError):
        return "it holds something else than tensors and plain values, which could run as code and is not read"
    if isinstance(error, EOFError):  # which torch raises without a text
        return "it ends too early: it is cut off or empty"
    line = (str(error).splitlines() or ["it is damaged"])[0]
    return f"{type(error).__name__}: {line[:200]}"
