"""status, logs and cancel, read from run directories; Slurm's part is shown on a real one in tests/slurm."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.cli.pages import status as status_page
from gspo_hpc.config import loader
from gspo_hpc.launch import status, waiting
from gspo_hpc.launch.slurm import commands
from gspo_hpc.planning import exactness
from gspo_hpc.report import summary
from gspo_hpc.runs import spending
from gspo_hpc.runs.directory import Attempt, RunDir, open_run
from gspo_hpc.runs.reader import read_run
from gspo_hpc.training.telemetry import headlines


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made, _ = open_run(loader.from_dict({"run": {"dir": str(tmp_path / "run"), "max_steps": 10}}))
    return made


def attempt(run: RunDir, reason: str | None, detail: str = "") -> Attempt:
    with run.lock():
        begun = run.new_attempt(loader.load(run.config))
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
    assert now.exactness is not None and f"  resumes exactly: {now.exactness}\n" in page


def test_status_plan_and_report_say_alike_what_raises_the_grade(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.load_config()
    found = exactness.assess(config)
    raised = "to raise the grade: run.deterministic=true"
    assert main(["status", str(run.path)]) == 0
    page = capsys.readouterr().out
    assert f"\n    {raised}\n    {found.cost}\n" in page
    now = status.read(run.path).to_json()
    assert (now["exactness_settings"], now["exactness_cost"]) == (["run.deterministic=true"], found.cost)
    terminal = Terminal()
    status_page.show([status.read(run.path)] * 2, terminal)
    wide = " ".join(terminal.getvalue().split())
    assert wide.count(raised) == 1 and wide.count(found.cost) == 1, "once for runs of one kind"
    main(["plan", str(run.config)])
    planned = " ".join(capsys.readouterr().out.split())
    assert raised in planned and found.cost in planned
    sections = {"run": {"dir": f"{run.path}-exact", "deterministic": True}, "cluster": {"gpu": "H100-80GB"}}
    exact, _ = open_run(loader.from_dict(sections))
    assert main(["status", str(exact.path)]) == 0
    assert "to raise the grade" not in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_judges_were_asked_is_told_everywhere(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.read(run.path).judges == ""
    account = spending.Spending(
        spending.file_of(run.path, 3), loader.load(run.config).judges, spending.Patience.from_now(run.path, 60.0)
    )
    for _ in range(2):
        number = account.ask(spending.Amount(1, 900, 100, 0.5), seconds=1.0)
        assert number is not None
    account.answered(number, spending.Amount(1, 300, 20, 0.125))
    with run.lock():
        run.new_attempt(loader.load(run.config, ["judges.max_requests=1000"])).finish("stopped", 75)
    told = "2 of 1,000 requests, 1,200 prompt tokens, 120 completion tokens, cost 0.625, 1 of the requests without a"
    assert status.read(run.path).judges.startswith(told)
    run.append_metrics({"step": 1, "seconds": 2.0, "reward": 0.5})
    config = loader.load(run.config)
    lines = [text for text, _ in headlines.closing(config, run.read_metrics(), "stopped", run.path)]
    assert any(line.startswith("asked of judges: 2 requests, 1,200 prompt tokens") for line in lines)
    (fact,) = [one for one in summary.summary(read_run(run.path)).facts if one.name == "Requests to judges"]
    assert (fact.value, fact.unit) == ("2", "of 1,000") and fact.note.startswith("1,200 prompt tokens, 120 completion")
    assert main(["status", str(run.path)]) == 0
    assert f"\n  asked of judges: {told}" in capsys.readouterr().out


def test_the_time_left_follows_the_last_eight_steps(run: RunDir) -> None:
    for step in range(1, 10):
        run.append_metrics({"step": step, "seconds": 90.0 if step == 1 else 2.0})
    assert status.read(run.path).seconds_left_in_run == 2.0


def test_a_run_that_was_killed_is_no_running_one(run: RunDir) -> None:
    attempt(run, None)
    assert status.read(run.path).state == "killed"


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ('{"attempt": 1, "started": "2026-01-01"}', "it lacks ended"),
        ("[]", "it is not a JSON object"),
        ('{"attempt": [], "ended": null}', "attempt is [], but its folder has the number 1"),
        ('{"attempt": 1, "ended": "2026-01-01"}', "it lacks reason"),
        ('{"attempt": 1, "ended": "2026-01-01", "reason": ["x"]}', 'reason is ["x"], which is not text'),
        ('{"attempt": 1, "ended": null, "reached": 3}', "reached is 3, which is not a step and a number of groups"),
        ('{"attempt": 1, "ended', "not valid JSON"),
    ],
)
def test_a_damaged_attempt_is_shown_beside_the_other_runs(
    run: RunDir, tmp_path: Path, content: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other, _ = open_run(loader.from_dict({"run": {"dir": str(tmp_path / "other"), "max_steps": 10}}))
    attempt(other, "stopped")
    begun = attempt(run, "failed")
    begun.log_path(0).write_text("Traceback (most recent call last):\nOSError: x\n")
    record = begun.path / "attempt.json"
    record.write_text(content)
    run.append_metrics({"step": 3, "reward": 0.5, "seconds": 2.0})
    assert main(["status", str(run.path), str(other.path), "--json"]) == 0
    damaged, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert (damaged["state"], damaged["step"], damaged["attempts"]) == ("damaged", 3, 1)
    assert damaged["reason"].startswith(f"{record}: ") and wrong in damaged["reason"]
    assert whole["state"] == "stopped"
    assert main(["status", str(run.path), str(other.path)]) == 0
    page = capsys.readouterr().out
    assert f"{run.path}: damaged (" in page and wrong in page and f"{other.path}: stopped" in page
    assert main(["logs", str(run.path)]) == 0 and "OSError: x" in capsys.readouterr().out
    assert main(["logs", str(run.path), "--errors"]) == 0 and "OSError: x" in capsys.readouterr().out


def test_other_damaged_files_are_named_too(run: RunDir) -> None:
    assert status.read(run.path).state == "new"
    run.config.write_text("run: {max_stepz: 3}\n")
    assert status.read(run.path).reason.startswith(f"{run.config}:1: unknown key run.max_stepz")
    run.info.write_text("{")
    assert status.read(run.path).reason.startswith(f"{run.info}: not valid JSON")
    run, _ = open_run(loader.from_dict({"run": {"dir": str(run.path.parent / "submitted"), "max_steps": 10}}))
    record = run.path / "jobs" / "0001" / "job.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    assert status.read(run.path).reason == f"{record}: not the record of a job: it has no job_id"


def test_lines_of_metrics_that_are_no_records_are_left_out(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(run, "stopped")
    run.append_metrics({"step": 1, "seconds": 4.0, "reward": 0.25})
    run.append_metrics({"step": 2, "seconds": 2.0, "reward": 0.5})
    with run.metrics.open("a") as file:
        file.write('{"reward": 1}\n[]\nnothing\n{"step": "4"}\n{"step": 3, "seconds": [1], "reward": "high"}\n')
    assert main(["status", str(run.path)]) == 0
    assert "stopped" in capsys.readouterr().out
    now = status.read(run.path)
    assert (now.state, now.step, now.reward, now.seconds_left_in_run) == ("stopped", 3, None, 21.0)


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
    assert main(["logs", str(run.path), "--errors", "--attempt", "2"]) == 0
    assert capsys.readouterr().out == f"{run.path}: no error: there is no traceback in the log of any rank\n"


def test_of_a_run_that_was_refused_the_mistake_is_shown_and_no_traceback(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with run.lock():
        begun = run.new_attempt(loader.load(run.config))
    begun.finish("refused", 2, "data.jsonl:3: no prompt\ndata.jsonl:4: no prompt")
    begun.log_path(1).write_text(TRACE.format("ValueError: data.jsonl:3: no prompt") + "error: data.jsonl:3: ...\n")
    assert main(["logs", str(run.path), "--errors"]) == 0
    mistake = "data.jsonl:3: no prompt\ndata.jsonl:4: no prompt\n"
    assert capsys.readouterr().out == f"{begun.log_path(1)}\n{mistake}"


def test_a_run_that_is_done_has_no_time_left(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is done may stand before max_steps, if that was raised since."""
    run.append_metrics({"step": 1, "seconds": 4.0})
    for reason, shown in (("stopped", True), ("done", False)):
        attempt(run, reason)
        assert main(["status", str(run.path)]) == 0
        assert ("36s left in the run" in capsys.readouterr().out) is shown


