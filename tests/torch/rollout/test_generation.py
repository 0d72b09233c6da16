"""Calls of generation with a real store and journal, and stand-ins for engine and reward pool.

Catches a stop that costs the attempt or the time of an engine's start, ranks that wait and count as moving on, and
prompts that reach ranks which do not generate them; ranks of which only some end without a budget for judges, and a
completion that such an end makes a zero.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.carried import Enough, Place
from gspo_hpc.data.records import UNFINISHED, Completion, Group, Prompt
from gspo_hpc.engine.engine import EngineDied, Sampling
from gspo_hpc.evaluation.evaluate import EVAL_ROLLOUT
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.policy.passes import Abandoned
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.rollout import carried_files
from gspo_hpc.rollout.carried_files import CarriedFiles
from gspo_hpc.rollout.generation import CallCounters, Generation, Request, ignore_progress, sample_seed, with_rewards
from gspo_hpc.rollout.notices import POLL_SECONDS, NodeTopology, Notices
from gspo_hpc.rollout.recovery import EngineLost, EngineRecovery
from gspo_hpc.rollout.worker import Interrupted, JudgesOverBudget, RolloutWorker
from gspo_hpc.runs import journal
from gspo_hpc.runs.journal import Journal, read_journals
from gspo_hpc.system import progress
from tests.torch.exchange.ranks import on_ranks
from tests.torch.ledger.world import World

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4)


class StandInEngine:
    """An engine that finishes one group a step, with one token a completion; it may die once before."""

    def __init__(self, deaths: int = 0) -> None:
        self.waiting: list[tuple[int, Prompt, list[int]]] = []
        self.reports: list[bool] = []  # whether experts were asked for, by group
        self.tokens_generated, self.deaths, self.restarts, self.aborted = 0, deaths, 0, False

    @property
    def pending(self) -> int:
        return len(self.waiting)

    @property
    def running(self) -> int:
        return sum(len(seeds) for _, _, seeds in self.waiting)

    def submit(self, slot: int, prompt: Prompt, seeds: list[int], sampling: Sampling, *, reports_experts: bool) -> None:
        self.waiting.append((slot, prompt, seeds))
        self.reports.append(reports_experts)

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

    @property
    def pending(self) -> int:
        return len(self.results)

    def grades(self, fields: Any) -> bool:
        """A function grades every row."""
        return True

    def submit_group(self, keys: list[tuple[int, int]], *texts: Any) -> None:
        self.results += [(key, RewardResult(1.0, {"one": 1.0}, self.failure)) for key in keys]

    def poll(self, timeout: float) -> list[tuple[Any, RewardResult]]:
        found, self.results = self.results, []
        return found

    def drop(self) -> None:
        self.results.clear()


def generation(
    engine: Any,
    pool: Any,
    stop: Callable[[], bool] = lambda: False,
    *,
    store: dist.Store | None = None,
    interval: float = POLL_SECONDS,
    num_engines: int = 1,
    **more: Any,
) -> Generation:
    store = store or dist.HashStore()
    prompts = {slot: Prompt(slot + 10, np.ones(2, np.int32), "", {}) for slot in range(3)}
    notices = Notices(store, interval=interval)
    recovery = EngineRecovery(engine, notices, 0, 1, lambda fill: None, stop_requested=stop)
    return Generation(
        request=Request(range(3), prompts, 2, SAMPLING, rollout=5),
        counters=CallCounters(store, notices, 1, len(prompts)),
        engine=engine,
        pool=pool,
        recovery=recovery,
        num_engines=num_engines,
        stop_requested=stop,
        **({"config": from_dict({"run": {"seed": 7}}), "journal": None, "progress": ignore_progress} | more),
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


@pytest.mark.parametrize(("rollout", "reported"), [(0, True), (5, True), (EVAL_ROLLOUT, False)])
def test_evaluations_have_no_experts_reported(rollout: int, reported: bool) -> None:
    """Nothing reads them there, and a large evaluation would have gigabytes."""
    work = generation(StandInEngine(), StandInPool())
    work.request = replace(work.request, rollout=rollout)
    work.run()
    assert set(work.engine.reports) == {reported}


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
    assert work.run() == {} and engine.aborted and work.counters.stopped() and not work.counters.over()


def test_an_engine_that_dies_while_a_stop_is_pending_stays_dead() -> None:
    """Its start takes minutes, and the save needs them. The stop comes with the signal that ended the engine."""
    engine = StandInEngine(deaths=1)
    work = generation(engine, StandInPool(), stop=lambda: engine.deaths == 0)
    assert work.run() == {} and engine.restarts == 0 and engine.aborted and work.counters.stopped()


class Busy(StandInEngine):
    """An engine that finishes nothing, until it dies or is aborted."""

    def step(self) -> list[Group]:
        if self.deaths:
            return super().step()
        time.sleep(0.001)
        return []

    def abort(self) -> None:
        super().abort()
        self.waiting.clear()


class Continuing(StandInEngine):
    """An engine that finishes one group a step, and leaves one token of the others when it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: dict[int, Any] = {}

    def submit(self, slot: int, prompt: Prompt, seeds: list[int], sampling: Sampling, **more: Any) -> None:
        assert more.get("may_stop")
        self.begun[slot] = more["begun"]
        super().submit(slot, prompt, seeds, sampling, reports_experts=True)

    def stop(self) -> list[Group]:
        one, waiting = np.ones(1, np.int32), self.waiting
        self.waiting = []
        return [
            Group(s, p, tuple(Completion(one, np.zeros(1, np.float32), "", UNFINISHED, seed) for seed in seeds))
            for s, p, seeds in waiting
        ]


