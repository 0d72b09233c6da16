"""A run of LoRA adapters in bfloat16, whose engine has them beside its weights: killed and resumed, and evaluated.

Three starts of a rank with an engine, and one that evaluates: two minutes beside three busy processes. It would catch
an engine that goes on without adapters, or with others than the checkpoint's, after a start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import harness

STEPS = 6
ADAPTED = (
    *harness.OVERRIDES,
    harness.ONE_RANK,
    f"run.max_steps={STEPS}",
    "model.dtype=bfloat16",
    "optimizer.lr=2e-3",
    "optimizer.lr_warmup_steps=0",
    "eval.before=false",
    "adapter.type=lora",
    "adapter.rank=4",
)


@pytest.fixture(scope="module")
def finished(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was left alone."""
    folder = tmp_path_factory.mktemp("beside")
    log = folder / "log"
    process = harness.start(harness.command(tiny_config, folder / "run", *ADAPTED), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    return folder / "run"


def test_engines_agree_with_the_trainer(finished: Path) -> None:
    records = harness.metrics(finished)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["logprob_gap_mean"] < 0.05 for record in records), records
    assert "beside their weights" in " ".join(json.loads((finished / "plan.json").read_text())["notes"])


@pytest.mark.timeout(900)
def test_a_killed_run_equals_the_one_left_alone(tiny_config: Path, finished: Path, tmp_path: Path) -> None:
    """It resumes between two updates of a rollout; its new engine, whose first version it is, samples the next one."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *ADAPTED)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) == 3, process, log)
    harness.kill(process)
    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    assert "from step" in log.read_text().rpartition("attempt 2,")[2][:40], "it resumed from no checkpoint"
    assert harness.comparable(run_dir) == harness.comparable(finished)
    assert harness.samples(run_dir) == harness.samples(finished)


@pytest.mark.timeout(600)
def test_eval_of_a_run_is_its_last_evaluation(finished: Path) -> None:
    line = [sys.executable, "-m", "gspo_hpc", "eval", str(finished), "--json", "eval.samples=2"]
    done = subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [record for record in harness.metrics(finished) if "eval/accuracy" in record]
    assert json.loads(done.stdout)["eval/accuracy"] == records[-1]["eval/accuracy"]
