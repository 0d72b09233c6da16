"""The console of a run: one aligned row a step, and a progress bar within a rollout.

rich is imported only for a terminal. Elsewhere (a Slurm log, a pipe) everything is plain lines without any control
character. A terminal that goes away never costs the run: output that cannot be written is dropped.
"""

from __future__ import annotations

import os
import statistics
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TextIO

from gspo_hpc.config.derived import rewards_count
from gspo_hpc.config.schema import Config
from gspo_hpc.runs import console_columns
from gspo_hpc.runs.console_columns import Column
from gspo_hpc.system.terminal import pasteable
from gspo_hpc.system.text import duration
from gspo_hpc.training.telemetry.lenient_stream import LenientStream
from gspo_hpc.training.telemetry.numbers import count, fixed, number, short
from gspo_hpc.training.telemetry.remarks import Remarks, is_overclipped

PLAIN_WIDTH = 110  # columns of a row where there is no terminal to ask
ROWS_PER_HEADER = 20
PLAIN_PROGRESS_SECONDS = 60.0  # between the lines of a long rollout, in plain mode
WINDOW = 15  # rollouts that the time left is estimated from


class Bar(Protocol):
    """The progress of one rollout."""

    def advance(self, n: int, tokens: int) -> None:
        """Add `n` finished completions and `tokens` sampled tokens."""


