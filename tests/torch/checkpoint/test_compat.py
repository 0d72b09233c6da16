"""The private names of Megatron-Core and torch that checkpoint.compat and checkpoint.index rely on are there.

And a checkpoint of torch's layers is loaded into Transformer Engine's, which keep an object beside their weights; and a
save leaves torch.save as it was for others of the process. One second, and the imports.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from gspo_hpc.checkpoint import compat, index
from tests.sources import missing, require_checked

MEGATRON = ("0.16.1", "0.19.2")
TORCH = ("2.13.0",)

_ROOM = "megatron/core/dist_checkpointing"
_STRATEGY = f"{_ROOM}/strategies/torch.py"
MEGATRON_NAMES = {
    f"{_STRATEGY}: _replace_state_dict_keys_with_sharded_keys": ("sharded_state_dict", "keep_only_main_replica"),
    f"{_STRATEGY}: _replace_sharded_keys_with_state_dict_keys": ("state_dict", "flat_mapping", "rename_mapping"),
    f"{_STRATEGY}: _restore_dict_types": ("x", "keys_template"),
    f"{_STRATEGY}: _unwrap_pyt_sharded_tensor": ("sh_ten",),
    f"{_STRATEGY}: mcore_to_pyt_state_dict": ("state_dict", "is_loading"),
    f"{_STRATEGY}: MCoreSavePlanner.__init__": ("self",),
    f"{_STRATEGY}: MCoreLoadPlanner.__init__": ("self",),
    f"{_ROOM}/state_dict_utils.py: save_preprocess": ("sharded_state_dict", "validate_access_integrity"),
    f"{_ROOM}/state_dict_utils.py: load_preprocess": ("sharded_state_dict",),
    f"{_ROOM}/validation.py: validate_sharding_integrity": ("global_metadata",),
    f"{_ROOM}/utils.py: extract_sharded_base": ("sharded_state_dict",),
    f"{_ROOM}/utils.py: force_all_tensors_to_non_fp8": ("sharded_state_dict",),
    f"{_ROOM}/dict_utils.py: dict_list_map_inplace": ("f", "x"),
    f"{_ROOM}/dict_utils.py: merge": ("x1", "x2"),
    f"{_ROOM}/mapping.py: apply_factory_merges": ("x1", "x2"),
    f"{_ROOM}/mapping.py: ShardedTensorFactory.merge_fn": (),
    f"{_ROOM}/mapping.py: LocalNonpersistentObject.__init__": ("self", "obj"),
    f"{_ROOM}/mapping.py: ShardedTensor.allow_shape_mismatch": (),
}
_OPTIMIZER = "megatron/core/optimizer"
_DISTRIBUTED = f"{_OPTIMIZER}/distrib_optimizer.py: DistributedOptimizer"
_BUFFERS = "megatron/core/distributed/param_and_grad_buffer.py"
OPTIMIZER_NAMES = {
    f"{_DISTRIBUTED}._get_main_param_and_optimizer_states": ("self", "model_param"),
    f"{_OPTIMIZER}/cpu_offloading/hybrid_optimizer.py: HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers": (
        "self",
    ),
    f"{_OPTIMIZER}/optimizer.py: ChainedOptimizer.chained_optimizers": (),
    f"{_OPTIMIZER}/optimizer.py: Float16OptimizerWithFloat16Params.main_param": (),
    f"{_BUFFERS}: _ParamAndGradBuffer.param_index_map": (),
    f"{_BUFFERS}: _ParamAndGradBuffer.buckets": (),
    f"{_BUFFERS}: _ParamAndGradBucket.offset": (),
    f"{_BUFFERS}: _ParamAndGradBucket.grad_data": (),
}
_TORCH = "torch/distributed/checkpoint"
TORCH_NAMES = {
    f"{_TORCH}/filesystem.py: FileSystem.create_stream": ("self", "path", "mode"),
    f"{_TORCH}/filesystem.py: _FileSystemWriter.fs": (),
    f"{_TORCH}/filesystem.py: _FileSystemWriter.finish": ("self", "metadata", "results"),
    f"{_TORCH}/filesystem.py: FileSystemReader.read_metadata": ("self",),
    f"{_TORCH}/filesystem.py: FileSystemReader.path": (),
    f"{_TORCH}/filesystem.py: _StorageInfo.relative_path": (),
    f"{_TORCH}/storage.py: WriteResult.index": (),
    f"{_TORCH}/storage.py: WriteResult.storage_data": (),
    f"{_TORCH}/default_planner.py: DefaultSavePlanner.resolve_data": ("self", "write_item"),
    f"{_TORCH}/api.py: CheckpointException.failures": (),
}


def test_names_of_megatron() -> None:
    root = require_checked(["megatron-core"], MEGATRON, "gspo_hpc/checkpoint/compat.py", MEGATRON_NAMES)
    assert missing(root, MEGATRON_NAMES) == []
    root = require_checked(["megatron-core"], MEGATRON, "gspo_hpc/checkpoint/optimizer_state.py", OPTIMIZER_NAMES)
    assert missing(root, OPTIMIZER_NAMES) == []


def test_names_of_torch() -> None:
    root = require_checked(["torch"], TORCH, "gspo_hpc/checkpoint/compat.py", TORCH_NAMES)
    assert missing(root, TORCH_NAMES) == []


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def state_of(value: float, extra: Any = None) -> dict[str, Any]:
    """Return the sharded state of a linear layer; `extra`: what Transformer Engine keeps beside its weight."""
    weight = torch.full((4, 3), value)
    found: dict[str, Any] = {"layer.weight": ShardedTensor.from_rank_offsets("layer.weight", weight)}
    if extra is not None:
        found["layer._extra_state"] = ShardedObject("layer._extra_state", extra, (1,), (0,))
    return found


@pytest.mark.parametrize(("saved", "here"), [(None, "scales"), ("scales", None), ("other scales", "scales")])
def test_layers_with_and_without_an_object_beside_their_weights_load_each_others(
    saved: Any, here: Any, alone: dist.ProcessGroup, tmp_path: Path
) -> None:
    """What a layer keeps beside its weights stays its own: it is neither asked of the checkpoint nor unpickled."""
    shards = tmp_path / "shards"
    shards.mkdir()
    compat.prepare(state_of(2.0, saved), shards, alone, {})()
    assert b"scales" not in b"".join(path.read_bytes() for path in shards.iterdir())
    loaded = compat.load(state_of(0.0, here), shards)
    assert torch.equal(loaded["layer.weight"], torch.full((4, 3), 2.0))
    assert loaded.get("layer._extra_state") == here


@pytest.fixture
def checksums() -> Iterator[None]:
    """Leaves the option of torch.save as it was."""
    before = torch.serialization.get_crc32_options()
    yield
    torch.serialization.set_crc32_options(before)


@pytest.mark.usefixtures("checksums")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_saved_after_a_checkpoint_has_the_checksums_that_it_would_have_had(
    wanted: bool, fails: bool, alone: dist.ProcessGroup, tmp_path: Path
) -> None:
    """A file that an observer saves is an archive which any program may check, also after a save that failed."""
    torch.serialization.set_crc32_options(wanted)
    shards = tmp_path / "shards"
    shards.mkdir()
    write = compat.prepare(state_of(2.0), shards, alone, {})
    if fails:
        shutil.rmtree(shards)
        shards.touch()
        with pytest.raises(CheckpointException):
            write()
    else:
        write()
    torch.save(torch.ones(3), tmp_path / "mine.pt")
    with zipfile.ZipFile(tmp_path / "mine.pt") as archive:
        assert (archive.testzip() is None) == wanted


@pytest.mark.parametrize(
    "name", ["../../x.distcp", "../__0_0.distcp", "/tmp/x.distcp", "a/b.distcp", "..", "", "x.pt", "__0_0.distcp\n"]
)
def test_an_index_names_files_of_its_own_folder_only(name: str, alone: dist.ProcessGroup, tmp_path: Path) -> None:
    """An index that somebody hands over cannot make a rank read another file."""
    shards = tmp_path / "shards"
    shards.mkdir()
    compat.prepare(state_of(2.0, None), shards, alone, {})()
    path = shards / index.NAME
    content = json.loads(path.read_text())
    assert index.read(shards).state_dict_metadata.keys() == content["tensors"].keys()
    for tensor in content["tensors"].values():
        for piece in tensor["pieces"]:
            piece[2] = name
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is no name of a shard") as error:
        index.read(shards)
    assert str(path) in str(error.value)


def test_a_file_that_ends_too_early_has_a_reason(tmp_path: Path) -> None:
    """The error that torch raises for it has no text."""
    (tmp_path / "common.pt").write_bytes(b"")
    with pytest.raises(EOFError) as error:
        torch.load(tmp_path / "common.pt", weights_only=True)
    assert compat._reason(error.value) == "it ends too early: it is cut off or empty"
    assert compat._reason(KeyError()) == "KeyError: it is damaged"