class Grading(StandInPool):
    """A pool that never grades one group, and remembers that it was told to forget."""

    def __init__(self, never: int) -> None:
        super().__init__()
        self.never, self.dropped = never, False

    def submit_group(self, keys: list[tuple[int, int]], *texts: Any) -> None:
        if keys[0][0] != self.never:
            super().submit_group(keys, *texts)

    def drop(self) -> None:
        self.dropped = True


def ends_with(enough: Enough, pool: Any, engine: Any, **more: Any) -> Generation:
    work = generation(
        engine, pool, config=from_dict({"run": {"seed": 7}, "rollout": {"unfinished": "continue"}}), **more
    )
    work.request = replace(work.request, enough=enough, weights_version=4)
    store = dist.HashStore()
    work.counters = CallCounters(store, Notices(store), 1, 3, enough)
    return work


def test_a_call_ends_with_enough_groups_and_keeps_what_was_sampled_of_the_others() -> None:
    """Also what is sampled and not graded: the pool forgets it, and the next rollout has it graded."""
    pool = Grading(never=0)
    work = ends_with(Enough(1), pool, Continuing())
    assert sorted(work.run()) == [1] and pool.dropped
    assert sorted(work.unfinished) == [0, 2]
    reasons = {slot: {c.finish_reason for c in group.completions} for slot, group in work.unfinished.items()}
    assert reasons == {0: {"stop"}, 2: {UNFINISHED}}
    for group in (*work.unfinished.values(), *work._finished.values()):
        assert all(c.pieces == ((4, 1),) for c in group.completions), "by the weights that sampled it"


def test_a_call_waits_for_groups_that_it_must_have() -> None:
    work = ends_with(Enough(1, frozenset({2})), StandInPool(), Continuing())
    assert sorted(work.run()) == [0, 1, 2] and not work.unfinished
    store = dist.HashStore()
    counters = CallCounters(store, Notices(store), 1, 9, Enough(2, frozenset({5})))
    for slot, counts, over in ((0, True, False), (1, True, False), (2, True, False), (5, False, True)):
        counters.add_finished(slot, counts=counts)
        assert counters.over() is over, slot
    counters = CallCounters(store, Notices(store), 2, 9, Enough(2, frozenset({5})))
    for slot, counts, over in ((5, True, False), (1, False, False), (2, True, True)):
        counters.add_finished(slot, counts=counts)
        assert counters.over() is over, slot


