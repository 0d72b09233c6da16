"""What exports and evaluates a run has one rank, however the run was laid out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gspo_hpc.config import loader
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Parallel
from gspo_hpc.policy.layers import uses_transformer_engine
from gspo_hpc.policy.process_groups import cuda_environment
from gspo_hpc.training.bringup import ONE_RANK


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
    before, after = loader.load(path), loader.load(path, ONE_RANK)
    assert all(getattr(before.parallel, key) != getattr(Parallel(), key) for key in every)
    assert after.parallel == Parallel() and after.world_size == 1 and not after.optimizer.distributed


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"layers": "transformer_engine"}, "there are no GPUs; model.layers=torch needs nothing"),
        ({"fp8": "hybrid"}, "model.fp8 needs the layers of Transformer Engine"),
    ],
)
def test_layers_that_cannot_be_are_refused(model: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        uses_transformer_engine(from_dict({"cluster": {"platform": "cpu"}, "model": model}))
    assert not uses_transformer_engine(from_dict({"cluster": {"platform": "cpu"}}))


def test_what_cuda_is_told_follows_from_the_layout() -> None:
    plain = cuda_environment(from_dict({}))
    split = cuda_environment(from_dict({"parallel": {"tensor_model_parallel_size": 2}}))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in plain and split["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert cuda_environment(from_dict({"parallel": {"context_parallel_size": 2}})) == split
    assert not any(name.startswith("NCCL_") for name in plain | split), "NVLink SHARP is NCCL's to choose"
    ordered = cuda_environment(from_dict({"run": {"deterministic": True}, "cluster": {"platform": "cuda"}}))
    assert ordered["NCCL_NVLS_ENABLE"] == "0"
