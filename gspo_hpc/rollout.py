"""Generation and grading: prompts go to engines as these become free, finished groups into the journal.

Floor 4. The ranks that own an engine ("leads") pull prompt slots from a counter in the torch.distributed store, so a
slow engine simply takes fewer. Graders run while generation goes on. Ranks without an engine wait. Nobody sits in a
collective meanwhile, so an engine that died can be given its weights again by all ranks together: its lead raises a
counter in the store, everyone sees it within a poll and joins the weight sync. A rank that is done stays reachable in
this way until all are done: only then can no sync be asked for any more, and all have seen the same flags.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

from gspo_hpc.config import Config
from gspo_hpc.control import mark
from gspo_hpc.engine import Engine, EngineDied, Sampling
from gspo_hpc.journal import Journal
from gspo_hpc.preemption import signals_default_in_children
from gspo_hpc.process_groups import Ranks, gather_bytes
from gspo_hpc.records import Completion, Group, Prompt
from gspo_hpc.rewards.pool import RewardPool, RewardResult

POLL_SECONDS = 0.05
_DEATHS, _RESYNCS = "engine_deaths", "resyncs"  # counters in the store
_TAIL = 0.1  # of the completions that ran at once: with fewer, an engine has too little to do


class Interrupted(Exception):
    """A stop was asked for in the middle of a rollout. Finished groups are in the journal."""


class EngineLost(RuntimeError):
    """An engine died more often than faults.max_engine_restarts allows."""


@dataclass
class EngineTime:
    """What one engine did in a rollout. Seconds of wall time in its steps, restarts included."""

    busy: float = 0.0
    tail: float = 0.0  # of these, with at most a tenth as many completions running as at its fullest
    tokens: int = 0  # of finished completions
    fullest: int = 0  # completions running at once

    def add(self, seconds: float, running: int) -> None:
        """A step, and what ran when it began."""
        self.busy += seconds
        self.fullest = max(self.fullest, running)
        self.tail += seconds if 0 < running <= _TAIL * self.fullest else 0.0


def engine_metrics(engines: Sequence[EngineTime]) -> dict[str, float]:
    """What is logged of a rollout's engines; nothing where none had anything to do."""
    used = [engine for engine in engines if engine.busy > 0.0]
    if not used:
        return {}
    speeds = [engine.tokens / engine.busy for engine in used]
    return {
        "seconds/engine_least": min(engine.busy for engine in engines),
        "seconds/engine_most": max(engine.busy for engine in engines),
        "seconds/generate_tail": max(engine.tail for engine in used),
        "engine_tokens_per_s_least": min(speeds),
        "engine_tokens_per_s_most": max(speeds),
    }


@dataclass
class Station:
    """What one rank brings to generation. `engine` and `pool` are None on ranks that own no engine."""

    config: Config
    ranks: Ranks
    store: dist.Store
    engine: Engine | None
    pool: RewardPool | None
    num_engines: int
    # Collective, every rank calls it: fill and check an engine, or only take part; how the engine died, if it did.
    give_weights: Callable[[Engine | None], EngineDied | None]
    stop_requested: Callable[[], bool]
    on_progress: Callable[[int, int], None] = lambda completions, tokens: None
    seconds_waiting_for_rewards: float = 0.0
    engines: list[EngineTime] = field(default_factory=list)  # of the newest call of generate, the same on every rank
    _restarts: int = 0  # of this rank's engine
    _calls: int = 0
    _resyncs_seen: int = 0

    def revive(self, death: EngineDied) -> None:
        """Restart this rank's engine, which then has the weights of `model.path`: the caller gives it the current ones.

        Raises EngineLost when that is one restart too many.
        """
        assert self.engine is not None
        reason: Exception = death
        limit = self.config.faults.max_engine_restarts
        while True:
            self._restarts += 1
            if self._restarts > limit:
                times = f"{self._restarts} times (faults.max_engine_restarts {limit})"
                raise EngineLost(f"the engine of rank {self.ranks.rank} died {times}: {reason}") from reason
            print(f"engine died ({reason}); restart {self._restarts} of at most {limit}", flush=True)
            number = self.store.add(_DEATHS, 1)
            self.store.set(f"{_DEATHS}/{number}", f"rank {self.ranks.rank}: {reason}")
            try:
                with signals_default_in_children():
                    self.engine.restart()
                return
            except RuntimeError as error:
                reason = error

    def deaths(self) -> list[str]:
        """How engines died in this attempt, on any rank: one text each."""
        return [self.store.get(f"{_DEATHS}/{i}").decode() for i in range(1, self.store.add(_DEATHS, 0) + 1)]


def sample_seed(run_seed: int, rollout: int, slot: int, prompt: int, sample: int) -> int:
    """The seed of one completion: a pure function, so a resumed rollout samples what the uninterrupted one would."""
    digest = hashlib.blake2b(f"{run_seed}/{rollout}/{slot}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def generate(
    station: Station,
    prompts: Mapping[int, Prompt],
    samples: int,
    sampling: Sampling,
    rollout: int,
    journal: Journal | None = None,
) -> list[Group]:
    """Sample and grade `samples` completions of every prompt (by slot); all groups, by slot, on every rank.

    Raises Interrupted on all ranks when a stop was asked for, EngineLost when an engine is beyond mending.
    """
    station._calls += 1
    name = f"generate/{station._calls}"
    slots = sorted(prompts)
    mine: dict[int, Group] = {}
    own = EngineTime()
    if slots:
        if station.engine is not None:
            mine = _lead(station, name, slots, prompts, samples, sampling, rollout, journal, own)
        else:
            _wait(station, name, len(slots))
        _leave(station, name)
    stopped = _flag(station, f"{name}/stop")
    first = json.dumps(asdict(own) if station.engine is not None else None)  # a line about the engine, then its groups
    lines = "\n".join([first, *(group.to_json() for group in mine.values())]).encode()
    received = [part.decode().splitlines() for part in gather_bytes(lines, station.ranks.device)]
    if stopped:
        raise Interrupted
    told = [json.loads(part[0]) for part in received]
    station.engines = [EngineTime(**engine) for engine in told if engine is not None]
    groups = [Group.from_json(line) for part in received for line in part[1:]]
    return sorted(groups, key=lambda group: group.slot)