def test_of_several_errors_the_earliest_is_the_cause(run: RunDir) -> None:
    """Logs do not say when a rank failed: the time of their last line does, whatever the ranks' numbers."""
    begun = attempt(run, "failed")
    for rank, ended in ((0, 1002), (1, 1001), (2, 1003)):
        begun.log_path(rank).write_text(TRACE.format(f"KeyError: of rank {rank}"))
        os.utime(begun.log_path(rank), (ended, ended))
    assert (found := status.first_error(run.path)) is not None and found[0] == begun.log_path(1)


def test_cancel_asks_the_process_that_runs_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import signal, sys; from gspo_hpc.runs.directory import RunDir\n"
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
    assert "is neither running nor waiting" in capsys.readouterr().err


def test_a_terminal_gets_a_table(run: RunDir) -> None:
    attempt(run, "failed", "rank 3 on n2: OSError: x")
    run.append_metrics({"step": 4, "reward": 1.0, "seconds": 20.0, "completion_tokens_per_s": 1234.0})
    ours, theirs = os.openpty()
    environment = os.environ | {"COLUMNS": "160", "TERM": "xterm"}
    command = [sys.executable, "-m", "gspo_hpc", "status", str(run.path)]
    assert subprocess.run(command, stdout=theirs, env=environment, timeout=60, check=False).returncode == 0
    os.close(theirs)
    page = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while part := os.read(ours, 65536):
            page += part
    os.close(ours)
    head, *rows = [line.split() for line in re.sub(r"\033\[[\d;]*m", "", page.decode()).splitlines()]
    assert head[:6] == ["run", "state", "step", "reward", "tokens/s", "spent"]
    words = [word for row in rows for word in row]
    assert {"failed", "1.000", "1,234", "2m00s", "OSError:"} <= {*words}


