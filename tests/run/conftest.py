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


@pytest.fixture(scope="session")
def uninterrupted(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that was left alone. What it has beside the others must change nothing."""
    folder = tmp_path_factory.mktemp("whole")
    run_dir, log = folder / "run", folder / "log"
    process = harness.start(harness.command(tiny_config, run_dir, *harness.OVERRIDES, *WATCHED), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert [record["step"] for record in harness.metrics(run_dir)] == list(range(harness.STEPS + 1))
    return run_dir
