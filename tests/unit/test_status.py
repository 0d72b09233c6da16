"""status, logs and cancel, read from run directories; Slurm's part is shown on a real one in tests/slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo_hpc import config_file, status
from gspo_hpc.cli import main
from gspo_hpc.rundir import Attempt, RunDir, open_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made, _ = open_run(config_file.from_dict({"run": {"dir": str(tmp_path / "run"), "max_steps": 10}}))
    return made


def attempt(run: RunDir, reason: str | None, detail: str = "") -> Attempt:
    with run.lock():
        begun = run.new_attempt(config_file.load(run.config))
        if reason is not None:
            begun.finish(reason, 1, detail)
    return begun


def test_a_new_run_and_one_that_failed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.read(run.path).state == "new"
    attempt(run, "preempted")
    attempt(run, "failed", "rank 3 on n2: OSError: x")
    for step in range(5):
        run.append_metrics({"step": step, "reward": 0.25 * step, "seconds": 2.0, "completion_tokens_per_s": 100.0})
    now = status.read(run.path)
    assert (now.state, now.reason, now.step, now.max_steps) == ("failed", "rank 3 on n2: OSError: x", 4, 10)
    assert (now.reward, now.tokens_per_s, now.seconds_left_in_run) == (1.0, 100.0, 12.0)
    assert now.ended == {"preempted": 1, "failed": 1}
    assert main(["status", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == now.to_json()
    assert main(["status", str(run.path)]) == 0
    page = capsys.readouterr().out
    assert "failed (rank 3 on n2: OSError: x)" in page and "step 4 of 10, reward 1.000" in page
    assert "2 attempts: 1 preempted, 1 failed" in page


def test_a_run_that_was_killed_is_no_running_one(run: RunDir) -> None:
    attempt(run, None)
    assert status.read(run.path).state == "killed"


def test_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert main(["logs", str(tmp_path / "nothing")]) == 2
    assert "no such run directory" in capsys.readouterr().err


def test_logs_of_a_rank_and_of_an_earlier_attempt(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        begun = attempt(run, "failed")
        begun.log_path(0).write_text(f"rank 0 of attempt {number}\n")
        begun.log_path(1).write_text(f"rank 1 of attempt {number}\n")
    for words, text in (
        ([], "rank 0 of attempt 2\n"),
        (["--rank", "1"], "rank 1 of attempt 2\n"),
        (["--attempt", "1", "--rank", "1"], "rank 1 of attempt 1\n"),
        (["-f"], "rank 0 of attempt 2\n"),  # nothing runs: it ends
    ):
        assert main(["logs", str(run.path), *words]) == 0
        assert capsys.readouterr().out == text
    assert main(["logs", str(run.path), "--rank", "7"]) == 2
    assert "no log of rank 7; there are ranks 0 to 1" in capsys.readouterr().err
    assert main(["logs", str(run.path), "--attempt", "9"]) == 2
    assert "no attempt 9; there are 1 to 2" in capsys.readouterr().err


def test_the_log_of_the_job_is_what_a_person_sees(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    begun = attempt(run, "failed")
    record = json.loads((begun.path / "attempt.json").read_text()) | {"slurm_job_id": "12"}
    (begun.path / "attempt.json").write_text(json.dumps(record))
    (run.path / "jobs" / "0001").mkdir(parents=True)
    (run.path / "jobs" / "0001" / "12_0_log.out").write_text("what people see\n")
    begun.log_path(0).write_text("what libraries say\n")
    assert main(["logs", str(run.path)]) == 0
    assert capsys.readouterr().out == "what people see\n"
    assert main(["logs", str(run.path), "--rank", "0"]) == 0
    assert capsys.readouterr().out == "what libraries say\n"


TRACE = 'chatter\nTraceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n{}\nafterwards\n'


def test_the_first_error_is_the_cause(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    begun = attempt(run, "failed")
    texts = {
        0: TRACE.format("RuntimeError: [gloo] Connection closed by peer"),
        1: TRACE.format("ZeroDivisionError: the cause"),
        2: TRACE.format("KeyError: later"),
        3: "nothing\n",
    }
    for rank, text in texts.items():
        begun.log_path(rank).write_text(text)
        os.utime(begun.log_path(rank), (1000 + rank, 1000 + rank))
    attempt(run, "preempted")
    assert main(["logs", str(run.path), "--errors"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(str(begun.log_path(1))) and out.rstrip().endswith("ZeroDivisionError: the cause")
    assert "chatter" not in out and "afterwards" not in out
    assert main(["logs", str(run.path), "--errors", "--attempt", "2"]) == 2
    assert "no traceback" in capsys.readouterr().err


def test_cancel_asks_the_process_that_runs_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import signal, sys; from gspo_hpc.rundir import RunDir\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "with RunDir(sys.argv[1]).lock():\n"
        "    print('held', flush=True); signal.sigwait([signal.SIGTERM]); print('asked', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert main(["cancel", str(run.path)]) == 0
        assert process.stdout.readline() == "asked\n"
        assert process.wait(10) == 0
    finally:
        process.send_signal(signal.SIGKILL)
    capsys.readouterr()
    time.sleep(0.1)
    assert main(["cancel", str(run.path)]) == 2
    assert "neither runs nor waits" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(5, "0m 05s"), (3600, "1h 00m"), (90000, "1d 1h"), (59.6, "1m 00s")])
def test_spans(seconds: float, text: str) -> None:
    assert status.span(seconds) == text


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts_know_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("submit", "--dry-run", "cancel", "--errors"))
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
