"""One call of generation with a real store and journal, and stand-ins for engine and reward pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.engine.engine import EngineDied, Sampling
from gspo_hpc.rewards.pool import RewardResult
from gspo_hpc.rollout.generation import CallCounters, Generation, Request, ignore_progress, sample_seed
from gspo_hpc.rollout.notices import Notices
from gspo_hpc.rollout.recovery import EngineLost, EngineRecovery
from gspo_hpc.runs.journal import Journal, read_journals

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4)


class StandInEngine:
    """An engine that finishes one group a step, with one token a completion; it may die once before."""

    def __init__(self, deaths: int = 0) -> None:
        self.waiting: list[tuple[int, Prompt, list[int]]] = []
        self.tokens_generated, self.deaths, self.restarts, self.aborted = 0, deaths, 0, False

    @property
    def pending(self) -> int:
        return len(self.waiting)

    @property
    def running(self) -> int:
        return sum(len(seeds) for _, _, seeds in self.waiting)

    def submit(self, slot: int, prompt: Prompt, seeds: list[int], sampling: Sampling) -> None:
        self.waiting.append((slot, prompt, seeds))

    def step(self) -> list[Group]:
        if self.deaths:
            self.deaths -= 1
            raise EngineDied("gone")
        slot, prompt, seeds = self.waiting.pop(0)
        self.tokens_generated += len(seeds)
        one = np.ones(1, np.int32)
        return [Group(slot, prompt, tuple(Completion(one, np.zeros(1, np.float32), "", "stop", s) for s in seeds))]

    def restart(self) -> None:
        self.restarts += 1

    def resubmit(self) -> None:
        """Nothing is lost here."""

    def abort(self) -> None:
        self.aborted = True


class StandInPool:
    """A pool that grades at once; `failure` is what all its graders fail with."""

    def __init__(self, failure: str | None = None) -> None:
        self.results: list[tuple[Any, RewardResult]] = []
        self.failure = failure

    def submit(self, key: tuple[int, int], *texts: Any) -> None:
        self.results.append((key, RewardResult(1.0, {"one": 1.0}, self.failure)))

    def poll(self, timeout: float) -> list[tuple[Any, RewardResult]]:
        found, self.results = self.results, []
        return found


def generation(engine: Any, pool: Any, stop: Callable[[], bool] = lambda: False, **more: Any) -> Generation:
    store = dist.HashStore()
    prompts = {slot: Prompt(slot + 10, np.ones(2, np.int32), "", {}) for slot in range(3)}
    notices = Notices(store)
    recovery = EngineRecovery(engine, notices, 0, 1, lambda fill: None)
    return Generation(
        request=Request(prompts, 2, SAMPLING, rollout=5),
        counters=CallCounters(store, notices, 1, len(prompts)),
        engine=engine,
        pool=pool,
        recovery=recovery,
        config=from_dict({"run": {"seed": 7}}),
        num_engines=1,
        stop_requested=stop,
        **({"journal": None, "progress": ignore_progress} | more),
    )


def test_all_groups_are_graded_journalled_and_reported(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, fingerprint="f", rollout=5)
    seen: list[tuple[int, int]] = []
    found = generation(
        StandInEngine(), StandInPool(), journal=journal, progress=lambda done, tokens: seen.append((done, tokens))
    ).run()
    journal.close()
    assert sorted(found) == [0, 1, 2] == sorted(read_journals(tmp_path, "f"))
    assert seen == [(2, 2), (2, 4), (2, 6)]
    assert all(c.reward == 1.0 for group in found.values() for c in group.completions)
    assert [c.seed for c in found[1].completions] == [sample_seed(7, 5, 1, 11, index) for index in range(2)]


def test_a_dead_engine_is_restarted_once_and_not_twice() -> None:
    engine = StandInEngine(deaths=1)
    work = generation(engine, StandInPool())
    assert sorted(work.run()) == [0, 1, 2] and engine.restarts == 1
    assert work.recovery.deaths() == ["rank 0: gone"]
    try:
        generation(StandInEngine(deaths=2), StandInPool()).run()
        raise AssertionError("it went on")
    except EngineLost as error:
        assert "2 times (faults.max_engine_restarts 1)" in str(error)


def test_a_grader_that_dies_of_the_stop_signal_has_not_failed() -> None:
    """The stop comes while the first group is graded: the group counts as not finished."""
    asked = iter([False] + [True] * 9)
    engine = StandInEngine()
    work = generation(engine, StandInPool(failure="killed"), stop=lambda: next(asked))
    assert work.run() == {} and engine.aborted and work.counters.stopped() and not work.counters.all_finished()
