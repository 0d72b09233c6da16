"""Observers of a run, each with the files or the console that it is for."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.carried import Carried, Place
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.retired import Retirement
from gspo_hpc.evaluation import stored
from gspo_hpc.exchange.exchange import Exchange, RolloutView
from gspo_hpc.runs import commit
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.trackers.feed import Feeds
from gspo_hpc.trackers.protocol import TrackedRun
from gspo_hpc.training.checkpoint_state import CheckpointState
from gspo_hpc.training.jobs.train import make_observers
from gspo_hpc.training.observers.base import Observers, StepObserver
from gspo_hpc.training.observers.console import ConsoleLines, ProgressBar
from gspo_hpc.training.observers.files import (
    CheckpointCommit,
    MetricsFile,
    ProfileTables,
    SamplesFile,
    files_of_steps,
)
from gspo_hpc.training.telemetry import console as console_module
from gspo_hpc.training.telemetry.console import Console


def group(slot: int, failure: str | None = None) -> Group:
    tokens = np.arange(3, dtype=np.int32)
    completion = Completion(tokens, np.zeros(3, np.float32), f"answer {slot}", "stop", slot, failure=failure)
    return Group(slot, Prompt(slot, tokens, f"question {slot}", {"answer": slot}), (completion,))


def to_show(*groups: Group) -> RolloutView:
    exchange = Exchange()
    return exchange.gather_samples(exchange.gather_table(groups), 9)


class Broken(StepObserver):
    """An observer that fails, as one without room on its disk."""

    def step(self, record: dict[str, object]) -> None:
        raise OSError("no room")


def test_without_observers_everything_is_accepted(tmp_path: Path) -> None:
    """So it is on ranks other than 0."""
    none = Observers()
    with none.rollout(0, 8) as progress:
        progress(4, 100)
    none.step({"step": 1})
    none.samples(1, "train", to_show(group(0)))
    none.note("text")
    none.profile(1, "table", tmp_path)
    none.checkpoint(tmp_path, {}, CheckpointState(Cursor(), [], None))
    assert list(tmp_path.iterdir()) == []


def test_results_go_to_files_and_console(tmp_path: Path) -> None:
    run, screen = RunDir(tmp_path), io.StringIO()
    console = Console(screen, 9)
    observers = Observers([MetricsFile(run, 9), SamplesFile(run, 2), ProfileTables(), ConsoleLines(console)])
    observers.step({"step": 1, "reward": 0.5})
    observers.samples(1, "train", to_show(group(0), group(1, "it raised"), group(2, "it raised")))
    observers.profile(1, "head\nrow", tmp_path)
    assert [record["step"] for record in run.read_metrics()] == [1]
    rows = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert [row["completion"] for row in rows] == ["answer 0", "answer 1"] and rows[1]["failure"] == "it raised"
    assert (tmp_path / "step-000001.txt").read_text() == "head\nrow\n"
    shown = screen.getvalue()
    assert "1/9" in shown and "a reward function failed for 2 completions: it raised" in shown and "row" in shown


def test_every_decision_is_a_line_and_is_cut_back_with_the_metrics(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    observers = Observers(files_of_steps(run, 2, 9))
    observers.retired(3, 0, [(Retirement(4, 1, 1.0), 40), (Retirement(2, 1, 0.9), 21)])
    observers.retired(5, 1, [(Retirement(7, 2, 0.9), 70)])
    lines = [json.loads(line) for line in run.retired.read_text().splitlines()]
    assert lines[1] == {"step": 3, "rollout": 1, "epoch": 0, "row": 21, "pass_rate": 0.9}
    run.truncate_metrics(4)
    assert [json.loads(line) for line in run.retired.read_text().splitlines()] == lines[:2]


def test_completions_of_evaluations_have_a_file_a_step_and_are_cut_back_with_the_metrics(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    observers = Observers(files_of_steps(run, 2, 9))
    for step in (0, 5, 5, 10):
        observers.evaluated(step, [{"step": step, "of": [float("nan")]}])
    stored.write_into(run, 10, [], by_command=True)
    assert [path.name for path in sorted(run.evaluations.iterdir())] == [
        *("000000.jsonl", "000005.jsonl", "000010-eval.jsonl", "000010.jsonl"),
    ]
    assert (run.evaluations / "000005.jsonl").read_text() == '{"step": 5, "of": [null]}\n'
    assert run.evaluations.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in run.evaluations.iterdir())
    (run.evaluations / "mine.txt").touch()
    run.truncate_metrics(5)
    assert sorted(path.name for path in run.evaluations.iterdir()) == ["000000.jsonl", "000005.jsonl", "mine.txt"]


@pytest.mark.parametrize(("reward", "learnt"), [(0.9, 1.0), (0.2, 0.5), (0.5, 0.5)])
def test_the_record_of_the_last_step_says_what_the_run_learnt(tmp_path: Path, reward: float, learnt: float) -> None:
    """Its own reward counts: trackers and Prometheus have nothing but this number by which a run ended well or not."""
    run = RunDir(tmp_path)
    file = MetricsFile(run, 2)
    for step, one in ((1, 0.5), (2, reward)):
        file.step({"step": step, "rollout": step, "reward": one, "reward_std": 0.3, "grad_norm": 0.5, "empty": 0})
    first, last = run.read_metrics()
    assert "learnt" not in first and last["learnt"] == learnt


def test_a_run_without_a_gradient_ends_with_a_zero(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    MetricsFile(run, 1).step({"step": 1, "rollout": 0, "reward": 0.0, "reward_std": 0.0, "grad_norm": 0.0, "empty": 1})
    assert [record["learnt"] for record in run.read_metrics()] == [0.0]


def test_the_metrics_are_on_disk_before_a_later_observer_fails(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(OSError, match="no room"):
        Observers([MetricsFile(run, 9), Broken()]).step({"step": 1})
    assert [record["step"] for record in run.read_metrics()] == [1]


def test_the_bar_gets_the_tokens_since_it_was_last_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console_module, "PLAIN_PROGRESS_SECONDS", 0.0)
    with Observers([ProgressBar(Console(screen, 9))]).rollout(3, 8) as progress:
        progress(4, 100)
        progress(4, 250)
    first, second = screen.getvalue().splitlines()
    assert "rollout 3: 4/8 completions" in first and "8/8" in second


def test_a_committed_checkpoint_gives_back_where_the_run_stood(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    staging = commit.begin(run.checkpoints, 3)
    (staging / "shard").write_bytes(b"weights")
    state = CheckpointState(Cursor(step=3, rollout=1, update=1, offset=8), [group(0), group(1)], {"step": 3})
    known = state.write_groups(staging, 0)
    Observers([CheckpointCommit(run, {"ranks": 1}, keep=2)]).checkpoint(staging, known, state)
    (whole,) = commit.list_committed(run.checkpoints)
    assert not commit.verify(whole) and commit.read_extra(whole) == {"layout": {"ranks": 1}}
    read = CheckpointState.read(whole)
    assert read.cursor == state.cursor and read.record == {"step": 3}
    assert [one.to_json() for one in read.groups] == [one.to_json() for one in state.groups]


def test_old_checkpoints_and_journals_go_once_a_new_checkpoint_is_committed(tmp_path: Path) -> None:
    """The journals of the cursor's rollout and of later ones stay: a resumed run continues them."""
    run = RunDir(tmp_path)
    for rollout in range(4):
        (run.rollouts / f"{rollout:06d}").mkdir(parents=True)
    observers = Observers([CheckpointCommit(run, {"ranks": 1}, keep=2)])
    for step in (1, 2, 3):
        staging = commit.begin(run.checkpoints, step)
        (staging / "shard").write_bytes(b"weights")
        observers.checkpoint(staging, {}, CheckpointState(Cursor(step=step, rollout=step - 1), [], None))
    assert [path.name for path in commit.list_committed(run.checkpoints)] == ["000002", "000003"]
    assert sorted(path.name for path in run.rollouts.iterdir()) == ["000002", "000003"]


