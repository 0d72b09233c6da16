"""The head of the report page: name, state and the few numbers that say how the run went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gspo_hpc.planning import exactness, trained
from gspo_hpc.report.scales import number
from gspo_hpc.runs import distillation, spending
from gspo_hpc.runs.learning import Learning, course, judge
from gspo_hpc.runs.reader import RunData, unix_time, value
from gspo_hpc.system.text import duration

STATES = {
    "done": "done",
    "running": "running",
    "stopped": "stopped, can be resumed",
    "preempted": "preempted, resumes by itself",
    "time limit": "out of time, resumes by itself",
    "memory": "ended before memory runs out, resumes by itself",
    "cancelled": "cancelled, can be resumed",
    "failed": "failed",
    "killed": "killed, can be resumed",
    "refused": "refused",
    "new": "not started",
}
_TONES = {"done": "good", "failed": "bad", "killed": "bad", "refused": "bad", "running": "", "new": ""}


@dataclass(frozen=True)
class Fact:
    """One number of the head, as text; `before` is the value at the start where the number changed over the run."""

    name: str
    value: str
    before: str = ""
    unit: str = ""
    change: str = ""  # with its sign
    trend: str = ""  # "up", "down" or empty
    note: str = ""


@dataclass(frozen=True)
class Summary:
    """The head of the page."""

    name: str
    state: str
    tone: str
    worry: str  # what is wrong with what the run learnt; empty if nothing is
    words: tuple[str, ...]
    facts: tuple[Fact, ...]


def summary(run: RunData) -> Summary:
    """Return the head of the page."""
    found = _learning(run)
    worry, how = ("", tone(run.state)) if found is None else (found.worry, "bad" if found.nothing else "mid")
    return Summary(run.name, state(run), how, worry, tuple(_words(run)), tuple(_facts(run)))


def state(run: RunData) -> str:
    """Return the state of a run for people; that of a finished run says so if the run learnt nothing, or may have."""
    found, told = _learning(run), STATES.get(run.state, run.state)
    return told if found is None else f"{told}, {'but learnt nothing' if found.nothing else 'in doubt'}"


def tone(reason: str) -> str:
    """Return how to colour the reason for which an attempt ended: "good", "bad", "mid", or "" for none."""
    return _TONES.get(reason, "mid" if reason in STATES else "")


def when(time: float) -> str:
    """Return unix seconds as a date and time in UTC."""
    return f"{datetime.fromtimestamp(time, UTC):%-d %b %Y %H:%M} UTC"


def _learning(run: RunData) -> Learning | None:
    """Return what a run that is over learnt, if that is a worry: of one that may go on, only that it was nothing."""
    found = judge(run.records) if run.state not in ("running", "new") else None
    return found if found is not None and found.worry and (run.state == "done" or found.nothing) else None


def _words(run: RunData) -> Iterator[str]:
    if run.config is not None:
        config = run.config
        ranks = f"{config.world_size} rank{'s' if config.world_size != 1 else ''} ({config.cluster.platform})"
        model = Path(config.model.path).name if config.model.path else None
        grade = exactness.assess(config).grade
        adapter = trained.adapter(config)
        teacher = f"taught by {config.algorithm.teacher}" if config.algorithm.has_teacher else None
        yield from filter(
            None, (config.algorithm.name.upper(), model, adapter, teacher, config.model.dtype, ranks, grade)
        )
    begun = unix_time(run.info.get("created")) or next((one.started for one in run.attempts if one.started), None)
    if begun is not None:
        yield f"started {when(begun)}"


def _facts(run: RunData) -> Iterator[Fact]:
    yield from _accuracy(run)
    yield from _reward(run)
    yield from _teacher(run)
    completions = run.config.batch.global_batch_size if run.config is not None else None
    yield Fact(
        "Steps",
        f"{run.steps:,}",
        unit=f"of {run.max_steps:,}" if run.max_steps else "",
        note=f"{completions:,} completions each" if completions else "",
    )
    count = len(run.attempts)
    yield Fact("Time", duration(run.seconds), note=f"in {count} attempts" if count > 1 else "")
    if (account := spending.read(run.path / spending.FOLDER)) is not None:
        total, *more = spending.words(account, None if run.config is None else run.config.judges).split(", ")
        asked, _, unit = total.removesuffix(" requests").partition(" ")
        yield Fact("Requests to judges", asked, unit=unit, note=", ".join(more))
    if run.tokens_per_s is not None:
        tokens = max((value(record, "tokens") or 0.0 for record in run.records), default=0.0)
        sampled = f"{number(tokens)} sampled in all" if tokens else ""
        yield Fact("Completion tokens", number(run.tokens_per_s), unit="per second", note=sampled)


def _accuracy(run: RunData) -> Iterator[Fact]:
    evaluated, failed = run.accuracy, run.not_graded
    if failed and (not evaluated or failed[-1][0] > evaluated[-1][0]):
        step, why = failed[-1]
        before = f"{evaluated[-1][1]:.3f}" if evaluated else ""
        said, _, failure = why.partition(": ")
        yield Fact("Accuracy", said, before, note=f"at step {step}{failure and f': {failure}'}")
        return
    if not evaluated:
        return
    (_, first), (step, last) = run.accuracy[0], run.accuracy[-1]
    if len(run.accuracy) == 1:
        yield Fact("Accuracy", f"{last:.3f}", note=f"on unseen prompts, at step {step}")
        return
    change = f"{last - first:+.3f}".replace("-", "−")
    trend = "up" if last > first else "down" if last < first else ""
    yield Fact("Accuracy", f"{last:.3f}", f"{first:.3f}", change=change, trend=trend, note="on unseen prompts")


def _reward(run: RunData) -> Iterator[Fact]:
    went = course(run.train_records)
    if went is None:
        return
    if went.is_one:
        yield Fact("Reward", number(went.last), note="in its only rollout")
        return
    parts = f"first and last {went.part} rollouts" if went.part > 1 else "first and last rollout"
    yield Fact("Reward", number(went.last), number(went.first), note=parts)


def _teacher(run: RunData) -> Iterator[Fact]:
    taught = distillation.of_run(run.config, run.train_records)
    if taught is None or taught.latest is None:
        return
    before = f"{taught.divergences[0]:.4f}" if len(taught.divergences) == 2 else ""
    signal = "alone" if taught.alone else "beside rewards"
    yield Fact("Divergence from the teacher", f"{taught.latest:.4f}", before, note=f"nats a token; it teaches {signal}")
