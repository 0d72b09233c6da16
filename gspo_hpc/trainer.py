"""The loop: generate -> reward -> advantage -> (log-probs) -> update -> sync weights -> save -> log.

Floor 4. Read :func:`train` top to bottom and you have seen the system. Everything in it is the same on every rank; what
only rank 0 does (files, console, tracking) sits behind :class:`Outlet`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gspo_hpc import evaluate, journal, profiling, sync, update
from gspo_hpc.algorithms import Objective
from gspo_hpc.commit import Entry
from gspo_hpc.config import Config
from gspo_hpc.control import Client, mark
from gspo_hpc.cursor import Cursor
from gspo_hpc.engine import EngineDied, Sampling
from gspo_hpc.meter import Meter
from gspo_hpc.passes import Passes, offload_trainer
from gspo_hpc.pipeline import Abandoned, StepResult
from gspo_hpc.policy import Policy
from gspo_hpc.process_groups import any_rank, broadcast_bytes
from gspo_hpc.prompts import Position, PromptStream
from gspo_hpc.records import Group, Prompt
from gspo_hpc.rollout import Interrupted, Station, engine_metrics, generate
from gspo_hpc.saver import Saver
from gspo_hpc.statistics import step_record


class Outlet(Protocol):
    """Where results go. On ranks other than 0 every method does nothing."""

    def rollout(self, number: int, completions: int) -> contextlib.AbstractContextManager[Any]:
        """Progress within a rollout."""

    def step(self, record: dict[str, Any]) -> None:
        """One record a step: console, metrics.jsonl, tracking."""

    def samples(self, step: int, phase: str, groups: Sequence[Group]) -> None:
        """A few completions to look at."""

    def note(self, text: str) -> None:
        """One line for the person who watches."""

    def profile(self, step: int, table: str, traces: Path) -> None:
        """Where the time of a step went; the traces of all ranks are in a folder."""

    def committed(
        self,
        staging: Path,
        known: Mapping[str, Entry],
        cursor: Cursor,
        groups: Sequence[Group],
        record: dict[str, Any] | None,
    ) -> None:
        """Make a written checkpoint count, in the thread that saves; `record` is that of its step, not logged yet."""


_PATIENCE = 30.0  # seconds that a failing rank waits for a save under way
_NO_VERSION = -1  # of weights: none that there ever is


class TooManySkippedSteps(RuntimeError):
    """The gradient was not finite for too many steps in a row."""


@dataclass
class Session:
    """All that one rank needs to train."""

    config: Config
    objective: Objective
    passes: Passes
    num_rollout_prompts: int
    updates_per_rollout: int
    policy: Policy
    station: Station
    stream: PromptStream
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    probe: list[list[int]]
    rollouts: Path
    new_staging: Any  # (step) -> Path, the same on every rank
    saver: Saver
    outlet: Outlet
    attempt: int
    reference: update.Reference | None
    control: Client | None  # to whoever watches this rank
    meter: Meter
    traces: Path  # where those of tracking.profile_steps go
    weights_version: int = 0
    synced: sync.Synced | None = None
    synced_version: int = _NO_VERSION  # of the weights that the engines have
    deaths_told: int = 0
    rollout_seconds: float | None = None  # of what came before the first update; None where an earlier attempt did it

    @property
    def seconds(self) -> dict[str, float]:
        """Of the current step, by phase."""
        return self.meter.seconds

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the seconds of this block to the phase of the current step."""
        mark(phase)
        try:
            with self.meter.phase(phase):
                yield
        finally:
            mark(phase)


@dataclass(frozen=True)
class Start:
    """Where an attempt begins: what the newest whole checkpoint holds, or nothing."""

    cursor: Cursor = field(default_factory=Cursor)
    groups: list[Group] = field(default_factory=list)  # of a rollout that is not used up
    record: dict[str, Any] | None = None  # of the checkpoint's step, if it was saved but not logged
    evaluated: bool = False  # whether the evaluation before the first step is logged