def test_journals_stay_that_any_checkpoint_goes_on_with(tmp_path: Path) -> None:
    """An older checkpoint counts if the newest is damaged; where one cannot be read, nothing is deleted."""
    run = RunDir(tmp_path)
    for rollout in range(9):
        (run.rollouts / f"{rollout:06d}").mkdir(parents=True)
    observers = Observers([CheckpointCommit(run, {"ranks": 1}, keep=2)])

    def save(step: int, *places: int) -> list[int]:
        carried = tuple(Carried(7, one, place=Place(one, "f", "rank-0000.unfinished", 1, 2)) for one in places)
        staging = commit.begin(run.checkpoints, step)
        (staging / "shard").write_bytes(b"weights")
        observers.checkpoint(staging, {}, CheckpointState(Cursor(step=step, rollout=step), [], None, carried=carried))
        return sorted(int(path.name) for path in run.rollouts.iterdir())

    assert save(2, 1)[0] == 1
    assert save(4, 3)[0] == 1, "the checkpoint of step 2 has a group there"
    assert save(5, 4)[0] == 3
    (run.checkpoints / "000005" / "carried.json").write_text("[[1]]")
    assert save(7)[0] == 3
    assert save(8)[0] == 8, "no checkpoint that is kept carries anything"


class LateTrackers(Feeds):
    """Trackers that remember which steps were on disk when they were told of a record."""

    def __init__(self, run: RunDir) -> None:
        super().__init__([], TrackedRun(run.path, "id", "name", {}))
        self.run = run
        self.on_disk: list[list[int]] = []

    def wake(self) -> None:
        self.on_disk.append([one["step"] for one in self.run.read_metrics()])


def test_a_run_keeps_everything_and_its_metrics_are_on_disk_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "PLAIN_PROGRESS_SECONDS", 0.0)
    run, screen = RunDir(tmp_path), io.StringIO()
    trackers, config = LateTrackers(run), from_dict({"checkpoint": {"keep": 1}, "tracking": {"samples": 1}})
    observers = Observers(make_observers(run, config, trackers, Console(screen, 9)))
    for step in (1, 2):
        observers.samples(step, "train", to_show(group(0), group(1)))
        observers.step({"step": step, "reward": 0.5})
        staging = commit.begin(run.checkpoints, step)
        (staging / "shard").write_bytes(b"weights")
        observers.checkpoint(staging, {}, CheckpointState(Cursor(step=step), [], None))
    assert trackers.on_disk == [[1], [1, 2]]
    assert [json.loads(line)["step"] for line in run.samples.read_text().splitlines()] == [1, 2]
    (whole,) = commit.list_committed(run.checkpoints)
    assert whole.name == "000002" and commit.read_extra(whole) == {"layout": config.layout}
    observers.profile(2, "head", tmp_path)
    with observers.rollout(3, 8) as progress:
        progress(8, 100)
    assert (tmp_path / "step-000002.txt").exists()
    assert "1/9" in screen.getvalue() and "rollout 3: 8/8" in screen.getvalue()
