"""An error on one rank ends a run without Slurm, whatever blocks then. About 40 seconds.

It would catch a rank that waits for its process groups before it ends, and so keeps the run, and its GPUs, for ever.
"""

from __future__ import annotations

import json
from pathlib import Path

from gspo_hpc.system import processes
from tests.run import harness

BLOCKING = Path(__file__).parent / "blocking"


def test_an_error_ends_the_run_where_process_groups_never_end(tiny_config: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *harness.OVERRIDES)
    assert harness.finish(harness.start(command, log, PYTHONPATH=str(BLOCKING)), log, 120) == 1
    attempt = json.loads((run_dir / "attempts/0001/attempt.json").read_text())
    assert attempt["reason"] == "failed"
    assert attempt["detail"] == "rank 1 ended with exit code 1: RuntimeError: the planted one"
    assert "rank 1 ended with exit code 1: RuntimeError: the planted one" in log.read_text()
    assert processes.marked(harness.run_id(run_dir)) == []
