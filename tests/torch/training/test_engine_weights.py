"""The sync of all engines before a rollout, with a stand-in for what it sends. Takes seconds.

Catches a stop that has to wait until engines that died in the sync are started and filled again, engines that generate
with weights of an earlier update or with none, and engines that stay awake where a trainer's weights come back.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.config.loader import from_dict
from gspo_hpc.engine.engine import EngineDied
from gspo_hpc.policy.passes import Abandoned
from gspo_hpc.training import sync
from gspo_hpc.training.agreement.gap import Baseline, Gap
from gspo_hpc.training.jobs import train
from gspo_hpc.training.sync import EngineWeights, Synced


class Engine:
    """An engine that notes what it is asked."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def wake_up(self) -> None:
        self._calls.append("wake")

    def sleep(self, level: int) -> None:
        self._calls.append(f"sleep {level}")


def make(monkeypatch: pytest.MonkeyPatch, calls: list[str], died: list[bool], **sections: Any) -> EngineWeights:
    """Return what keeps the engine of this rank equal to the policy; `died`: whether another died, for each sync."""

    fresh = [False]  # a sync, after which nobody has asked who died

    def run(*arguments: Any) -> tuple[Synced, EngineDied | None]:
        calls.append("sync")
        fresh[0] = True
        return Synced("weights", Gap()), None

    def any_rank(flag: bool, device: torch.device) -> bool:
        asked, fresh[0] = fresh[0], False
        return flag or (asked and died.pop(0))

    monkeypatch.setattr(sync, "any_rank", any_rank)
    monkeypatch.setattr(sync.offload, "leave_to_engines", lambda policy: calls.append("leave"))
    monkeypatch.setattr(sync.offload, "wait_for_all", lambda policy: calls.append("all sleep"))
    monitor = SimpleNamespace(stop_requested=lambda: False)
    clock: Any = SimpleNamespace(monitor=monitor, phase=lambda name: contextlib.nullcontext())
    ranks = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    weight_sync: Any = SimpleNamespace(policy=SimpleNamespace(config=from_dict(sections), ranks=ranks), run=run)
    worker: Any = SimpleNamespace(engine=Engine(calls), recovery=None)
    return EngineWeights(weight_sync, worker, clock)


def test_the_gap_of_the_first_sync_is_what_later_ones_are_held_against(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap that grows a little with every sync would never be seen beside that of the sync before."""
    weights = make(monkeypatch, [], [False] * 3)
    gaps, held_against = iter([Gap(0.1), Gap(0.2), Gap(0.3)]), list[Gap | None]()

    def run(engine: object, first: Gap | None) -> tuple[Synced, EngineDied | None]:
        held_against.append(first)
        return Synced("weights", next(gaps)), None

    monkeypatch.setattr(weights._sync, "run", run)
    monkeypatch.setattr(sync, "any_rank", lambda flag, device: flag)
    for _ in range(3):
        weights.mark_updated()
        weights.sync()
    assert held_against == [None, Gap(0.1), Gap(0.1)]


@pytest.mark.parametrize(("level", "again"), [(1, ["leave", "wake"]), (2, ["sync"])])
def test_every_update_is_sent_once_and_what_a_sleep_drops_again(
    level: int, again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an update engines wake with the weights that they have, unless their sleep has dropped them."""
    calls: list[str] = []
    weights = make(monkeypatch, calls, [False] * 20)
    for _ in range(4):
        weights.mark_updated()
        weights.mark_updated()  # two updates of one rollout
        weights.sync()
        weights.sleep(level)
        assert calls == ["sync", f"sleep {level}", "all sleep"]
        calls.clear()
        weights.sleep(level)
        assert calls == [], "they sleep"
        weights.sync()
        assert calls == again
        weights.sleep(level)
        calls.clear()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_engines_leave_the_memory_to_the_trainer_where_another_died_in_a_sync(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sync again, and before that the trainers' weights come back, on the GPU of a living engine too."""
    calls: list[str] = []
    sections = {"cluster": {"platform": platform}, "rollout": {"sleep_level": 1}}
    make(monkeypatch, calls, [True, True, False], **sections).sync()
    assert calls == (["sync"] * 3 if platform == "cpu" else ["sync", "sleep 1", "sync", "sleep 1", "sync"])


@pytest.mark.parametrize("stopped_rank", [True, False], ids=["here", "elsewhere"])
def test_a_stop_ends_a_sync_in_which_an_engine_died(stopped_rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[Any] = []
    stops = [False]

    def run(*arguments: Any) -> tuple[Synced, EngineDied | None]:
        syncs.append(arguments)
        stops[0] = True  # with the signal that ended the engine
        return Synced("weights", Gap()), EngineDied("terminated") if len(syncs) == 1 else None

    def any_rank(flag: bool, device: torch.device) -> bool:
        return flag or (not stopped_rank and stops[0])

    monkeypatch.setattr(sync, "any_rank", any_rank)
    monitor = SimpleNamespace(stop_requested=lambda: stopped_rank and stops[0])
    clock: Any = SimpleNamespace(monitor=monitor, phase=lambda name: contextlib.nullcontext())
    ranks = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    policy: Any = SimpleNamespace(config=from_dict({}), ranks=ranks)
    weight_sync: Any = SimpleNamespace(policy=policy, run=run)
    recovery = SimpleNamespace(restart=lambda death: False)
    worker: Any = SimpleNamespace(engine=object(), recovery=recovery)
    with pytest.raises(Abandoned):
        EngineWeights(weight_sync, worker, clock).sync()
    assert len(syncs) == 1


def test_an_engine_that_was_started_again_is_judged_by_the_first_gap_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker is made before the first sync, and asks for the gap when an engine has died."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(train, "start_rollout_worker", lambda *unused, **named: given.update(named))
    asked: list[Gap | None] = []

    def run(engine: str, first: Gap | None) -> tuple[str, str]:
        asked.append(first)
        return "synced", f"death of {engine}"

    job, baseline = object.__new__(train.TrainingJob), Baseline()
    job._config, job._ranks = from_dict({}), None  # type: ignore[assignment]
    job._run = SimpleNamespace(rollouts=None)  # type: ignore[assignment]
    weight_sync: Any = SimpleNamespace(policy=SimpleNamespace(arch=SimpleNamespace(experts=None)), run=run)
    job._start_worker(weight_sync, SimpleNamespace(stop_requested=None), baseline)  # type: ignore[arg-type]
    baseline.probe = Gap(0.5)
    assert given["sync_weights"]("it") == "death of it" and asked == [Gap(0.5)]
