"""A process without a GPU does not use Transformer Engine, though it may be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gspo_hpc.config.loader import from_dict
from gspo_hpc.policy import process_groups

PROGRAM = """
import torch
from gspo_hpc.policy import process_groups
from megatron.core import optimizer
assert issubclass(optimizer.Adam, torch.optim.Optimizer) and optimizer.Adam.__module__.startswith("torch.")
"""


@pytest.mark.parametrize("first", ["", "from megatron.core import optimizer"])
def test_megatron_takes_the_optimizer_of_torch(tmp_path: Path, first: str) -> None:
    """The planted package shows whether anything imports it; Megatron alone does."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('a kernel for GPUs is loaded')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", first + PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ("a kernel for GPUs is loaded" in done.stderr) == bool(first), done.stderr[-2000:]
    assert (done.returncode == 0) == (not first)


def test_a_rank_without_its_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries' own error was a missing attribute of torch._C."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    monkeypatch.setattr(process_groups, "cuda_environment", lambda config: {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ValueError, match=r"sees 3 GPUs on .*needs GPU 3: .*set cluster\.platform=cpu"):
        process_groups.start(from_dict({"cluster": {"platform": "cuda"}}))
