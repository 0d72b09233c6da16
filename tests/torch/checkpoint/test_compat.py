"""The private names of Megatron-Core and torch that checkpoint.compat relies on are there."""

from __future__ import annotations

import json
from pathlib import Path

from gspo_hpc.checkpoint import compat
from tests.sources import missing, require_checked

MEGATRON = ("0.16.1", "0.19.2")
TORCH = ("2.13.0",)

_ROOM = "megatron/core/dist_checkpointing"
MEGATRON_NAMES = {
    f"{_ROOM}/strategies/torch.py: _replace_state_dict_keys_with_sharded_keys": (
        *("sharded_state_dict", "keep_only_main_replica"),
    ),
    f"{_ROOM}/strategies/torch.py: mcore_to_pyt_state_dict": ("state_dict", "is_loading"),
    f"{_ROOM}/strategies/torch.py: TorchDistSaveShardedStrategy.__init__": ("self", "backend", "version"),
    f"{_ROOM}/strategies/torch.py: TorchDistSaveShardedStrategy.async_save": (
        *("self", "sharded_state_dict", "checkpoint_dir"),
    ),
    f"{_ROOM}/strategies/torch.py: TorchDistSaveShardedStrategy.keep_only_main_replica": (),
    f"{_ROOM}/strategies/torch.py: MCoreSavePlanner.__init__": ("self",),
    f"{_ROOM}/strategies/async_utils.py: AsyncRequest.async_fn": (),
    f"{_ROOM}/strategies/async_utils.py: AsyncRequest.async_fn_args": (),
    f"{_ROOM}/strategies/async_utils.py: AsyncRequest.finalize_fns": (),
    f"{_ROOM}/core.py: CheckpointingConfig.sharded_backend": (),
    f"{_ROOM}/core.py: CheckpointingConfig.sharded_backend_version": (),
    f"{_ROOM}/core.py: save_config": ("config", "checkpoint_dir"),
}
_TORCH = "torch/distributed/checkpoint"
TORCH_NAMES = {
    f"{_TORCH}/filesystem.py: FileSystem.create_stream": ("self", "path", "mode"),
    f"{_TORCH}/filesystem.py: _FileSystemWriter.fs": (),
    f"{_TORCH}/default_planner.py: DefaultSavePlanner.resolve_data": ("self", "write_item"),
}


def test_names_of_megatron() -> None:
    root = require_checked(["megatron-core"], MEGATRON, "gspo_hpc/checkpoint/compat.py", MEGATRON_NAMES)
    assert missing(root, MEGATRON_NAMES) == []


def test_names_of_torch() -> None:
    root = require_checked(["torch"], TORCH, "gspo_hpc/checkpoint/compat.py", TORCH_NAMES)
    assert missing(root, TORCH_NAMES) == []


def test_the_format_is_that_of_megatron(tmp_path: Path) -> None:
    compat.write_format(tmp_path)
    written = json.loads((tmp_path / "metadata.json").read_text("utf-8"))
    assert (written["sharded_backend"], written["sharded_backend_version"]) == ("torch_dist", 1)
