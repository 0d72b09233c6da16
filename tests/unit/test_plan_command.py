"""gspo-hpc plan beyond the arithmetic: the batch script on request, and JSON keys that docs/plan.md describes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc import config_file, submit
from gspo_hpc.cli import main

PARTIAL = """
cluster: {nodes: 2, gpus_per_node: 8}
parallel: {tensor_model_parallel_size: 2}
batch: {micro_batch_size: 1, global_batch_size: 32, steps_per_generation: 2, num_generations: 4}
"""


@pytest.fixture
def preset(project: Path) -> str:
    return str(project / "configs" / "qwen2.5_32b_tp4_pp4.yaml")


def test_the_batch_script_comes_after_the_page(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = submit.dry_run(config_file.load(preset, ["slurm.partition=gpu"]))
    assert script.startswith("#!/bin/bash\n") and "#SBATCH --partition=gpu\n" in script
    assert main(["plan", preset, "slurm.partition=gpu"]) == 0
    page = capsys.readouterr().out
    assert main(["plan", preset, "slurm.partition=gpu", "--sbatch"]) == 0
    assert capsys.readouterr().out == f"{page}\n{script}"
    assert main(["plan", preset, "slurm.partition=gpu", "--sbatch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sbatch"] == script
    assert main(["plan", preset, "--json"]) == 0
    assert "sbatch" not in json.loads(capsys.readouterr().out)


def test_the_batch_script_needs_no_slurm(preset: str, tmp_path: Path) -> None:
    """Nor anything else on PATH; and nothing is written."""
    command = [sys.executable, "-m", "gspo_hpc.cli", "plan", preset, "--sbatch"]
    environment = os.environ | {"PATH": "", "PYTHONPATH": str(Path(preset).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0 and "#SBATCH --nodes=4\n" in done.stdout and done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_no_script_of_a_run_that_would_be_refused(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", preset, "--sbatch", "batch.global_batch_size=250"]) == 2
    output = capsys.readouterr()
    assert "Broken rules" in output.out and "#SBATCH" not in output.out
    assert "no batch script: rule " in output.err
    assert main(["plan", preset, "--sbatch", "--json", "batch.global_batch_size=250"]) == 2
    assert json.loads(capsys.readouterr().out)["sbatch"] is None
    partial = tmp_path / "partial.yaml"
    partial.write_text(PARTIAL)
    assert main(["plan", str(partial)]) == 0
    capsys.readouterr()
    assert main(["plan", str(partial), "--sbatch"]) == 2  # a plan, but not of a run
    assert "no batch script: to train, give also: run.max_steps, model.path" in capsys.readouterr().err
