"""What a person sees while a run goes on: one aligned row a step, a progress bar within a rollout.

Floor 3, the home of rich, which is imported only for a terminal. Where the output is no terminal (a Slurm log, a pipe)
everything is plain lines without any control character. A terminal that goes away never costs the run: output that
cannot be written is dropped.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TextIO

PLAIN_WIDTH = 110  # columns of a row where there is no terminal to ask
ROWS_PER_HEADER = 20
PLAIN_PROGRESS_SECONDS = 60.0  # a long rollout says that it is alive this often, in plain mode
WINDOW = 15  # rollouts that the time left is estimated from


class Bar(Protocol):
    """The progress of one rollout."""

    def advance(self, n: int, tokens: int) -> None:
        """`n` more completions are finished, `tokens` more tokens were sampled."""


@dataclass(frozen=True)
class Column:
    """One column of the table. Lower `rank` survives longer on a narrow terminal."""

    title: str
    width: int
    rank: int


COLUMNS = (
    Column("step", 6, 0),  # wider where the number of steps needs it
    Column("reward", 7, 1),
    Column("length", 7, 3),
    Column("clip", 6, 4),
    Column("gap", 8, 5),
    Column("grad", 8, 10),
    Column("entropy", 8, 11),
    Column("generate", 9, 6),
    Column("logprobs", 9, 9),
    Column("update", 7, 7),
    Column("sync", 5, 8),
    Column("seconds", 8, 12),
    Column("tok/s", 7, 4),
    Column("left", 7, 2),
)


class Console:
    """The console of one run.

    `stream` is where to write; `total_steps` is the step the run ends at (0: unknown). `plain` None means: plain unless
    `stream` is a terminal that understands cursor movement.
    """

    def __init__(self, stream: TextIO, total_steps: int, plain: bool | None = None) -> None:
        self.stream = _Lenient(stream)
        self.total_steps = total_steps
        self.plain = not _is_terminal(stream) if plain is None else plain
        widest = max(6, len(f"{total_steps}/{total_steps}") + 1)
        self._columns = (replace(COLUMNS[0], width=widest), *COLUMNS[1:])
        self._rows = 0
        self._titles: tuple[str, ...] = ()
        self._rollouts: dict[int, list[float]] = {}  # seconds of the steps of the latest rollouts
        self._restarts = 0.0
        self._rich = None if self.plain else _terminal(self.stream)

    @property
    def width(self) -> int:
        """Columns of a line, as they are now: a terminal may be resized."""
        if self.plain:
            return PLAIN_WIDTH
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def header(self, lines: Sequence[str]) -> None:
        """What the run is, at its start; the first line is its title."""
        for index, line in enumerate(lines):
            self._print(line, "bold" if index == 0 else "")

    def note(self, text: str) -> None:
        """Something worth a line."""
        self._print(text, "dim")

    def warn(self, text: str) -> None:
        """Something that should not be overlooked."""
        self._print(f"warning: {text}", "yellow")

    def step(self, record: Mapping[str, Any]) -> None:
        """One row of the table. A record without a reward and without a loss (an evaluation) has no row."""
        if "reward" not in record and "loss" not in record:
            return
        cells = self._cells(record)
        columns = _fitting(self._columns, self.width)
        titles = tuple(column.title for column in columns)
        if self._rows % ROWS_PER_HEADER == 0 or titles != self._titles:
            self._print("".join(f"{column.title:>{column.width}}" for column in columns), "bold")
            self._rows, self._titles = 0, titles
        self._rows += 1
        row = "".join(f"{cells[column.title]:>{column.width}}" for column in columns)
        self._print(row[: self.width], "")  # a cell that outgrows its column must not make a second line
        if remark := self._remark(record):
            self._print(f"{'':>{self._columns[0].width}}  ^ {remark}", "yellow")

    @contextmanager
    def rollout(self, rollout: int, total: int) -> Iterator[Bar]:
        """The progress of one rollout of `total` completions: a bar on a terminal, a line now and then elsewhere."""
        if self._rich is None:
            yield _PlainBar(self, rollout, total)
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=self._rich(self.width),
            transient=True,  # the row of the step takes its place
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
            expand=True,
        )
        with progress:
            yield _RichBar(progress, progress.add_task(f"rollout {rollout}", total=total, rate=""))

    def _print(self, text: str, style: str) -> None:
        for line in text.splitlines() or [""]:
            line = clean(line)
            if self._rich is None:
                self.stream.write(line.rstrip() + "\n")
            else:
                from rich.text import Text

                self._rich(self.width).print(Text(line.rstrip(), style=style), soft_wrap=True)
        self.stream.flush()

    def _cells(self, record: Mapping[str, Any]) -> dict[str, str]:
        step = record.get("step")
        self._clock(record)
        logprobs = [_number(record, f"seconds/{name}") for name in ("old_logprobs", "reference")]
        known = [value for value in logprobs if value is not None]
        return {
            "step": f"{step}/{self.total_steps}" if self.total_steps else str(step),
            "reward": _fixed(_number(record, "reward"), 3),
            "length": _fixed(_number(record, "response_length"), 1),
            "clip": _fixed(_number(record, "clip_fraction"), 2, 5),
            "gap": _short(_number(record, "gap_max")),
            "grad": _short(_number(record, "grad_norm")),
            "entropy": _fixed(_number(record, "entropy"), 3),
            "generate": _fixed(_number(record, "seconds/generate"), 1),
            "logprobs": _fixed(sum(known) if known else None, 1),
            "update": _fixed(_number(record, "seconds/update"), 1),
            "sync": _fixed(_number(record, "seconds/sync"), 1, 4),
            "seconds": _fixed(_number(record, "seconds"), 1),
            "tok/s": _count(_number(record, "completion_tokens_per_s", "tokens_per_s")),
            "left": self._left(step),
        }

    def _clock(self, record: Mapping[str, Any]) -> None:
        seconds = _number(record, "seconds")
        if seconds is None:
            return
        self._rollouts.setdefault(int(record.get("rollout", record.get("step", 0))), []).append(seconds)
        while len(self._rollouts) > WINDOW:
            del self._rollouts[next(iter(self._rollouts))]

    def _left(self, step: Any) -> str:
        """Time left: the median over rollouts of their seconds a step, times the steps to go.

        By rollouts, because the first update of a rollout carries the whole generation; the rollout under way is left
        out while there are others. The median does not mind an evaluation or a save.
        """
        if not self.total_steps or not isinstance(step, int) or not self._rollouts:
            return "-"
        means = [statistics.fmean(seconds) for seconds in self._rollouts.values()]
        return duration(statistics.median(means[:-1] or means) * max(0, self.total_steps - step))

    def _remark(self, record: Mapping[str, Any]) -> str:
        remarks = []
        if record.get("skipped"):
            remarks.append("gradient not finite, step skipped")
        if failures := record.get("failures"):
            remarks.append(f"{failures} completion{'s' if failures != 1 else ''} whose grader failed")
        restarts = _number(record, "engine_restarts") or 0.0
        if restarts > self._restarts:
            remarks.append("an engine died and was restarted")
        self._restarts = restarts
        return "; ".join(remarks)


class _PlainBar:
    """A line now and then, so that the log of a long rollout shows life."""

    def __init__(self, console: Console, rollout: int, total: int) -> None:
        self.console, self.rollout, self.total = console, rollout, total
        self.done = self.tokens = 0
        self.started = self.said = time.monotonic()

    def advance(self, n: int, tokens: int) -> None:
        """Count, and say so at most once in PLAIN_PROGRESS_SECONDS."""
        self.done += n
        self.tokens += tokens
        now = time.monotonic()
        if now - self.said < PLAIN_PROGRESS_SECONDS:
            return
        self.said = now
        rate = self.tokens / (now - self.started)
        self.console.note(f"rollout {self.rollout}: {self.done}/{self.total} completions, {rate:.0f} tokens/s")


class _RichBar:
    """A bar on a terminal."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task
        self.tokens = 0
        self.started = time.monotonic()

    def advance(self, n: int, tokens: int) -> None:
        """Move the bar."""
        self.tokens += tokens
        rate = self.tokens / max(1e-3, time.monotonic() - self.started)
        self.progress.update(self.task, advance=n, rate=f"{_count(rate)} tok/s")


