"""The pages of recorded steps, one static file each, in a folder beside the report that links to them.

They need no server: a page carries its tokens, and refers to nothing but the report and its neighbours. Without a
script they show everything but the table of tokens.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.config.derived import old_logprobs_are_the_engines
from gspo_hpc.report.recorded import COLUMNS, StepRow, clip_range, group_view, row
from gspo_hpc.report.render import asset, render
from gspo_hpc.runs import sample_record
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.reader import RunData
from gspo_hpc.runs.sample_record import RecordedStep
from gspo_hpc.system.files import make_inner_dir, write_atomically

SHOWN = 20  # steps in the table of the report; more are behind a click
_OURS = re.compile(r"step-\d{6,}\.html")
_MARK = 'name="record" content="'
_HEAD = 1024  # bytes of a page in which its mark is


@dataclass(frozen=True)
class Recorded:
    """The section of the report about recorded steps, newest first."""

    columns: tuple[str, ...]
    newest: tuple[StepRow, ...]
    older: tuple[StepRow, ...]
    ended: str  # why nothing is recorded any more; empty otherwise


class StepPages:
    """The pages of the recorded steps of a run, beside its report.

    One that is kept between two reports, as `report --watch` does, reads the record again only when it has changed.
    """

    def __init__(self) -> None:
        self._seen: object = None  # what the pages were made from
        self._written: Recorded | None = None

    def write(self, run: RunData, report: Path) -> Recorded | None:
        """Write the pages, and return the section that links to them; None for a run without a record.

        Pages that are there and tell the same are left as they are.
        """
        record = RunDir(run.path).record
        state = (report, run.name, run.config, sample_record.state(record))
        if state != self._seen:
            self._written, self._seen = _write_steps(run, report, record), state
        return self._written


def _write_steps(run: RunData, report: Path, record: Path) -> Recorded | None:
    folder = report.with_name(f"{report.stem}_steps")
    rows: list[StepRow] = []
    for before, step, after in _neighbours(sample_record.steps(record)):
        make_inner_dir(folder)
        path = folder / _name(step.step)
        _write(path, run, report, step, (before, after))
        rows.append(row(step, f"{folder.name}/{path.name}"))
    _remove_others(folder, {Path(one.file).name for one in rows})
    if not rows:
        return None
    end = sample_record.end(record)
    ended = ""
    if end is not None and end.step > rows[-1].step:
        ended = (
            f"The record is full (tracking.record_mb {end.limit_mb:g}): nothing is recorded from step {end.step} on."
        )
    rows.reverse()
    return Recorded(COLUMNS, tuple(rows[:SHOWN]), tuple(rows[SHOWN:]), ended)


def _name(step: int) -> str:
    return f"step-{step:06d}.html"


def _neighbours(
    steps: Iterator[RecordedStep],
) -> Iterator[tuple[int | None, RecordedStep, int | None]]:
    """Yield each step with the numbers of the step before it and of the step after it."""
    before: int | None = None
    current = next(steps, None)
    while current is not None:
        after = next(steps, None)
        yield before, current, None if after is None else after.step
        before, current = current.step, after


def _write(path: Path, run: RunData, report: Path, step: RecordedStep, around: Sequence[int | None]) -> None:
    script, style, clip = asset("step.js"), asset("report.css"), clip_range(run.config)
    engines = run.config is not None and old_logprobs_are_the_engines(run.config)
    told = repr((run.name, report.name, step, tuple(around), clip, engines, script, style))
    mark = f"{zlib.crc32(told.encode('utf-8', 'replace')):08x}"
    if _marked(path) == mark:
        return
    first = step.groups[0]
    content = render(
        "step.html.j2",
        style=style,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        mark=mark,
        run_name=run.name,
        report=report.name,
        step=step.step,
        rollout=first.rollout,
        update=first.update,
        around=[None if one is None else (one, _name(one)) for one in around],
        groups=[group_view(group, clip) for group in step.groups],
        clip=clip,
        engines=engines,
    )
    write_atomically(path, content)


def _marked(path: Path) -> str:
    """Return the mark of a page that is there; empty for none."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD).decode("utf-8", "replace")
    except OSError:
        return ""
    return head.partition(_MARK)[2].partition('"')[0]


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove the pages of steps that the record no longer has: a run that resumed makes them again, or not."""
    for path in folder.glob("step-*.html") if folder.is_dir() else ():
        if path.name not in names and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
