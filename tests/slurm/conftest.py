"""One Slurm for all tests of this tier, and the run on it that nothing happened to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.run import harness as runs
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes, which are stopped at the end with all that runs on them."""
    link = tmp_path_factory.mktemp("slurm") / "cluster"
    environment = os.environ | {"GSPO_HPC_SLURM": str(link)}

    def call(*arguments: str) -> str:
        done = subprocess.run(
            ["bash", str(harness.SCRIPT), *arguments], capture_output=True, text=True, env=environment, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call("up", "--nodes", "4", "--gpus", "2")
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = call("env").strip().removeprefix("export SLURM_CONF=")
    try:
        yield Cluster()
    finally:
        call("down")
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before


_SUBMITTED = pytest.StashKey[list[SlurmRun]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show in the report of a failed test what its runs recorded and said: their folders may be gone by then."""
    if call.when == "call" and call.excinfo is not None:
        for run in item.stash.get(_SUBMITTED, []):
            attempts = "\n".join(f"{record.get('reason')}: {record.get('detail')}" for record in run.attempts())
            item.add_report_section("call", "runs", f"{attempts}\n{run.log(0)}\n{run.attempt_logs()}")
    return (yield)


@pytest.fixture
def submit(
    cluster: Cluster, tiny_config: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., SlurmRun]]:
    """Submits a run in a folder of its own; it is cancelled at the end, whatever became of it."""
    submitted = request.node.stash.setdefault(_SUBMITTED, [])

    def start(*overrides: str, grader_seconds: float = 0.2, **named: dict[str, str]) -> SlurmRun:
        run = SlurmRun(tiny_config, tmp_path / "run", overrides, grader_seconds, **named)
        submitted.append(run.submit())
        return run

    yield start
    for run in submitted:
        subprocess.run(["scancel", run.job_id], capture_output=True, check=False)


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> SlurmRun:
    """A run on this Slurm from the first step to the last in one job."""
    run = SlurmRun(tiny_config, tmp_path_factory.mktemp("undisturbed") / "run").submit()
    run.wait_until_ended()
    assert [record["step"] for record in runs.metrics(run.run_dir)] == list(range(harness.STEPS + 1))
    return run
