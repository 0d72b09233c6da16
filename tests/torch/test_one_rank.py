"""What exports and evaluates a run has one rank, however the run was laid out."""

from __future__ import annotations

from pathlib import Path

import yaml

from gspo_hpc import config_file
from gspo_hpc.config import Parallel
from gspo_hpc.jobs import ONE_RANK


def test_nothing_is_left_of_a_layout(tmp_path: Path) -> None:
    every = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    path = tmp_path / "config.yaml"
    cluster = {"nodes": 2, "gpus_per_node": 4}
    path.write_text(yaml.safe_dump({"cluster": cluster, "parallel": every, "optimizer": {"distributed": True}}))
    before, after = config_file.load(path), config_file.load(path, ONE_RANK)
    assert all(getattr(before.parallel, key) != getattr(Parallel(), key) for key in every)
    assert after.parallel == Parallel() and after.world_size == 1 and not after.optimizer.distributed
