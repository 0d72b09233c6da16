"""The last lines of the batch script: what follows when the supervisor ends, in a real shell. About 3 seconds.

A small program stands where Python is: it tells how it was started, and ends as the test says. It would catch a script
that starts another supervisor after an ordinary end, that never gives up, or that hides how the job ended.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.launch.slurm import ending, submit, supervisor

PROGRAM = """#!/bin/bash
echo "${GSPO_HPC_KILLED:-first} $*" >> "$TEST_OUT/starts"
number=$(wc -l < "$TEST_OUT/starts")
end=$(sed -n "${number}p" "$TEST_OUT/ends")
case "$end" in
    attempt*) mkdir "$TEST_RUN/attempts/$number"; end=${end#attempt } ;;
esac
case "$end" in
    kill*) kill "-${end#kill }" $$; sleep 9 ;;
    *) exit "$end" ;;
esac
"""


def run_script(folder: Path, ends: list[str], *setup: str, restarts: int = 2) -> tuple[int, list[str], str]:
    """Exit code of the script, how each supervisor was started, and what the script wrote."""
    run, program = folder / "run", folder / "python"
    (run / "attempts").mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o700)
    (folder / "ends").write_text("\n".join(ends) + "\n")
    config = loader.from_dict(
        {
            "run": {"name": "demo", "dir": str(run), "max_steps": 10},
            "model": {"path": "/models/m"},
            "batch": {"micro_batch_size": 1, "global_batch_size": 64, "num_generations": 8},
            "data": {"train": "/data/train.jsonl"},
            "reward": {"functions": [{"function": "number_match"}]},
            "slurm": {"python": str(program), "setup": list(setup)},
            "faults": {"max_restarts": restarts},
        }
    )
    script = folder / "script.sh"
    script.write_text(submit.dry_run(config))
    variables = os.environ | {"TEST_OUT": str(folder), "TEST_RUN": str(run)}
    done = subprocess.run(["bash", script], env=variables, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, (folder / "starts").read_text().splitlines(), done.stdout


@pytest.mark.parametrize("code", [0, 1, 2, 75, 130])
def test_a_supervisor_that_ends_by_itself_ends_the_job(tmp_path: Path, code: int) -> None:
    assert run_script(tmp_path, [str(code)])[:2] == (
        code,
        [f"first -P -u -m submitit.core._submit {tmp_path}/run/jobs/NNNN"],
    )


@pytest.mark.parametrize("setup", [(), ("set -euo pipefail",)])
def test_another_takes_over_from_one_that_a_signal_ended(tmp_path: Path, setup: tuple[str, ...]) -> None:
    code, starts, output = run_script(tmp_path, ["attempt kill 9", "attempt kill 11", "137", "75"], *setup)
    command = f"-u -P -m gspo_hpc.launch.slurm.supervisor {tmp_path}/run {tmp_path}/run/jobs/NNNN"
    assert code == 75
    assert starts[1:] == [f"137 {command}", f"139 {command}", f"137 {command}"]
    assert output.count("signal 9 ended the supervisor: starting another") == 2 and "signal 11 ended" in output


def test_supervisors_that_start_no_attempt_are_given_up(tmp_path: Path) -> None:
    """Failures are counted by those that start a supervisor: they are not limited here."""
    code, starts, _ = run_script(tmp_path, ["attempt kill 9", *["attempt kill 9"] * 5, *["kill 9"] * 9])
    assert code == 137
    assert len(starts) == 1 + 5 + 3, "faults.max_restarts + 1 in a row"


def test_without_an_answer_of_slurm_the_limit_counts_from_the_start_of_the_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note in the environment is the script's: a supervisor that starts later has the same deadline."""
    (tmp_path / "bin").mkdir()
    config = loader.from_dict({"slurm": {"time_minutes": 90}})
    began = time.time()
    run_script(tmp_path, ["attempt kill 9", "0"], f"trap 'env | grep ^GSPO_HPC_JOB_BEGAN= > {tmp_path}/noted' EXIT")
    noted = float((tmp_path / "noted").read_text().partition("=")[2])
    assert began - 1.0 <= noted <= time.time()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # without scontrol
    monkeypatch.delenv("GSPO_HPC_JOB_BEGAN", raising=False)
    assert ending.end_time(config, "7") is None
    monkeypatch.setenv("GSPO_HPC_JOB_BEGAN", str(noted))
    assert ending.end_time(config, "7") == noted + 90 * 60


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 137),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 137),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (ValueError("another process holds the run"), 2),
    ],
)
def test_a_supervisor_without_memory_ends_as_one_that_the_kernel_killed(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(supervisor, "supervise", fail)
    monkeypatch.setattr(supervisor.StopFlag, "start", lambda flag: flag)  # this process keeps its signals
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert supervisor.main([str(tmp_path), str(tmp_path)]) == code