class Console:
    """The console of one run.

    `stream` is where to write; `total_steps` is the step the run ends at (0: unknown). `plain` None means: plain unless
    `stream` is a terminal that understands cursor movement. `kept` gets every line, too, without colour and bars: what
    ``gspo-hpc logs`` shows later. `columns` are those of the table (console_columns.of_run), which a run with a teacher
    has others of. `remarks` say what is wrong below a row; those of the run's config know more.
    """

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        plain: bool | None = None,
        kept: TextIO | None = None,
        columns: Sequence[Column] = console_columns.of_run(teacher=False, rewards=True),
        remarks: Remarks | None = None,
    ) -> None:
        self.stream = LenientStream(stream)
        self._kept = None if kept is None else LenientStream(kept)
        self.total_steps = total_steps
        self.plain = not _is_terminal(stream) if plain is None else plain
        widest = max(6, len(f"{total_steps}/{total_steps}") + 1)
        self._columns = (replace(columns[0], width=widest), *columns[1:])
        self._rows = 0
        self._titles: tuple[str, ...] = ()
        self._rollouts: dict[int, list[float]] = {}  # seconds of the steps of the latest rollouts
        self._remarks = remarks or Remarks()
        self._rich = None if self.plain else _terminal(self.stream)

    @classmethod
    def of(cls, config: Config, stream: TextIO, kept: TextIO | None) -> Console:
        """Return the console of a run by its config."""
        columns = console_columns.of_run(teacher=config.algorithm.has_teacher, rewards=bool(rewards_count(config)))
        return cls(stream, config.run.max_steps or 0, kept=kept, columns=columns, remarks=Remarks(config))

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
        """Print what the run is, at its start; the first line is its title."""
        for index, line in enumerate(lines):
            self._print(line, "bold" if index == 0 else "")

    def note(self, text: str) -> None:
        """Print something worth a line."""
        self._print(pasteable(text), "dim")

    def warn(self, text: str) -> None:
        """Print something that should not be overlooked."""
        self._print(f"warning: {pasteable(text)}", "yellow")

    def step(self, record: Mapping[str, Any]) -> None:
        """Print one row of the table; a record without a reward and without a loss (an evaluation) has no row."""
        if "reward" not in record and "loss" not in record:
            return
        cells = self._cells(record)
        columns = _fitting(self._columns, self.width)
        titles = tuple(column.title for column in columns)
        if self._rows % ROWS_PER_HEADER == 0 or titles != self._titles:
            self._print("".join(f"{column.title:>{column.width}}" for column in columns), "bold")
            self._rows, self._titles = 0, titles
        self._rows += 1
        bad = {"step": bool(record.get("skipped")), "reward": cells["reward"].endswith(("!", "-"))}
        bad |= {"clip": cells["clip"].endswith("!"), "grad": bool(record.get("skipped"))}
        bad["teacher"] = cells["teacher"] == "-"
        row = [(f"{cells[column.title]:>{column.width}}", "red" * bad.get(column.title, False)) for column in columns]
        self._print_row(row)
        if remark := self._remarks.of(record):
            self._print(f"{'':>{self._columns[0].width}}  ^ {remark}", "yellow")

    @contextmanager
    def rollout(self, rollout: int, total: int) -> Iterator[Bar]:
        """Show the progress of one rollout of `total` completions: a bar on a terminal, else a line now and then."""
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
            self._keep(line)
        self.stream.flush()

    def _print_row(self, row: Sequence[tuple[str, str]]) -> None:
        """Print one line of cells with their colours; a cell that outgrows its column must not make a second line."""
        text = "".join(cell for cell, _ in row)[: self.width]
        if self._rich is None or not any(colour for _, colour in row):
            self._print(text, "")
            return
        from rich.text import Text

        line = Text.assemble(*((clean(cell), colour) for cell, colour in row))
        line.truncate(self.width)
        self._rich(self.width).print(line, soft_wrap=True)
        self._keep(text)
        self.stream.flush()

    def _keep(self, line: str) -> None:
        if self._kept is not None:
            self._kept.write(clean(line).rstrip() + "\n")
            self._kept.flush()

    def _cells(self, record: Mapping[str, Any]) -> dict[str, str]:
        step = record.get("step")
        self._clock(record)
        logprobs = [number(record, f"seconds/{name}") for name in ("old_logprobs", "reference")]
        known = [value for value in logprobs if value is not None]
        clipped = number(record, "clip_fraction")
        return {
            "step": f"{step}/{self.total_steps}" if self.total_steps else str(step),
            "reward": fixed(number(record, "reward"), 3) + "!" * bool(record.get("empty")),
            "teacher": short(number(record, "reference_kl")),
            "length": fixed(number(record, "response_length"), 1),
            "clip": fixed(clipped, 2, 5) + ("!" if is_overclipped(clipped) else ""),
            "gap": short(number(record, "logprob_gap_max")),
            "grad": short(number(record, "grad_norm")),
            "entropy": fixed(number(record, "entropy"), 3),
            "generate": fixed(number(record, "seconds/generate"), 1),
            "logprobs": fixed(sum(known) if known else None, 1),
            "update": fixed(number(record, "seconds/update"), 1),
            "sync": fixed(number(record, "seconds/sync"), 1, 4),
            "seconds": fixed(number(record, "seconds"), 1),
            "tok/s": count(number(record, "completion_tokens_per_s", "tokens_per_s")),
            "left": self._left(step),
        }

    def _clock(self, record: Mapping[str, Any]) -> None:
        seconds = number(record, "seconds")
        if seconds is None:
            return
        self._rollouts.setdefault(int(record.get("rollout", record.get("step", 0))), []).append(seconds)
        while len(self._rollouts) > WINDOW:
            del self._rollouts[next(iter(self._rollouts))]

    def _left(self, step: Any) -> str:
        """Return the time left: the median over rollouts of their seconds a step, times the steps to go.

        By rollouts, because the first update of a rollout carries the whole generation; the rollout under way is left
        out while there are others. The median does not mind an evaluation or a save.
        """
        if not self.total_steps or not isinstance(step, int) or not self._rollouts:
            return "-"
        means = [statistics.fmean(seconds) for seconds in self._rollouts.values()]
        return duration(statistics.median(means[:-1] or means) * max(0, self.total_steps - step))


class _PlainBar:
    """A line now and then, so that the log of a long rollout shows life."""

    def __init__(self, console: Console, rollout: int, total: int) -> None:
        self.console, self.rollout, self.total = console, rollout, total
        self.done = self.tokens = 0
        self.started = self.reported = time.monotonic()

    def advance(self, n: int, tokens: int) -> None:
        """Count, and print a line at most once in PLAIN_PROGRESS_SECONDS."""
        self.done += n
        self.tokens += tokens
        now = time.monotonic()
        if now - self.reported < PLAIN_PROGRESS_SECONDS:
            return
        self.reported = now
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
        self.progress.update(self.task, advance=n, rate=f"{count(rate)} tok/s")


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except ValueError:
        return False


def _terminal(stream: LenientStream) -> Any:
    """Return a function from a width to a rich console of that width on `stream`."""
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
    """Return the columns that fit into `width`, in their order; the most telling ones stay longest."""
    chosen: list[Column] = []
    room = width
    for column in sorted(columns, key=lambda column: column.rank):
        if column.width > room:
            break
        chosen.append(column)
        room -= column.width
    return [column for column in columns if column in chosen]


def clean(text: str) -> str:
    """Return `text` without characters that move the cursor, change colours or reorder the line."""
    return "".join("?" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text.replace("\t", "    "))