def train(session: Session, start: Start) -> str:
    """Go on from `start` to the last step: "done" or "stopped"."""
    config, cursor, groups, saved = session.config, start.cursor, start.groups, start.cursor.step
    assert config.run.max_steps is not None
    unlogged = start.record
    print(f"device: {session.meter.device}", flush=True)  # for who reads this rank's log, and for diagnose
    try:
        if unlogged is not None:
            _finish(session, cursor, unlogged)
            unlogged = None
        elif cursor.step == 0 and not start.evaluated and config.eval.before and session.eval_prompts:
            session.outlet.step({"step": 0, "attempt": session.attempt} | _evaluate(session, 0, "before"))
        while cursor.step < config.run.max_steps:
            began = _begin_step(session, cursor.step + 1)
            after = Position(cursor.epoch, cursor.offset)
            with _traced(session, cursor.step + 1):
                if cursor.update == 0:
                    groups, after = _rollout(session, cursor)  # generate, reward, advantage
                    groups = _logprobs(session, groups)  # only the passes that are needed
                    session.rollout_seconds = time.monotonic() - began
                batch = update.minibatch(groups, config, cursor.update)
                with session.clock("update"):
                    result = update.step(session.policy, batch, session.objective, config)
            session.weights_version += int(result is not None and not result.skipped)
            before, cursor = cursor, _advance(session, cursor, after, result, batch)
            unlogged = step_record(before, cursor, batch, result, session.seconds, time.monotonic() - began)
            unlogged |= _speed(session, before, unlogged) | _state(session, before) | _measured(session)
            if cursor.step % config.checkpoint.interval == 0 or cursor.step == config.run.max_steps:
                _save(session, cursor, groups, unlogged)
                saved = cursor.step
            _finish(session, cursor, unlogged)  # evaluate where due, log
            unlogged = None
            _tell_profile(session, cursor.step)
            session.saver.check()
            if any_rank(session.station.stop_requested(), session.policy.ranks.device):
                raise Interrupted
    except (Interrupted, Abandoned):
        if cursor.step > saved and _can_save(session):
            _save(session, cursor, groups, unlogged)
        _wait_for_save(session)
        return "stopped"
    except Exception:
        # What is nearly saved need not be done again; the error is the one that is told.
        with contextlib.suppress(Exception):
            session.saver.wait(_PATIENCE)
        raise
    _wait_for_save(session)
    return "done"


def _begin_step(session: Session, step: int) -> float:
    """Nothing of the step is measured yet; the time."""
    session.meter.begin(watch_memory=step in session.config.tracking.profile_steps)
    session.policy.passes.clear()
    session.policy.flops.clear()
    return time.monotonic()


def _traced(session: Session, step: int) -> contextlib.AbstractContextManager[None]:
    """Under torch's profiler, if this is one of the steps to be."""
    if step not in session.config.tracking.profile_steps:
        return contextlib.nullcontext()
    return profiling.traced(profiling.trace_path(session.traces, step, session.policy.ranks.rank))


def _measured(session: Session) -> dict[str, float]:
    """How much of the step's passes is communication, and how well the devices were used. Collective."""
    return session.meter.measured(session.policy.flops["update"]).metrics()


def _tell_profile(session: Session, step: int) -> None:
    """The table of a step that was traced, with what came after its update. Collective."""
    if step in session.config.tracking.profile_steps:
        measured = session.meter.measured(session.policy.flops["update"])
        session.outlet.profile(step, measured.table(step), session.traces)


