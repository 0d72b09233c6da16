"""The lower part of the report page: attempts, plan and configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.planning import exactness
from gspo_hpc.planning.quantities import quantity_text
from gspo_hpc.report.summary import tone, when
from gspo_hpc.runs.reader import AttemptView, RunData
from gspo_hpc.system.text import duration

LONGEST_DETAIL = 500  # characters of the reason for which an attempt ended
LONGEST_VALUE = 2000  # characters of a setting


@dataclass(frozen=True)
class AttemptRow:
    """One line of the table of attempts. `left` and `width` are shares of the time axis; None without a start."""

    number: int
    left: float | None
    width: float
    tone: str
    started: str
    took: str
    steps: str
    host: str
    why: str


@dataclass(frozen=True)
class Row:
    """A name and a value, as text; `default` values are shown in grey."""

    name: str
    value: str
    default: bool = False


@dataclass(frozen=True)
class Group:
    """A titled list of names and values."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Plan:
    """Batch, layout and passes of plan.json, and its warnings and notes."""

    groups: tuple[Group, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """The resolved configuration, and how many of its values differ from the defaults."""

    groups: tuple[Group, ...]
    changed: int


def attempts(run: RunData) -> list[AttemptRow]:
    """Return the attempts, placed on one time axis from the first start to the last end."""
    starts = [one.started for one in run.attempts if one.started is not None]
    ends = [time for one in run.attempts for time in (one.started, one.ended) if time is not None]
    begin = min(starts, default=0.0)
    length = max(max(ends, default=1.0) - begin, 1e-9)
    return [_attempt(one, begin, length) for one in run.attempts]


def _attempt(one: AttemptView, begin: float, length: float) -> AttemptRow:
    return AttemptRow(
        number=one.number,
        left=None if one.started is None else (one.started - begin) / length,
        width=(one.seconds or 0.0) / length,
        tone=tone(one.reason),
        started="–" if one.started is None else when(one.started),
        took="–" if one.seconds is None else duration(one.seconds),
        steps="–" if one.steps is None else f"{one.steps[0]}–{one.steps[1]}",
        host=one.where,
        why=one.reason + (f": {one.detail[:LONGEST_DETAIL]}" if one.detail else ""),
    )


def plan(run: RunData) -> Plan:
    """Return what plan.json says, as far as it can be read."""
    groups = [
        Group(title, tuple(Row(str(name), _quantity(inner)) for name, inner in run.plan[key].items()))
        for title, key in (("Batch", "quantities"), ("Layout", "layout"))
        if isinstance(run.plan.get(key), Mapping)
    ]
    passes = run.plan.get("passes")
    if isinstance(passes, Mapping):
        rows = tuple(Row(str(name), _pass(one)) for name, one in passes.items() if isinstance(one, Mapping))
        groups.append(Group("Passes over the model", rows))
    if run.config is not None:
        groups.append(_exactness(run.config))
    lists = [run.plan.get(key) for key in ("warnings", "notes")]
    remarks = [text for one in lists if isinstance(one, list) for text in one if isinstance(text, str)]
    return Plan(tuple(groups), tuple(remarks))


def _exactness(config: Config) -> Group:
    found = exactness.assess(config)
    rows = [("grade", found.grade), ("means", found.meaning)]
    rows += [("because", reason) for reason in found.reasons]
    rows += [(exactness.TO_RAISE, " ".join(found.settings))] if found.settings else []
    rows += [("cost", found.cost)] if found.cost else []
    return Group("Exactness", tuple(Row(name, text) for name, text in rows))


def _pass(one: Mapping[str, Any]) -> str:
    if not one.get("needed"):
        return "not needed"
    for key, unit in (("micro_batch_size", "completions"), ("micro_batch_tokens", "tokens")):
        if one.get(key):
            return f"{one[key]} {unit} per micro-batch"
    return "needed"


def settings(run: RunData) -> Settings:
    """Return the configuration that the run resolved to, without secrets."""
    sections = run.settings()
    groups = tuple(
        Group(section, tuple(Row(key, _shown(inner), default) for key, inner, default in rows))
        for section, rows in sections.items()
    )
    return Settings(groups, sum(not row.default for group in groups for row in group.rows))


def _quantity(inner: Any) -> str:
    return quantity_text(inner) if isinstance(inner, float) else _shown(inner)


def _shown(inner: Any) -> str:
    if inner is None:
        return "–"
    if isinstance(inner, bool):
        return "yes" if inner else "no"
    if isinstance(inner, int) and abs(inner) >= 10000:
        return f"{inner:,}"
    if isinstance(inner, (dict, list, tuple)):
        return json.dumps(inner, ensure_ascii=False, default=str)[:LONGEST_VALUE] if inner else "–"
    return str(inner)[:LONGEST_VALUE]
