"""The job that only joins the process groups of a run: it shows every rank's place, and loads nothing."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import parameters
from gspo_hpc.policy.process_groups import Ranks, gather_bytes, start, stop
from gspo_hpc.system.files import write_json

PLACES = "ranks.json"


def dry_run(folder: Path) -> None:
    """Join the groups of `folder`/config.yaml, use each of them once, and write all places as `folder`/ranks.json."""
    config = loader.load(folder / "config.yaml")
    ranks = start(config)
    try:
        _use_groups(ranks)
        found = gather_bytes(json.dumps(_place(config, ranks)).encode(), ranks.device)
        if ranks.rank == 0:
            write_json(folder / PLACES, [json.loads(one) for one in found])
    finally:
        stop()


def _use_groups(ranks: Ranks) -> None:
    """Sum over every group that this rank is in: backends connect only then."""
    groups = {
        "all ranks": dist.group.WORLD,
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "expert tensor": parallel_state.get_expert_tensor_parallel_group(),
        "expert data": parallel_state.get_expert_data_parallel_group(),
    }
    for name, group in groups.items():
        total = torch.ones(1, device=ranks.device)
        dist.all_reduce(total, group=group)
        size = dist.get_world_size(group)
        if int(total.item()) != size:
            raise RuntimeError(f"a sum of ones over the {size} ranks of the {name} group is {total.item():g}")


def _place(config: Config, ranks: Ranks) -> dict[str, Any]:
    arch = architecture.find(config)
    held = None if arch is None else parameters.of_rank(arch, config, ranks.pp_rank)
    return {
        "rank": ranks.rank,
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "local_rank": ranks.local_rank,
        "tp": ranks.tp_rank,
        "pp": ranks.pp_rank,
        "cp": ranks.cp_rank,
        "dp": ranks.dp_rank,
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
        "expert_dp": parallel_state.get_expert_data_parallel_rank(),
        "parameters": None if held is None else held.dense + held.experts,
    }
