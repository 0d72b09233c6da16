"""The page that ``gspo-hpc status`` prints: a table on a terminal, a few lines per run into a pipe or a file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gspo_hpc.launch.status import ENDED, Status
from gspo_hpc.planning.exactness import TO_RAISE
from gspo_hpc.system.text import duration, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {"running": "green", "done": "green", "failed": "red", "refused": "red", "killed": "red", "damaged": "red"}
_CLEAR = "\033[2J\033[H"  # empties a terminal; the next line is its first


def show(states: Sequence[Status], stream: TextIO, *, clear: bool = False, sweep: Path | None = None) -> None:
    """Print the states of runs; with `clear` in place of what is on the terminal, below the time of day.

    Those of a `sweep` are always a table, below a line that counts them; runs are then named by their folders in it.
    """
    counts = Counter(state.shown for state in states)
    counted = ", ".join(f"{count} {state}" for state, count in counts.items())
    title = [] if sweep is None else [f"{sweep}: {len(states)} runs, {counted}"]
    if sweep is not None:
        states = [replace(state, run=Path(state.run).name) for state in states]
    elif not stream.isatty():
        print("\n".join(line for state in states for line in _plain(state)), file=stream, flush=True)
        return
    from rich.table import Table  # only here: a script that reads status needs no table

    from gspo_hpc.cli.pages.render import item, lines, text

    table = Table(box=None, pad_edge=False, header_style="dim")
    columns: dict[str, list[RenderableType]] = {
        "run": [text((state.run, "bold")) for state in states],
        "state": [text((state.shown, _colour(state))) for state in states],
        "step": [f"{state.step}{'' if state.max_steps is None else f' of {state.max_steps}'}" for state in states],
        "reward": ["" if state.reward is None else f"{state.reward:.3f}" for state in states],
        "accuracy": [_accuracy(state) for state in states],
        "from teacher": ["" if state.divergence is None else f"{state.divergence:.4f}" for state in states],
        "tokens/s": ["" if state.tokens_per_s is None else f"{state.tokens_per_s:,.0f}" for state in states],
        "spent": ["" if not state.seconds_spent else duration(state.seconds_spent) for state in states],
        "left": ["" if not _seconds_left(state) else duration(_seconds_left(state)) for state in states],
        "trains": [state.adapter or "" for state in states],
        "job": ["\n".join(_job(state)) for state in states],
        "exactness": [state.exactness or "" for state in states],
        "earlier attempts": [_ended(state) for state in states],
    }
    columns = {name: cells for name, cells in columns.items() if name in ("run", "state", "step") or any(cells)}
    for name in columns:
        number = name in ("step", "reward", "accuracy", "from teacher", "tokens/s", "spent", "left")
        whole, least = number or name == "state", {"run": 12, "earlier attempts": 8}.get(name)
        table.add_column(name, justify="right" if number else "left", no_wrap=whole, min_width=least, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    clock = [text((time.strftime("%H:%M:%S"), "dim"))] if clear else []
    told: dict[str, list[str]] = {}  # runs of which the same is said are named together
    for state in states:
        distils = f"distils {state.distils}" if state.distils else ""
        judges = f"asked of judges: {state.judges}" if state.judges else ""
        waits = f"waits for {state.waits_for}" if state.waits_for else ""
        graded = f"the latest evaluation was {state.not_graded}" if state.not_graded else ""
        for line in (state.reason, state.worry, graded, waits, distils, judges, *_further_jobs(state)):
            if line:
                told.setdefault(line, []).append(state.run)
    reasons = [
        part for reason, runs in told.items() for part in ("", text((", ".join(runs), "bold")), item("  ", reason))
    ]
    grades = dict.fromkeys((state.exactness or "", *_remedy(state)) for state in states)  # most runs have the same
    remedies = [item("  ", line) for grade, *found in grades if found for line in ("", f"{grade}:", *found)]
    page = lines([*clock, *title, table, *reasons, *remedies], stream)
    print(_CLEAR * clear + "\n".join(page), file=stream, flush=True)


def _plain(state: Status) -> Iterator[str]:
    """Yield the state of a run in a few lines."""
    total = "" if state.max_steps is None else f" of {state.max_steps}"
    worry = f", but {state.worry}" if state.worry else ""
    yield f"{state.run}: {state.state}{worry}" + (f" ({printable(state.reason)})" if state.reason else "")
    reward = "" if state.reward is None else f", reward {state.reward:.3f}"
    speed = "" if state.tokens_per_s is None else f", {state.tokens_per_s:,.0f} tokens/s"
    accuracy = _accuracy(state) and f", accuracy {_accuracy(state)}"
    yield f"  step {state.step}{total}{reward}{accuracy}{speed}"
    if state.not_graded:
        yield f"  the latest evaluation was {state.not_graded}"
    if state.seconds_spent:
        ago = (
            ""
            if state.seconds_since_step is None
            else f"; the latest was logged {duration(state.seconds_since_step)} ago"
        )
        yield f"  {duration(state.seconds_spent)} of steps so far{ago}"
    if state.adapter:
        yield f"  trains {state.adapter}"
    if state.distils:
        yield f"  distils {state.distils}"
    if state.judges:
        yield f"  asked of judges: {state.judges}"
    if state.waits_for:
        yield f"  waits for {printable(state.waits_for)}"
    if job := ", ".join(_job(state)):
        yield f"  job {job}"
    yield from (f"  {line}" for line in _further_jobs(state))
    if left := _seconds_left(state):
        yield f"  {duration(left)} left in the run{' once it is resumed' if state.state in ENDED else ''}"
    if state.exactness:
        yield f"  resumes exactly: {state.exactness}"
        yield from (f"    {text}" for text in _remedy(state))
    ended = _ended(state)
    yield f"  {state.attempts} attempt{'' if state.attempts == 1 else 's'}" + (f": {ended}" if ended else "")


def _accuracy(state: Status) -> str:
    if state.not_graded:
        return "not graded"
    return "" if state.accuracy is None else f"{state.accuracy:.3f}"


def _colour(state: Status) -> str:
    if state.worry:
        return "red" if state.learnt == "nothing" else "yellow"
    return _COLOURS.get(state.state, "yellow")


def _remedy(state: Status) -> list[str]:
    """Return which settings raise the grade of exactness, and what they cost; nothing if there are none."""
    if not state.exactness_settings:
        return []
    return [f"{TO_RAISE}: {' '.join(state.exactness_settings)}", *filter(None, [state.exactness_cost])]


def _seconds_left(state: Status) -> float:
    """Return the expected time to the end of the run; 0 if it is done, or not known."""
    return 0.0 if state.state == "done" else state.seconds_left_in_run or 0.0


def _job(state: Status) -> Iterator[str]:
    if state.job_id is not None:
        yield state.job_id + (f" on {state.nodes}" if state.nodes else "")
        if state.seconds_left_in_job is not None:
            yield f"{duration(state.seconds_left_in_job)} left in the job"


def _further_jobs(state: Status) -> Iterator[str]:
    """Yield where jobs serve a checkpoint, and which jobs evaluate one."""
    for one in state.served:
        where = f"{one['address']} on {one['node']}" if one["address"] else "an address that is not known yet"
        yield printable(f"served as {one['name']} at {where} (job {one['job_id']}, {one['state']})")
    for one in state.evaluating:
        place = f" on {one['node']}" if one["node"] else ""
        where = f"{one['state']}{place}; log: {one['log']}"
        yield printable(f"step {one['step']} is evaluated by job {one['job_id']} ({where})")


def _ended(state: Status) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in state.ended.items())
