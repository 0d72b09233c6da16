"""One rank ends a run without Slurm, whatever the others wait for then, and is named. About 40 seconds each.

It would catch a rank that waits for its process groups before it ends, and so keeps the run, and its GPUs, for ever;
and a save whose ranks wait for the pieces of one that was killed, or that leaves half a checkpoint.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from gspo_hpc.runs import commit
from gspo_hpc.system import processes
from tests.run import harness


def attempt(run_dir: Path, log: Path, command: list[str], planted: str) -> dict[str, Any]:
    """How the first attempt ends with this planted in rank 1: within 30 seconds, and nothing of it is left."""
    note = log.with_name("planted")
    process = harness.start(command, log, **harness.planted(planted, note))
    assert harness.finish(process, log, 120) == 1
    assert time.time() - note.stat().st_mtime < 30.0
    assert processes.marked(harness.run_id(run_dir)) == []
    found: dict[str, Any] = json.loads((run_dir / "attempts/0001/attempt.json").read_text())
    assert found["reason"] == "failed" and found["detail"] in log.read_text()
    return found


def test_an_error_ends_the_run_where_process_groups_never_end(tiny_config: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    found = attempt(run_dir, log, harness.command(tiny_config, run_dir, *harness.OVERRIDES), "error")
    assert found["detail"] == "rank 1 ended with exit code 1: RuntimeError: the planted one"


def test_a_rank_that_is_killed_in_the_exchange_of_a_save_is_named(tiny_config: Path, tmp_path: Path) -> None:
    """Rank 0's thread waits for its pieces, and its loop goes on. The run begins again, as from before that save."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *harness.OVERRIDES, "optimizer.distributed=true", "run.max_steps=2")
    found = attempt(run_dir, log, command, "exchange")
    assert found["detail"].startswith("rank 1 was killed by SIGKILL")
    assert commit.newest_whole(run_dir / "checkpoints")[0] is None
    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    assert harness.last_step(run_dir) == 2
