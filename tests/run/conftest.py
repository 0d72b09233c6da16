"""The run that nothing happened to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run import harness

WATCHED = (
    "tracking.profile_steps=[3]",
    "tracking.debug=true",
    "memory.offload_trainer=true",
    *harness.RECORDED,
)

OBSERVERS = """
import json, random, sys


def keep(record, *, run_dir):
    with open(run_dir / "observed.jsonl", "a") as file:
        print(json.dumps(record), file=file)


def fail(record):
    import numpy

    random.seed(1), numpy.random.seed(1)
    sys.exit(f"cannot take step {record['step']}")
"""


@pytest.fixture(scope="session")
def uninterrupted(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that was left alone. What it has beside the others must change nothing."""
    folder = tmp_path_factory.mktemp("whole")
    run_dir, log = folder / "run", folder / "log"
    (folder / "observers.py").write_text(OBSERVERS)
    observers = f"tracking.observers=[{folder}/observers.py:keep,{folder}/observers.py:fail]"
    process = harness.start(harness.command(tiny_config, run_dir, *harness.OVERRIDES, *WATCHED, observers), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert [record["step"] for record in harness.metrics(run_dir)] == list(range(harness.STEPS + 1))
    return run_dir
