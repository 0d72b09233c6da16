"""When checkpoints are made: real saves of one rank, whose weights a test holds back, into a real run directory."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gspo_hpc.algorithms import objective
from gspo_hpc.checkpoint import sharded
from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.config.derived import Passes
from gspo_hpc.config.loader import from_dict
from gspo_hpc.engine.processes import START_SECONDS
from gspo_hpc.policy.process_groups import UNWATCHED_MINUTES, WATCHED_MINUTES
from gspo_hpc.runs import commit
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.training.checkpoint_state import CheckpointState
from gspo_hpc.training.checkpoints import Checkpoints
from gspo_hpc.training.jobs import train
from gspo_hpc.training.observers.base import Observers
from gspo_hpc.training.observers.console import ConsoleLines
from gspo_hpc.training.observers.files import CheckpointCommit
from gspo_hpc.training.recipe import Recipe
from gspo_hpc.training.telemetry.console import Console


@pytest.fixture
def one_rank() -> Iterator[None]:
    """The process group of a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpoints(
    run: RunDir, control: Any, screen: io.StringIO, new_staging: Callable[[int], Path] | None = None
) -> Checkpoints:
    ranks: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), timeout=timedelta(seconds=60))
    policy: Any = SimpleNamespace(ranks=ranks)
    clock: Any = SimpleNamespace(phase=lambda name: contextlib.nullcontext())
    observers = Observers([ConsoleLines(Console(screen, 9)), CheckpointCommit(run, {"ranks": 1}, keep=9)])
    begin = new_staging or (lambda step: commit.begin(run.checkpoints, step))
    return Checkpoints(Saver(policy), begin, control, observers, clock, ranks)


def state(step: int) -> CheckpointState:
    return CheckpointState(Cursor(step=step), [], None)


def test_a_save_waits_for_other_ranks_as_long_as_any_collective(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with a slow disk may write for longer than the half hour of torch."""
    limits: list[timedelta | None] = []
    new_group = dist.new_group

    def noted(ranks: Any = None, timeout: timedelta | None = None, backend: str | None = None, **others: Any) -> Any:
        limits.append(timeout)
        return new_group(ranks, timeout, backend, **others)

    monkeypatch.setattr(dist, "new_group", noted)
    checkpoints(RunDir(tmp_path / "run"), None, io.StringIO())
    assert limits == [timedelta(seconds=60)]


@pytest.mark.parametrize(
    ("control", "minutes"), [(None, UNWATCHED_MINUTES), (SimpleNamespace(rank=0), WATCHED_MINUTES)]
)
def test_in_a_job_that_is_watched_ranks_wait_for_one_that_works(
    control: Any, minutes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 tokenizes large data while the others are in a collective; whoever watches ends a job that hangs."""
    found: list[Any] = []

    class Joins(Exception):
        """The rank joins the others."""

    def start(config: Any, *arguments: Any) -> None:
        found.append(arguments)
        raise Joins

    monkeypatch.setattr(train, "start", start)
    monkeypatch.setattr(train, "CollectiveTime", lambda platform: None)
    monkeypatch.setattr(train.loader, "load", lambda path, **options: from_dict({}))
    monkeypatch.setenv("RANK", "0")
    attempt: Any = SimpleNamespace(config=None)
    with pytest.raises(Joins):
        unused: Any = None
        train.train(unused, attempt, unused, unused, control, unused)
    assert found == [(minutes, control)]
    assert minutes >= START_SECONDS / 60  # others wait for an engine that starts


def test_a_save_begins_once_the_one_before_is_committed(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder too, and the process that watches this rank then knows how long the one before took."""
    run, written = RunDir(tmp_path), threading.Event()
    control: Any = SimpleNamespace(deadline=None, save_seconds=0.0)
    seen: list[tuple[list[str], bool]] = []

    def prepare(policy: Any, staging: Path, *more: Any, **options: Any) -> Callable[[], dict[str, Any]]:
        def write() -> dict[str, Any]:
            assert written.wait(60.0)
            (staging / "shard").write_bytes(b"weights")
            return {}

        return write

    def new_staging(step: int) -> Path:
        seen.append(([path.name for path in commit.list_committed(run.checkpoints)], control.save_seconds > 0.0))
        return commit.begin(run.checkpoints, step)

    monkeypatch.setattr(sharded, "prepare", prepare)
    made = checkpoints(run, control, io.StringIO(), new_staging)
    made.save(state(1))
    assert seen == [([], False)] and not commit.list_committed(run.checkpoints)
    release = threading.Timer(0.3, written.set)
    release.start()
    made.save(state(2))
    made.wait()
    assert seen == [([], False), (["000001"], True)]
    assert [path.name for path in commit.list_committed(run.checkpoints)] == ["000001", "000002"]


@pytest.mark.parametrize(
    ("left", "save_seconds", "can"),
    [
        (None, 1e9, True),  # nobody knows of a deadline
        (600.0, 0.0, True),  # no save was timed yet
        (600.0, 300.0, True),
        (600.0, 500.0, False),  # it may need half as long again
        (600.0, 900.0, False),
        (-5.0, 1.0, False),
    ],
)
def test_no_checkpoint_is_begun_that_would_not_be_whole_in_time(
    left: float | None, save_seconds: float, can: bool, tmp_path: Path, one_rank: None
) -> None:
    screen = io.StringIO()
    deadline = None if left is None else time.time() + left
    control: Any = SimpleNamespace(deadline=deadline, save_seconds=save_seconds)
    assert checkpoints(RunDir(tmp_path), control, screen).can_save() is can
    assert ("no time is left for a checkpoint" in screen.getvalue()) is not can


def test_without_a_process_that_watches_there_is_always_time(tmp_path: Path, one_rank: None) -> None:
    assert checkpoints(RunDir(tmp_path), None, io.StringIO()).can_save()


@pytest.mark.parametrize(("interval", "steps"), [(3, [3, 6, 8]), (4, [4, 8]), (100, [8])])
def test_a_checkpoint_follows_every_interval_and_the_last_step(interval: int, steps: list[int]) -> None:
    config = from_dict({"checkpoint": {"interval": interval}, "run": {"max_steps": 8}})
    recipe = Recipe(config, objective.resolve(config.algorithm), Passes(False, False), 1, 1, attempt=1)
    assert [step for step in range(1, 9) if recipe.saves_after(step)] == steps