def _rollout(session: Session, cursor: Cursor) -> tuple[list[Group], Position]:
    """Sampled, graded groups with advantages, and where the next rollout's prompts begin."""
    config = session.config
    indices, after = session.stream.take(Position(cursor.epoch, cursor.offset), session.num_rollout_prompts)
    prompts = {slot: session.prompts[index] for slot, index in enumerate(indices)}
    fingerprint = _sync(session).fingerprint
    folder = session.rollouts / f"{cursor.rollout:06d}"
    finished = _journalled(session, folder, fingerprint)
    samples = config.batch.num_generations
    assert samples is not None
    todo = {slot: prompt for slot, prompt in prompts.items() if slot not in finished}
    writer = None
    if session.station.engine is not None and todo:
        writer = journal.Journal(folder, session.policy.ranks.rank, fingerprint=fingerprint, rollout=cursor.rollout)
    with session.clock("generate"), session.outlet.rollout(cursor.rollout, len(todo) * samples):
        sampling = _sampling(config, config.rollout.temperature)
        try:
            fresh = generate(session.station, todo, samples, sampling, cursor.rollout, writer)
        finally:
            if writer is not None:
                writer.close()
            session.seconds["reward_wait"] = session.station.seconds_waiting_for_rewards
            session.station.seconds_waiting_for_rewards = 0.0
    _sleep(session)
    groups = sorted([*finished.values(), *fresh], key=lambda group: group.slot)
    groups = update.with_advantages(groups, session.objective.normalize_advantage)
    session.outlet.samples(cursor.step, "train", groups)
    return groups, after


def _journalled(session: Session, folder: Path, fingerprint: str) -> dict[int, Group]:
    """The groups that an attempt before this one finished: as rank 0 reads them, for the others may read later."""
    ranks = session.policy.ranks
    groups = journal.read_journals(folder, fingerprint) if ranks.rank == 0 else {}
    lines = "\n".join(group.to_json() for group in groups.values())
    received = broadcast_bytes(lines.encode(), ranks.device).decode().splitlines()
    return {group.slot: group for group in map(Group.from_json, received)}


def _logprobs(session: Session, groups: list[Group]) -> list[Group]:
    config, policy = session.config, session.policy
    if session.passes.old_logprobs:
        # The first update of a rollout is made by the policy that sampled it: its ratio is 1 without a pass.
        first = update.minibatch(groups, config, 0) if config.batch.num_iterations == 1 else []
        rest = groups[len(first) :]
        with session.clock("old_logprobs"):
            groups = update.with_old_logprobs(policy, groups, rest, config)
    if session.reference is not None:
        with session.clock("reference"):
            groups = session.reference.with_logprobs(policy, groups, config)
    return groups


def _sync(session: Session) -> sync.Synced:
    """Give the engines the current weights, unless they have them, and check that they do. Collective: whether they
    have them is known from what all ranks did, not from an engine that only some of them own."""
    engine, ranks = session.station.engine, session.policy.ranks
    if session.synced is not None and session.synced_version == session.weights_version:
        if offload_trainer(session.config):
            session.policy.lend()
        if engine is not None:
            with contextlib.suppress(EngineDied):  # the first step of generation finds it dead, and mends it
                engine.wake_up()
        return session.synced
    with session.clock("sync"):
        while True:
            synced, death = sync.synchronize(session.policy, engine, session.probe)
            if not any_rank(death is not None, ranks.device):
                break
            if death is not None:
                session.station.revive(death)
    session.synced, session.synced_version = synced, session.weights_version
    return synced


def _sleep(session: Session) -> None:
    """Put the engines to sleep. At level 2 they have no weights from now on, so the next :func:`_sync` gives them all
    of the weights again, also where no update has changed them (one that was skipped, a batch without a gradient)."""
    level = session.config.rollout.sleep_level
    if level == 2:
        session.synced_version = _NO_VERSION
    if session.station.engine is not None:
        with contextlib.suppress(EngineDied):  # mended by the next sync
            session.station.engine.sleep(level)


def _evaluate(session: Session, step: int, phase: str) -> dict[str, float]:
    _sync(session)
    with session.clock("eval"):
        scores, groups = evaluate.run(session.station, session.eval_prompts, session.config)
    session.outlet.samples(step, phase, groups)
    session.outlet.note(f"step {step}: accuracy {scores['eval/accuracy']:.3f} on {len(groups)} unseen prompts")
    return scores