def test_only_groups_with_signal_end_a_call_that_needs_it() -> None:
    """Without signal in any, all are finished; a call that counts them would end with the first."""
    work = ends_with(Enough(1, signal=True), StandInPool(), Continuing(), has_signal=lambda group: False)
    assert sorted(work.run()) == [0, 1, 2]
    work = ends_with(Enough(1, signal=True), StandInPool(), Continuing(), has_signal=lambda group: group.slot == 1)
    assert sorted(work.run()) == [0, 1] and sorted(work.unfinished) == [2]
    work = ends_with(Enough(1), StandInPool(), Continuing(), has_signal=lambda group: False)
    assert sorted(work.run()) == [0] and sorted(work.unfinished) == [1, 2]


def test_a_group_goes_on_where_its_own_prompt_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where that of another prompt did, nor where its file is damaged or gone, which is waited for once."""
    folder = tmp_path / "000003"
    writer = Journal(folder, 0, fingerprint="f", rollout=3, kind="unfinished")
    one = np.arange(2, dtype=np.int32)
    for slot, index in ((0, 10), (1, 99), (2, 12)):
        half = Completion(one, np.zeros(2, np.float32), "", UNFINISHED, 1, pieces=((2, 2),))
        writer.append([Group(slot, Prompt(index, np.ones(2, np.int32), "", {}), (half, half))])
    writer.close()
    known = journal.places(writer.path, "f")
    places = {slot: Place(3, "f", writer.path.name, *known[slot]) for slot in range(3)}
    damaged = bytearray(writer.path.read_bytes())
    damaged[known[2][0] + 20] ^= 1
    writer.path.write_bytes(damaged)
    engine = Continuing()
    work = ends_with(Enough(3), StandInPool(), engine, carried=CarriedFiles(tmp_path))
    work.request = replace(work.request, begun=places)
    work.run()
    assert [len(engine.begun[slot]) for slot in range(3)] == [2, 0, 0]
    assert engine.begun[0][0].tokens.tolist() == [0, 1]
    waits = list[Path]()

    def never(path: Path, size: int) -> None:
        waits.append(path)
        raise TimeoutError

    monkeypatch.setattr(carried_files, "wait_until_visible", never)
    files = CarriedFiles(tmp_path)
    assert [files.read(places[slot]) for slot in range(3)] == [None] * 3 and len(waits) == 1


def workers(
    world: World, engines: list[Any], sync_weights: Callable[[Any], Any], stop: Callable[[], bool]
) -> Callable[[], RolloutWorker]:
    """What makes a rank's worker, with an engine where there is one."""
    store = dist.HashStore()

    def make() -> RolloutWorker:
        engine, notices = engines[world.rank], Notices(store, NodeTopology(world.rank, world.size), interval=0.001)

        def agree(values: Any) -> list[float]:
            return [max(column) for column in zip(*world.gather(values), strict=True)]

        exchange = SimpleNamespace(transport=SimpleNamespace(barrier=world.wait))
        ranks: Any = SimpleNamespace(rank=world.rank, device=torch.device("cpu"), exchange=exchange)
        recovery = EngineRecovery(engine, notices, world.rank, 1, sync_weights, stop_requested=stop, agree=agree)
        pool: Any = StandInPool()
        config = from_dict({"run": {"seed": 7}})
        return RolloutWorker(config, ranks, store, notices, engine, pool, 2, recovery, stop)

    return make