def test_accuracy_and_time_are_told(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accuracy of the latest evaluation, the seconds of all steps, and how long ago the latest step was."""
    monkeypatch.setattr(status, "_state", lambda *_: ("running", ""))
    run.append_metrics({"step": 0, "eval/accuracy": 0.25})
    run.append_metrics({"step": 1, "reward": 0.5, "seconds": 40.0, "time": time.time() - 500})
    run.append_metrics({"step": 2, "reward": 0.5, "seconds": 20.0, "eval/accuracy": 0.5, "time": time.time() - 125})
    run.append_metrics({"step": 3, "reward": 0.5, "seconds": 30.0, "time": time.time() - 65})
    found = status.read(run.path)
    assert (found.accuracy, found.seconds_spent) == (0.5, 90.0)
    assert found.seconds_since_step is not None and 64 <= found.seconds_since_step < 125
    stream = io.StringIO()
    status_page.show([found], stream)
    lines = stream.getvalue().splitlines()
    assert ", accuracy 0.500" in lines[1]
    assert re.fullmatch(r"  1m30s of steps so far; the latest was logged 1m\d\ds ago", lines[2])
    monkeypatch.setattr(status, "_state", lambda *_: ("done", ""))
    assert status.read(run.path).seconds_since_step is None


def test_an_evaluation_that_was_not_graded_is_no_zero(run: RunDir) -> None:
    """Neither is the accuracy of an earlier one that of the weights now."""
    run.append_metrics({"step": 0, "eval/accuracy": 0.25})
    failed = {"eval/accuracy": None, "eval/ungraded": 1.0, "eval/failure": "judge: no\nanswer"}
    run.append_metrics({"step": 1, "reward": 0.5, "seconds": 40.0} | failed)
    found = status.read(run.path)
    assert (found.accuracy, found.not_graded) == (None, "not graded: judge: no")
    stream = io.StringIO()
    status_page.show([found], stream)
    assert ", accuracy not graded" in stream.getvalue()
    assert "  the latest evaluation was not graded: judge: no\n" in stream.getvalue()
    assert found.to_json()["accuracy"] is None
    run.append_metrics({"step": 2, "reward": 0.5, "seconds": 40.0, "eval/accuracy": 0.5})
    assert (status.read(run.path).accuracy, status.read(run.path).not_graded) == (0.5, "")


def test_what_a_running_run_waits_for(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    quantities = {"num_rollout_prompts": 8, "steps_per_generation": 2, "num_iterations": 1}
    run.plan.write_text(json.dumps({"quantities": quantities}))
    journals = run.rollouts / "000000"
    with run.lock() as lock:
        lock.describe(run.new_attempt(loader.load(run.config)).number)
        assert status.read(run.path).waits_for.startswith("ranks and engines to be ready")
        journals.mkdir()
        for rank, groups in enumerate((2, 1)):
            (journals / f"rank-000{rank}.journal").write_text("header\n" + "group\n" * groups + "torn")
        assert main(["status", str(run.path)]) == 0
        assert "  waits for rollout 0, of which 3 of 8 groups are finished\n" in capsys.readouterr().out
        terminal = Terminal()
        status_page.show([status.read(run.path)], terminal)
        assert "waits for rollout 0, of which 3 of 8 groups are finished" in " ".join(terminal.getvalue().split())
        (journals / "rank-0000.journal").write_text("header\n" + "group\n" * 7)
        assert status.read(run.path).waits_for == "step 1"
        run.append_metrics({"step": 1, "rollout": 0, "reward": 0.5})
        assert status.read(run.path).waits_for == "step 2"
        (run.rollouts / "000001").mkdir()
        assert status.read(run.path).waits_for == "step 2; 0 of 8 groups of rollout 1 are finished", "engines are ahead"
        run.append_metrics({"step": 2, "rollout": 0, "reward": 0.5})
        assert status.read(run.path).waits_for == "rollout 1, of which 0 of 8 groups are finished"
        (run.rollouts / "000001").rmdir()
        assert status.read(run.path).waits_for == "the first groups of rollout 1"
    assert status.read(run.path).waits_for == ""  # it was killed


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Resources", "nodes that are free; Slurm expects it to start in 2m00s"),
        ("QOSMaxGRESPerUser", "a limit of your account or QOS to allow it (QOSMaxGRESPerUser); Slurm"),
        ("QOSMaxCpuPerJobLimit", "what does not come by itself (QOSMaxCpuPerJobLimit): cancel it, correct"),
        ("PartitionTimeLimit", "a time limit that its partition allows"),
        ("JobHeldUser", "its release: scontrol release 7"),
        ("ReqNodeNotAvail,_UnavailableNodes:n3", "nodes that are down, drained or reserved"),
        ("SomethingNew", "Slurm (SomethingNew)"),
        ("None", "Slurm to look at it"),
    ],
)
def test_what_a_job_in_the_queue_waits_for(reason: str, text: str) -> None:
    line = f"JobId=7 JobState=PENDING Reason={reason} StartTime=1970-01-01T00:00:00 NodeList=(null)"
    job = replace(commands.parse_job(line), start_time=1000.0)
    assert waiting.in_queue(job, 880.0).startswith(text)
    assert "expects" not in waiting.in_queue(job, 1001.0)


def test_a_sweep_is_one_table_also_in_a_pipe(run: RunDir) -> None:
    states = [replace(status.read(run.path), run=f"s/{name}", state="waiting", reason="Priority") for name in "ab"]
    out = io.StringIO()
    status_page.show(states, out, sweep=Path("s"))
    lines = out.getvalue().splitlines()
    assert lines[0] == "s: 2 runs, 2 waiting" and lines[1].split()[:3] == ["run", "state", "step"]
    assert [line.split()[:2] for line in lines[2:4]] == [["a", "waiting"], ["b", "waiting"]]
    assert lines[5:7] == ["a, b", "  Priority"], lines
