"""An evaluation that is killed and started again (40 s: three starts of an engine).

It would catch answers that are sampled or graded a second time, some that are lost, and scores that are not those of an
evaluation that nobody killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import harness

GRADER = """
import time

def graded(completion, *, prompt, fields):
    with open({told!r}, "a") as told:
        told.write(prompt.replace("\\n", " ") + "|" + completion.replace("\\n", " ") + "\\n")
    time.sleep(0.2)
    return float(str(fields["answer"]) in completion)
"""


@pytest.mark.timeout(300)
def test_an_evaluation_that_is_killed_goes_on_where_it_stood(uninterrupted: Path, tmp_path: Path) -> None:
    told, grader, log = tmp_path / "told", tmp_path / "grader.py", tmp_path / "log"
    grader.write_text(GRADER.format(told=str(told)))
    words = [f"reward.functions=[{{function: '{grader}:graded'}}]", "eval.samples=2", "reward.workers=1"]

    def command(out: Path) -> list[str]:
        return [sys.executable, "-m", "gspo_hpc", "eval", str(uninterrupted), *words, "--json", "--out", str(out)]

    def run(out: Path) -> subprocess.CompletedProcess[str]:
        found = subprocess.run(command(out), capture_output=True, text=True, env=harness.environment(), timeout=200)
        assert found.returncode == 0, found.stdout + found.stderr
        return found

    out = tmp_path / "killed.jsonl"
    unfinished = tmp_path / "killed.jsonl.unfinished"

    def kept_lines() -> list[bytes]:
        """Lines of the journal of the greedy answers, of which each prompt has one."""
        return [line for path in unfinished.glob("1-0-*/rank-0000.journal") for line in path.read_bytes().splitlines()]

    process = harness.start(command(out), log)
    harness.wait_for(lambda: len(kept_lines()) > 3, process, log)
    harness.kill(process)
    kept = len(kept_lines()) - 1
    asked = told.read_text().splitlines()
    assert 3 <= kept < 32 and not out.exists()
    again = run(out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"going on: {kept} of {len(rows)} prompts were answered before the last stop" in again.stderr
    assert not unfinished.exists()
    calls = told.read_text().splitlines()
    # What was being graded when it was killed is graded again, and nothing else.
    assert len(calls) - 3 * len(rows) == len(asked) - kept <= 2

    alone = run(tmp_path / "alone.jsonl")
    assert json.loads(alone.stdout) == json.loads(again.stdout) and "going on" not in alone.stderr
    assert (tmp_path / "alone.jsonl").read_bytes() == out.read_bytes()