class _Lenient:
    """A text stream that drops what its terminal, gone or unable to encode it, does not take."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what the encoding has; the rest becomes `?`."""
        try:
            self.stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        except (OSError, ValueError):
            pass  # the terminal was closed; metrics.jsonl has every number
        return len(text)

    def flush(self) -> None:
        """Flush if there is still something to flush to."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            pass

    def fileno(self) -> int:
        """The stream's descriptor, for its size. Raises OSError if it has none."""
        return self.stream.fileno()

    def isatty(self) -> bool:
        """Asked by rich only for a stream that was found to be a terminal, or declared one."""
        return True


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except ValueError:
        return False


def _terminal(stream: _Lenient) -> Any:
    """A function from a width to a rich console of that width on `stream`."""
    import rich.console

    class Terminal(rich.console.Console):
        def show_cursor(self, show: bool = True) -> bool:
            """Leave the cursor alone: a run that is killed could not give it back."""
            return False

    consoles: dict[int, Terminal] = {}

    def of_width(width: int) -> Terminal:
        if width not in consoles:
            consoles[width] = Terminal(file=stream, width=width, force_terminal=True, highlight=False)  # type: ignore[arg-type]
        return consoles[width]

    return of_width


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit into `width`, in their order, the most telling first to stay."""
    chosen: list[Column] = []
    room = width
    for column in sorted(columns, key=lambda column: column.rank):
        if column.width > room:
            break
        chosen.append(column)
        room -= column.width
    return [column for column in columns if column in chosen]


def clean(text: str) -> str:
    """`text` without characters that move the cursor, change colours or reorder the line."""
    return "".join("?" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text.replace("\t", "    "))


def duration(seconds: float) -> str:
    """Seconds as 45s, 12m05s, 3h20m or 4d06h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 100 * 3600:
        return f"{whole // 3600}h{whole // 60 % 60:02d}m"
    days = whole // 86400
    return f"{days}d{whole // 3600 % 24:02d}h" if days < 100 else f"{days}d"


def _number(record: Mapping[str, Any], *keys: str) -> float | None:
    for key in keys:
        value = record.get(key)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    return None


def _fixed(value: float | None, digits: int, room: int = 6) -> str:
    """With `digits` decimals, or as many as `room` characters have place for."""
    if value is None:
        return "-"
    texts = (f"{value:.{count}f}" for count in range(digits, -1, -1))
    return next((text for text in texts if len(text) <= room), _count(value))


def _short(value: float | None) -> str:
    """Three digits, whatever the size: 0.123, 12.3, 4.5e-06."""
    if value is None:
        return "-"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:.1e}"


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000 if letter == 'k' else size):.1f}{letter}"
    return f"{value:.0f}"