def _lead(
    station: Station,
    name: str,
    slots: Sequence[int],
    prompts: Mapping[int, Prompt],
    samples: int,
    sampling: Sampling,
    rollout: int,
    journal: Journal | None,
    clock: EngineTime,
) -> dict[int, Group]:
    engine, pool, store = station.engine, station.pool, station.store
    assert engine is not None and pool is not None
    config = station.config
    # Half an engine's fair share at a time: enough to keep it full, little enough for the others to take over.
    share = -(-len(slots) // (2 * station.num_engines)) if station.num_engines > 1 else len(slots)
    finished: dict[int, Group] = {}
    grading: dict[int, tuple[Group, dict[int, RewardResult]]] = {}
    exhausted = False
    generated = engine.tokens_generated
    while True:
        mark("generate")  # a step of an engine that hangs ends with EngineDied, after faults.engine_timeout
        if station.stop_requested():
            store.set(f"{name}/stop", "1")
        if _flag(station, f"{name}/stop"):
            engine.abort()
            break
        while not exhausted and engine.pending < share:
            index = store.add(f"{name}/next", 1) - 1
            if index >= len(slots):
                exhausted = True
                break
            slot = slots[index]
            seeds = [sample_seed(config.run.seed, rollout, slot, prompts[slot].index, i) for i in range(samples)]
            engine.submit(slot, prompts[slot], seeds, sampling)
        if engine.pending:
            running, began = engine.running, time.monotonic()
            ready = _step(station)
            clock.add(time.monotonic() - began, running)
            clock.tokens = engine.tokens_generated - generated
            for group in ready:
                grading[group.slot] = (group, {})
                for index, completion in enumerate(group.completions):
                    pool.submit(
                        (group.slot, index),
                        completion.text,
                        len(completion.tokens),
                        group.prompt.text,
                        group.prompt.fields,
                    )
        waiting = not engine.pending and bool(grading)
        began = time.monotonic()
        results = pool.poll(timeout=POLL_SECONDS if waiting else 0.0)
        if waiting:
            station.seconds_waiting_for_rewards += time.monotonic() - began
        if any(result.failure for _, result in results) and station.stop_requested():
            continue  # Slurm signals every process of a job: a grader that died of that has not failed
        for key, result in results:
            slot, index = key
            group, graded = grading[slot]
            graded[index] = result
            if len(graded) == len(group.completions):
                del grading[slot]
                finished[slot] = _graded(group, graded, config.reward.on_failure)
                if journal is not None:
                    journal.append([finished[slot]])
                store.add(f"{name}/done", 1)
                station.on_progress(len(group.completions), engine.tokens_generated - generated)
        if not engine.pending and not grading:
            if exhausted and _done(station, name) >= len(slots):
                break
            if exhausted:  # others still generate
                _join_resyncs(station)
                time.sleep(POLL_SECONDS)
        elif station.num_engines > 1:
            _join_resyncs(station)
    return finished


def _step(station: Station) -> list[Group]:
    """Groups that are finished now. A dead engine is restarted, filled and given its unfinished groups again."""
    engine = station.engine
    assert engine is not None
    try:
        return engine.step()
    except EngineDied as death:
        lost: EngineDied | None = death
    while lost is not None:
        station.revive(lost)
        station.store.add(_RESYNCS, 1)
        lost = _join_resyncs(station, engine)
    engine.resubmit()
    return []


def _join_resyncs(station: Station, fill: Engine | None = None) -> EngineDied | None:
    """Take part in every weight sync that was asked for; the first one fills `fill` too. How that died, if it did."""
    asked = station.store.add(_RESYNCS, 0)
    while station._resyncs_seen < asked:
        station._resyncs_seen += 1
        if (death := station.give_weights(fill)) is not None:
            return death
        fill = None
    return None


def _leave(station: Station, name: str) -> None:
    """Stay reachable for the weight syncs of others until every rank has come here."""
    station.store.add(f"{name}/left", 1)
    while station.store.add(f"{name}/left", 0) < station.ranks.world_size:
        mark("generate")
        _join_resyncs(station)
        time.sleep(POLL_SECONDS)


def _wait(station: Station, name: str, total: int) -> None:
    while _done(station, name) < total:
        mark("generate")
        if station.stop_requested():
            station.store.set(f"{name}/stop", "1")
        if _flag(station, f"{name}/stop"):
            return
        _join_resyncs(station)
        time.sleep(POLL_SECONDS)


def _done(station: Station, name: str) -> int:
    return station.store.add(f"{name}/done", 0)


def _flag(station: Station, key: str) -> bool:
    return bool(station.store.check([key]))


def _graded(group: Group, results: Mapping[int, RewardResult], on_failure: str) -> Group:
    def grade(completion: Completion, result: RewardResult) -> Completion:
        return replace(
            completion,
            reward=result.value if result.failure is None else 0.0,
            reward_parts=result.parts,
            failure=result.failure,
            excluded=result.failure is not None and on_failure == "exclude",
        )

    return group.with_completions(tuple(grade(c, results[i]) for i, c in enumerate(group.completions)))
