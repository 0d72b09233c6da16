"""An evaluation as a Slurm job: what it asks for, and when it goes back into the queue (a test on a Slurm of its own is
tests/slurm/test_evaluation.py).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.launch.slurm import ending, evaluation_job
from gspo_hpc.system.exit_codes import FAILED, REQUEUE
from gspo_hpc.system.signals import StopFlag


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text("model: {path: some/model}\nslurm: {partition: gpu, time_minutes: 90}\n")
    return path


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removesuffix("=True") for line in capsys.readouterr().out.splitlines()]


def test_a_job_is_one_rank_of_a_low_priority_that_may_go_back(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(config), "--slurm", "--dry-run", "--out", str(tmp_path / "out.jsonl")]
    assert main([*words, "cluster.nodes=4", "cluster.gpus_per_node=8", "parallel.tensor_model_parallel_size=4"]) == 0
    script = lines(capsys)
    wanted = ["nodes=1", "ntasks-per-node=1", "gpus-per-node=1", "partition=gpu", "time=90", "nice=1000", "requeue"]
    assert {f"#SBATCH --{word}" for word in wanted} <= {*script}, script
    assert script[-1].endswith(f"-m gspo_hpc.launch.slurm.evaluation_job {tmp_path}/out.jsonl.jobs/jobs/NNNN")
    assert main([*words, "slurm.sbatch={nice: 50}", "slurm.requeue=false"]) == 0
    script = lines(capsys)
    assert "#SBATCH --nice=50" in script and "#SBATCH --no-requeue" in script
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dry-run"], "--dry-run: belongs to a Slurm job, which --slurm asks for"),
        (["--slurm"], "--out FILE is needed"),
        (["--slurm", "--json", "--out", "out.jsonl"], "--json: a job prints its scores into its log"),
    ],
)
def test_what_a_job_cannot_do_is_refused(
    words: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(config), *words]) == 2
    assert said in capsys.readouterr().err


class Job:
    """A job in which a program stands for the evaluation; it notes how often it goes back into the queue."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, end: float | None) -> None:
        self.folder, self.out, self.requeued = tmp_path / "0001", tmp_path / "out.jsonl", 0
        self.folder.mkdir(exist_ok=True)
        order = {"target": "m", "is_run": False, "step": None, "out": str(self.out), "overrides": ["a=1"]}
        (self.folder / evaluation_job.ORDER).write_text(json.dumps(order))
        values = ["slurm.signal_seconds=60", "slurm.time_minutes=2"]
        (self.folder / "config.yaml").write_text(loader.dump(loader.load(None, values)))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setattr(ending, "end_time", lambda config, job_id: end)
        monkeypatch.setattr(ending, "requeue", self._requeue)
        monkeypatch.setattr(evaluation_job, "_POLL", 0.01)
        monkeypatch.setattr(evaluation_job.Order, "command", lambda *_: [sys.executable, "-c", program])

    def _requeue(self, *_: Any) -> int:
        self.requeued += 1
        return REQUEUE

    def run(self) -> int:
        flag = StopFlag().start()
        try:
            return evaluation_job.run(self.folder, flag)
        finally:
            flag.close()

    def keep(self, count: int) -> None:
        folder = Path(f"{self.out}.unfinished") / "1-0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rank-0000.journal").write_bytes(b"x" * count)


def test_a_job_ends_as_its_evaluation_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (0, 1):
        job = Job(tmp_path, monkeypatch, f"raise SystemExit({code})", time.time() + 3600)
        assert (job.run(), job.requeued) == (code, 0)


def test_a_job_whose_time_is_up_goes_back_as_long_as_that_is_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, monkeypatch, "import time; time.sleep(100)", time.time() + 59)
    job.keep(100)
    assert (job.run(), job.requeued) == (REQUEUE, 1)
    job.keep(250)
    assert (job.run(), job.requeued) == (REQUEUE, 2)
    assert (job.run(), job.requeued) == (FAILED, 2), "nothing was answered since"
    assert "slurm.time_minutes (2) were not enough to answer one more prompt" in capfd.readouterr().out


def test_a_job_without_a_limit_waits_for_its_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, monkeypatch, "import time; time.sleep(0.3)", None)
    assert (job.run(), job.requeued) == (0, 0)


def test_the_command_of_a_job_is_that_of_the_shell() -> None:
    order = evaluation_job.Order("runs/my", True, 20, None, ("eval.samples=8",))
    config, code = loader.load(None, []), Path("jobs/0001/code.zip")
    words = order.command(config, code)
    wanted = ["-m", "gspo_hpc", "eval", "runs/my", "--step", "20", "eval.samples=8"]
    assert words[words.index("-m") :] == wanted
    box = "slurm.container={kind: apptainer, image: /images/own.sif, python: /usr/bin/python3}"
    words = order.command(loader.load(None, [box, "slurm.srun=[--mpi=none]"]), code)
    assert words[:2] == ["srun", "--nodes=1"] and "--mpi=none" in words and "/images/own.sif" in words
    assert words[words.index("/usr/bin/python3") + 2 :] == wanted
    apart = evaluation_job.Order("runs/my", True, 20, "/elsewhere/out.jsonl", ())
    assert "/elsewhere:/elsewhere" in apart.command(loader.load(None, [box]), code)


def test_what_other_evaluations_of_a_run_keep_is_no_progress(tmp_path: Path) -> None:
    order = evaluation_job.Order(str(tmp_path), True, 20, None, ())
    assert order.kept_bytes() == 0
    for name, size in (("000020-ab", 7), ("000010-ab", 100)):
        folder = tmp_path / "evaluations" / "unfinished" / name / "1-0"
        folder.mkdir(parents=True)
        (folder / "rank-0000.journal").write_bytes(b"x" * size)
    assert order.kept_bytes() == 7
