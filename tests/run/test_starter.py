"""A project that `gspo-hpc init` has begun trains, from its own folder, as its last line says.

Takes 15 s. It would catch a template whose data or reward function the loop does not take.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo_hpc.starter import project
from tests.run import harness


def test_it_trains(tiny_folder: Path, tmp_path: Path) -> None:
    project.write(tmp_path / "sums")
    log, changes = tmp_path / "log", (f"model.path={tiny_folder / 'model'}", "run.max_steps=2")
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path / 'sums')!r})\n{MAIN}", *changes]
    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    records = harness.metrics(tmp_path / "sums" / "runs" / "sums")
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["reward"] is not None for record in records)


MAIN = "import sys\nfrom gspo_hpc.cli.main import main\nsys.exit(main(['train', 'config.yaml', *sys.argv[1:]]))"
