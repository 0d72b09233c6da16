"""What a person does with a run on Slurm: look at it, be refused, cancel it, go on with it elsewhere."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run import harness as runs
from tests.slurm import harness
from tests.slurm.harness import SlurmRun

Submit = Callable[..., SlurmRun]


@pytest.mark.timeout(900)
def test_a_run_from_the_outside(submit: Submit, undisturbed: SlurmRun, tiny_folder: Path, tmp_path: Path) -> None:
    """status, a second submission, logs, cancel, changed data, a damaged checkpoint, another layout for the rest."""
    data = tmp_path / "train.jsonl"
    data.write_bytes((tiny_folder / "data" / "train.jsonl").read_bytes())
    run = submit(f"data.train={data}")
    run.wait_for("two steps", lambda: run.last_step() >= 2)

    told = json.loads(run.command("status", str(run.run_dir), "--json").stdout)
    assert (told["state"], told["job_id"], told["nodes"]) == ("running", run.job_id, "n[1-2]")
    assert told["step"] >= 2 and 0 < told["seconds_left_in_job"] <= 3600 and told["seconds_left_in_run"] > 0
    second = run.command("submit", str(run.config), f"run.dir={run.run_dir}", f"data.train={data}", *harness.OVERRIDES)
    assert second.returncode == 2 and "is running already" in second.stderr, second.stderr
    assert "2/8" in run.command("logs", str(run.run_dir)).stdout

    cancelled = run.command("cancel", str(run.run_dir))
    assert cancelled.returncode == 0, cancelled.stderr
    run.wait_until_ended("CANCELLED")
    step = run.last_step()
    assert 2 <= step < harness.STEPS and run.attempts()[-1]["reason"] == "cancelled"
    assert (run.run_dir / "checkpoints" / f"{step:06d}" / "COMMITTED").exists()
    assert json.loads(run.command("status", str(run.run_dir), "--json").stdout)["state"] == "cancelled"

    rows = data.read_text()
    data.write_text(rows + '{"prompt": "1 + 1 = ", "answer": "2"}\n')
    changed = run.command("submit", str(run.config), f"run.dir={run.run_dir}", f"data.train={data}", *harness.OVERRIDES)
    assert changed.returncode == 2 and "is not the file" in changed.stderr and "sha256" in changed.stderr
    data.write_text(rows)
    other = run.command("submit", str(run.config), f"run.dir={run.run_dir}", "optimizer.lr=1", *harness.OVERRIDES)
    assert other.returncode == 2 and "optimizer.lr: 0.00015 -> 1.0" in other.stderr, other.stderr

    shards = (run.run_dir / "checkpoints" / f"{step:06d}" / "megatron").iterdir()
    largest = max(shards, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    step -= 1  # that of the checkpoint before

    run.overrides = (
        *(f"data.train={data}", "cluster.nodes=1", "cluster.gpus_per_node=2"),
        *("parallel.tensor_model_parallel_size=2", "rollout.engines_per_node=1"),
    )
    run.submit()
    run.wait_until_ended()
    assert f"checkpoint {step + 1} is damaged and not used: megatron/{largest.name} was changed" in run.log()
    assert "TP 1" in run.log() and "TP 2" in run.log() and "not bit for bit" in run.log()
    records, expected = runs.metrics(run.run_dir), runs.metrics(undisturbed.run_dir)
    assert [record["step"] for record in records] == list(range(harness.STEPS + 1))
    assert runs.samples(run.run_dir).keys() == runs.samples(undisturbed.run_dir).keys()  # step, phase, prompt
    assert [r.get("lr") for r in records] == [r.get("lr") for r in expected]
    assert records[step]["attempt"] < records[step + 1]["attempt"]
    assert runs.comparable(run.run_dir)[: step + 1] == runs.comparable(undisturbed.run_dir)[: step + 1]
    assert all(r["communication_over_computation"] > 0 for r in records[step + 1 :]), "layers are split over two cores"
    assert records[step + 1]["grad_norm"] == pytest.approx(expected[step + 1]["grad_norm"], rel=1e-3)


@pytest.mark.timeout(300)
def test_scancel_is_no_preemption(submit: Submit) -> None:
    """A job that is cancelled with Slurm's own command stays cancelled."""
    run = submit()
    run.wait_for("the ranks", lambda: len(run.workers()) == 2)
    subprocess.run(["scancel", run.job_id], check=True)
    run.wait_until_ended("CANCELLED", timeout=60)
    time.sleep(5.0)
    assert run.state().name == "CANCELLED", run.log()


def test_a_job_that_waits_is_cancelled(submit: Submit) -> None:
    run = submit("slurm.sbatch={begin: now+1hour}")
    told = json.loads(run.command("status", str(run.run_dir), "--json").stdout)
    assert (told["state"], told["reason"]) == ("waiting", "BeginTime")
    assert run.command("cancel", str(run.run_dir)).returncode == 0
    assert run.state().name == "CANCELLED"


def test_what_slurm_says_no_to(submit: Submit, tmp_path: Path, tiny_config: Path) -> None:
    run = SlurmRun(tiny_config, tmp_path / "run", ("slurm.partition=no_such_partition",))
    words = ("submit", str(run.config), f"run.dir={run.run_dir}", *harness.OVERRIDES, *run.overrides)
    done = run.command(*words)
    assert done.returncode == 2 and "invalid partition" in done.stderr.lower(), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
