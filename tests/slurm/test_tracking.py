"""What goes wrong beside the run and in its numbers: a W&B that does not answer, a gradient that is not finite.

Takes two minutes. It would catch steps that wait for W&B or are lost, and a supervisor that tells nobody of the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run import harness as runs
from tests.slurm import harness
from tests.slurm.harness import SlurmRun
from tests.unit.launch.test_notify import SECRET, Receiver
from tests.wandb_server import WandbServer

Submit = Callable[..., SlurmRun]


@pytest.mark.timeout(600)
def test_no_answer_from_wandb_and_no_finite_gradient(submit: Submit) -> None:
    """W&B answers with errors, then not at all: nothing is lost, and all is sent later. In the third step the gradient
    of rank 1 is not finite: all ranks skip it."""
    with WandbServer() as server, Receiver() as receiver:
        server.behaviour = "error"
        run = submit(
            "notify.urls=[env:NOTES]",
            "notify.timeout=60",
            variables={"WANDB_MODE": "online"},
            shell={
                **server.environment(),
                "NOTES": receiver.address,
                "PYTHONPATH": str(Path(__file__).parent / "poison"),
            },
        )
        run.wait_for("the first step", lambda: run.last_step() >= 1)
        server.behaviour = "silence"
        run.wait_until_ended()
        assert server.requests > 0, "W&B was never asked"

        records = runs.metrics(run.run_dir)
        assert [record["step"] for record in records] == list(range(harness.STEPS + 1))
        assert [record["step"] for record in records if record.get("skipped")] == [3], records
        assert run.attempts()[-1]["reason"] == "done" and len(run.attempts()) == 1
        content = b"".join(path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file())
        assert server.environment()["WANDB_API_KEY"].encode() not in content, "the key was written down"
        (message,) = receiver.messages
        assert (
            message["title"].endswith(" is done") and f"step {harness.STEPS} of {harness.STEPS}" in message["message"]
        )
        assert SECRET.encode() not in content, "the address was written down"

        server.behaviour = "ok"
        done = subprocess.run(
            [sys.executable, "-m", "gspo_hpc", "sync", str(run.run_dir), "tracking.wandb=online"],
            capture_output=True,
            text=True,
            env=os.environ | server.environment(),
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        run_id = json.loads((run.run_dir / "run.json").read_text())["run_id"]
        assert server.run_ids() == {run_id}
        sent = {row["_step"]: row for row in server.rows(run_id)}
        assert sorted(sent) == list(range(harness.STEPS + 1))
        for record in records[1:]:
            assert sent[record["step"]]["reward"] == pytest.approx(record["reward"])