def request() -> Request:
    prompts = {slot: Prompt(slot, np.ones(2, np.int32), "", {}) for slot in range(4)}
    return Request(range(4), prompts, 2, SAMPLING, rollout=5)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_step_of_an_engine_asks_the_store_nothing(engines: int) -> None:
    """An engine makes thousands of steps in a rollout, and an answer may take as long as one of them."""

    class Patient(StandInEngine):
        steps = 0

        def step(self) -> list[Group]:
            self.steps += 1
            return [] if self.steps % 100 else super().step()

    class Counted:
        asked = 0

        def __getattr__(self, name: str) -> Any:
            self.asked += 1
            return getattr(store, name)

    store, counted, engine = dist.HashStore(), Counted(), Patient()
    job: Any = counted
    work = generation(engine, StandInPool(), store=job, interval=1000.0, num_engines=engines)
    before = counted.asked
    assert sorted(work.run()) == [0, 1, 2] and engine.steps == 300
    assert counted.asked - before < 20, "a few for each of the three groups, and none for a step"


class Watched:
    """A job's store as one rank sees it, which counts the bytes that it gets, and how often it waits for them."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.received, self.waited = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.waited += not self._store.check(keys)
        found = self._store.multi_get(keys)
        self.received += sum(map(len, found))
        return found


def test_only_rank_0_has_prompts_and_an_engine_gets_its_own_alone() -> None:
    """Of a resumed rollout, whose journal has the other slots; one engine dies, and one rank has none.

    Rank 0 is late: before it has given its prompts, nobody may ask for one.
    """
    text = "x" * 10_000
    todo = [slot for slot in range(40) if slot % 4]

    def prompt(slot: int) -> Prompt:
        return Prompt(100 + slot, np.full(slot + 1, slot, np.int32), f"{slot}{text}", {"a": slot})

    prompts = {slot: prompt(slot) for slot in todo}
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    dying = StandInEngine(deaths=1)

    class Other(StandInEngine):
        def step(self) -> list[Group]:
            while dying.deaths:  # else the others may take all prompts before it has one
                time.sleep(0.001)
            return super().step()

    engines: list[Any] = [Other(), dying, None, Other()]

    def rank(link: Transport) -> tuple[dict[int, Group], Watched]:
        mine: Any = Watched(store.clone())
        notices = Notices(mine, NodeTopology(link.rank, link.world_size), interval=0.001)
        agree = functools.partial(_most_of_all, link)
        recovery = EngineRecovery(engines[link.rank], notices, link.rank, 1, lambda fill: None, agree=agree)
        ranks: Any = SimpleNamespace(rank=link.rank, device=torch.device("cpu"), exchange=Exchange(link))
        pool: Any = StandInPool()
        config = from_dict({"run": {"seed": 7}})
        worker = RolloutWorker(config, ranks, mine, notices, engines[link.rank], pool, 3, recovery, lambda: False)
        if link.rank == 0:
            time.sleep(0.3)
        given = Request(todo, {} if link.rank else prompts, 2, SAMPLING, rollout=5)
        return worker.generate(given).own, mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gspo_hpc.rollout.worker.largest", lambda values, device: list(values))
        parts = on_ranks(4, rank)
    whole = [group for own, _ in parts for group in own.values()]
    assert sorted(group.slot for group in whole) == todo and engines[1].restarts == 1 and not parts[2][0]
    assert not any(seen.waited for _, seen in parts), "a rank that waits holds up its thread that reads notices"
    for group in whole:
        given = prompts[group.slot]
        assert group.prompt.tokens.dtype == np.int32 and group.prompt.tokens.tolist() == given.tokens.tolist()
        assert (group.prompt.index, group.prompt.text, group.prompt.fields) == (given.index, given.text, given.fields)
        assert [c.seed for c in group.completions] == [sample_seed(7, 5, group.slot, given.index, i) for i in range(2)]
    for own, seen in parts:
        assert len(own) * len(text) <= seen.received <= len(own) * (len(text) + 600)
    assert not [key for key in store.list_keys() if "/prompt/" in key], "prompts are left in the store"


def _most_of_all(link: Transport, values: Any) -> list[float]:
    joined = link.tree_all_reduce(json.dumps(list(values)).encode(), b"\n".join)
    return [max(column) for column in zip(*map(json.loads, joined.splitlines()), strict=True)]


def test_a_stop_in_the_middle_of_a_sync_interrupts_all_ranks() -> None:
    """The pass of the probe is abandoned. Engines that generate cannot sleep, and the save has them sleep."""
    world = World(3, 0)
    engines: list[Any] = [Busy(deaths=1), Busy(), None]

    def sync_weights(fill: Any) -> None:
        world.wait()
        raise Abandoned

    make = workers(world, engines, sync_weights, lambda: False)

    def rank() -> None:
        with pytest.raises(Interrupted):
            make().generate(request())

    world.run(rank)
    assert engines[0].restarts == 1
    assert all(engine.aborted and not engine.pending for engine in engines[:2])


def test_ranks_that_wait_for_others_do_not_count_as_moving_on() -> None:
    """In the rollout, with an engine and without one, and after it: only an engine that works counts."""
    world = World(3, 0)
    finish, looks = threading.Event(), [0, 0, 0]
    first = Busy()

    class Second(StandInEngine):
        def step(self) -> list[Group]:
            while not first.pending:  # else this one may finish all groups
                world.dawdle()
            return super().step()

    engines: list[Any] = [first, Second(), None]
    make = workers(world, engines, lambda fill: None, finish.is_set)
    moved: dict[int, int] = {}
    met: list[int] = []
    marks = progress.mark

    def largest(values: Any, device: torch.device) -> list[float]:
        met.append(world.rank)
        return [max(column) for column in zip(*world.gather(values), strict=True)]

    def mark(phase: str | None = None) -> None:
        moved[world.rank] = moved.get(world.rank, 0) + 1
        marks(phase)

    def rank() -> None:
        worker = make()
        look = worker.notices.look

        def counted(**options: Any) -> int:
            looks[world.rank] += 1
            if min(looks) > 300:
                finish.set()
            return look(**options)

        worker.notices.look = counted  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            worker.generate(request())

    with pytest.MonkeyPatch.context() as patch:
        for module in ("rollout.generation", "rollout.worker", "system.progress"):
            patch.setattr(f"gspo_hpc.{module}.mark", mark)
        patch.setattr("gspo_hpc.rollout.worker.largest", largest)
        world.run(rank)
    assert sorted(met) == [0, 1, 2], "a rank may end, and close the stores of its node, only once all know of the stop"
    assert min(looks) > 300
    assert moved[0] > 50 and max(moved[1], moved[2]) < 40


def test_a_rank_that_has_left_does_not_count_as_moving_on() -> None:
    """Until all others have left, however long these take."""
    world = World(2, 0)
    make = workers(world, [Busy(), None], lambda fill: None, lambda: False)
    looks, moved, gone = [0, 0], [0, 0], threading.Event()

    def mark(phase: str | None = None) -> None:
        moved[world.rank] += 1

    def rank() -> None:
        worker = make()
        counters = CallCounters(worker.store, worker.notices, 1, 1)
        look = worker.notices.look

        def counted(**options: Any) -> int:
            looks[world.rank] += 1
            if looks[1] > 100:
                gone.set()
            return look(**options)

        worker.notices.look = counted  # type: ignore[method-assign]
        if world.rank == 0:
            assert gone.wait(20)
        worker._leave(counters)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("rollout.worker", "system.progress"):
            patch.setattr(f"gspo_hpc.{module}.mark", mark)
        world.run(rank)
    assert looks[1] > 100 and moved[1] < 10


class Unpaid(StandInPool):
    """A pool whose judge has no budget left."""

    def submit_group(self, keys: list[tuple[int, int]], *texts: Any) -> None:
        over: Any = {"judge": "over_budget"}
        self.results += [(key, RewardResult(0.0, {}, "judge: was not called: 5 of 5 requests", over)) for key in keys]


def test_without_a_budget_all_ranks_end_alike_and_nothing_is_journalled(tmp_path: Path) -> None:
    world = World(3, 0)
    make = workers(world, [StandInEngine(), Busy(), None], lambda fill: None, lambda: False)
    journal = Journal(tmp_path, 0, fingerprint="f", rollout=5)
    told: dict[int, str] = {}

    def largest(values: Any, device: torch.device) -> list[float]:
        return [max(column) for column in zip(*world.gather(values), strict=True)]

    def rank() -> None:
        worker = make()
        worker.pool = Unpaid()  # type: ignore[assignment]
        with pytest.raises(JudgesOverBudget) as caught:
            worker.generate(request(), journal if world.rank == 0 else None)
        told[world.rank] = str(caught.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gspo_hpc.rollout.worker.largest", largest)
        world.run(rank)
    journal.close()
    assert len(told) == 3 and read_journals(tmp_path, "f") == {}
    assert told[0].startswith("judge: was not called: 5 of 5 requests; judges.used_up is stop: raise the limit")


class PaidInPart(StandInPool):
    """A pool whose judge answers all but one request of the second of three groups, which had no budget left.

    The first poll that gives any has half of the first group and the missing answer, and the next ones the others.
    """

    def submit_group(self, keys: list[tuple[int, int]], *texts: Any) -> None:
        super().submit_group(keys, *texts)
        over: Any = {"judge": "over_budget"}
        unpaid = RewardResult(0.0, {}, "judge: was not called: 5 of 5 requests", over)
        self.results = [(key, unpaid if key == (1, 0) else result) for key, result in self.results]
        self.results.sort(key=lambda one: (one[0] not in ((0, 0), (1, 0)), one[0]))
        self.whole = len(self.results) == 6

    def poll(self, timeout: float) -> list[tuple[Any, RewardResult]]:
        first = 2 * self.whole
        found, self.results = self.results[:first], self.results[first:]
        return found


@pytest.mark.parametrize("signalled", [False, True])
def test_groups_whose_judges_were_paid_are_kept_where_the_budget_ends(tmp_path: Path, signalled: bool) -> None:
    """They were asked about again, and paid again, after a resume. A signal leaves no time to wait for them."""
    journal = Journal(tmp_path, 0, fingerprint="f", rollout=5)
    waiting = PaidInPart()
    made = generation(StandInEngine(), waiting, stop=lambda: signalled and not made.engine.pending, journal=journal)
    made.run()
    journal.close()
    assert made.counters.stopped() and bool(made.counters.why_stopped()) != signalled
    assert sorted(read_journals(tmp_path, "f")) == ([] if signalled else [0, 2])


def test_a_stop_that_another_rank_asks_for_waits_for_no_reward() -> None:
    """It comes of a signal there, and the time until the kill is for the save."""

    class Silent(StandInPool):
        polls = 0

        def poll(self, timeout: float) -> list[tuple[Any, RewardResult]]:
            self.polls += 1
            assert self.polls < 100, "it waits"
            made.counters.stop()
            return []

    made = generation(StandInEngine(), Silent(), interval=0.0)
    made.run()
    assert made.counters.stopped() and made.pool is not None and made.pool.pending


def test_completions_that_no_judge_was_asked_about_are_excluded_and_no_zeros() -> None:
    """reward.on_failure: zero is for reward functions that failed, and not for those that were not called."""
    one = Completion(np.ones(1, np.int32), np.zeros(1, np.float32), "", "stop", 0)
    group = Group(0, Prompt(0, np.ones(2, np.int32), "", {}), (one, one))
    over: Any = {"judge": "over_budget"}
    results = {0: RewardResult(0.0, {}, "over", over), 1: RewardResult(0.0, {}, "judge: raised", {"judge": "failed"})}
    first, second = with_rewards(group, results, "zero").completions
    assert (first.excluded, second.excluded) == (True, False)
