"""Save and load everything that a run needs to go on: sharded by Megatron-Core, committed by ``gspo_hpc.commit``.

Floor 3. A checkpoint directory holds ``megatron/`` (model and optimizer shards, independent of the layout that wrote
them), ``rng-RANK.json`` (generator states), ``cursor.json`` (where the run stands, plain JSON) and ``rollout.jsonl``
(the groups of the rollout in use, with what later updates of it need). All ranks call :func:`save` and :func:`load`.
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException

from gspo_hpc.durable import plain_disk_full
from gspo_hpc.pipeline import Policy
from gspo_hpc.process_groups import Ranks, barrier


class _InProcess(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by this process.

    Megatron's own strategy forks writers from a process that by then has the threads of gloo, vLLM's client and W&B,
    and leaves a manager process behind when the rank is killed. The files are the same.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=False),  # commit.py syncs
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _state(policy: Policy, is_loading: bool) -> dict[str, Any]:
    model = policy.module.sharded_state_dict()
    state: dict[str, Any] = {"model": model, "scheduler": policy.scheduler.state_dict()}
    state["optimizer"] = policy.optimizer.sharded_state_dict(model, is_loading=is_loading)
    return state


def save(policy: Policy, staging: Path) -> None:
    """Write this rank's part into a staging directory that exists; the caller commits it once all ranks are back."""
    shards = staging / "megatron"
    if policy.ranks.rank == 0:
        shards.mkdir(mode=0o700, exist_ok=True)
    barrier(policy.ranks.device)
    with plain_disk_full(staging):
        try:
            dist_checkpointing.save(_state(policy, is_loading=False), str(shards), sharded_strategy=_InProcess())
        except CheckpointException as error:  # one for all ranks, around what was the matter with each
            raise next((cause for cause, _ in error.failures.values() if isinstance(cause, OSError)), error) from None
        (staging / f"rng-{policy.ranks.rank}.json").write_text(json.dumps(_rng_state(policy.ranks)), "utf-8")
    barrier(policy.ranks.device)


def load(policy: Policy, path: Path) -> None:
    """Bring model, optimizer, schedule and this rank's generators to what `path` holds."""
    loaded = dist_checkpointing.load(_state(policy, is_loading=True), str(path / "megatron"))
    policy.module.load_state_dict(loaded["model"])
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    mine = path / f"rng-{policy.ranks.rank}.json"
    if mine.exists():  # another number of ranks than the one that saved has no state of its own
        _set_rng_state(json.loads(mine.read_text("utf-8")), policy.ranks)


def load_weights(policy: Policy, path: Path) -> None:
    """Only the model, for export and evaluation."""
    loaded = dist_checkpointing.load({"model": policy.module.sharded_state_dict()}, str(path / "megatron"))
    policy.module.load_state_dict(loaded["model"])


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