def _finish(session: Session, cursor: Cursor, record: dict[str, Any]) -> None:
    """Evaluate if this step is due for it, log the step, and stop a run that does not move."""
    options, faults = session.config.eval, session.config.faults
    last = cursor.step == session.config.run.max_steps
    due = (options.after and last) or (options.interval is not None and cursor.step % options.interval == 0)
    scores = _evaluate(session, cursor.step, "after" if last else "during") if due and session.eval_prompts else {}
    seconds = {f"seconds/{phase}": session.seconds[phase] for phase in ("save", "eval") if phase in session.seconds}
    if scores and cursor.update:
        _sleep(session)  # the next step is another update of this rollout, and needs the memory
    session.outlet.step(record | seconds | scores)
    if cursor.skipped_in_a_row > faults.max_skipped_steps:
        raise TooManySkippedSteps(
            f"the gradient was not finite for {cursor.skipped_in_a_row} steps in a row (faults.max_skipped_steps "
            f"{faults.max_skipped_steps}): lower optimizer.lr, or look at the rewards and the gap in metrics.jsonl"
        )


def _speed(session: Session, cursor: Cursor, record: dict[str, Any]) -> dict[str, Any]:
    """Completion tokens per second, with the rollout's time shared out evenly over its updates."""
    if session.rollout_seconds is None:
        return {"completion_tokens_per_s": None}
    own = record["seconds"] - (session.rollout_seconds if cursor.update == 0 else 0.0)
    seconds = own + session.rollout_seconds / session.updates_per_rollout
    return {"completion_tokens_per_s": record["completion_tokens"] / seconds}


def _state(session: Session, cursor: Cursor) -> dict[str, Any]:
    deaths = session.station.deaths()
    for death in deaths[session.deaths_told :]:
        session.outlet.note(f"an engine died and was restarted in place ({death})")
    session.deaths_told = len(deaths)
    state: dict[str, Any] = {"attempt": session.attempt, "engine_restarts": len(deaths)}
    state |= {f"passes/{kind}": session.policy.passes[kind] for kind in ("logprobs", "update")}
    if session.synced is not None and cursor.update == 0:  # the sync before this rollout; later updates had none
        state |= {"probe_gap_max": session.synced.gap_max, "probe_gap_mean": session.synced.gap_mean}
        state |= engine_metrics(session.station.engines)
    return state


def _sampling(config: Config, temperature: float) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=temperature, top_p=rollout.top_p, top_k=rollout.top_k, max_tokens=rollout.max_response_length
    )


def _advance(
    session: Session, cursor: Cursor, after: Position, result: StepResult | None, batch: Sequence[Group]
) -> Cursor:
    tokens = sum(len(completion.tokens) for group in batch for completion in group.completions)
    skipped = result is not None and result.skipped and not result.overflowed
    return cursor.stepped(
        session.updates_per_rollout, epoch=after.epoch, offset=after.offset, skipped=skipped, tokens=tokens
    )


def _can_save(session: Session) -> bool:
    """Whether a checkpoint begun now would be whole before this job is killed, as far as rank 0 knows."""
    control = session.control
    left = None if control is None or control.deadline is None else control.deadline - time.time()
    too_late = left is not None and control is not None and left < control.save_seconds * 1.5
    if any_rank(too_late, session.policy.ranks.device):
        session.outlet.note("no time is left for a checkpoint; the next start goes on from the one before")
        return False
    return True


def _save(session: Session, cursor: Cursor, groups: Sequence[Group], record: dict[str, Any] | None) -> None:
    """Begin a checkpoint of what this step has led to; training goes on while it is written."""
    with session.clock("save"):
        _wait_for_save(session)
        staging = session.new_staging(cursor.step)
        in_use = groups if cursor.update else []
        session.saver.save(staging, lambda known: session.outlet.committed(staging, known, cursor, in_use, record))


def _wait_for_save(session: Session) -> None:
    session.saver.wait()
    if session.control is not None:
        session.control.save_seconds = session.saver.seconds
