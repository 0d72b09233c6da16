"""The comparison of several runs: one self-contained HTML page of the settings that differ, results and curves."""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_hpc.config import yaml_text
from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.config.section import written
from gspo_hpc.report.charts import Chart, Line, line_chart
from gspo_hpc.report.curves import Figure, readouts
from gspo_hpc.report.render import asset, render
from gspo_hpc.report.scales import moving_average, number
from gspo_hpc.report.summary import state, when
from gspo_hpc.runs.learning import course
from gspo_hpc.runs.reader import RunData, read_run, value
from gspo_hpc.system.files import write_atomically
from gspo_hpc.system.redact import redact

# Colours of runs: those that differ most come first.
_COLORS = ("p0", "p4", "p5", "p6", "p2", "p8", "p1", "p3", "p7")
DRAWN = len(_COLORS)  # runs that have curves
MOST = 64  # runs of a page
_CURVES = (  # key of metrics.jsonl, title, note
    ("reward", "Reward", "mean over the step's completions"),
    ("response_length", "Response length", "mean tokens per completion"),
    ("entropy", "Entropy", "nats per token"),
    ("clip_fraction", "Clip fraction", "share of importance ratios that were clipped"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("logprob_gap_max", "Engine against trainer", "largest difference of log-probs of a token"),
    ("completion_tokens_per_s", "Completion tokens per second", "over the whole step"),
)
_SMOOTHED = 20  # values that an average is made of at the most; an eighth of the steps at the least
_PLACES = ("run.name", "run.dir", "tracking.")  # differ between any two runs, and say nothing of what they learn


@dataclass(frozen=True)
class Compared:
    """One row of the table: a name, and a text for each run."""

    name: str
    cells: tuple[str, ...]


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page that compares these runs, and return its path.

    Raises ValueError for fewer than two runs or more than MOST, for a folder that is no run, and for an `out` that
    cannot be a file.
    """
    if not 2 <= len(run_dirs) <= MOST:
        more = ": name some of them" if len(run_dirs) > MOST else ""
        raise ValueError(f"--compare takes 2 to {MOST} runs; {len(run_dirs)} are given{more}")
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"{out}: {'is a directory' if out.is_dir() else f'there is no directory {out.parent}'}")
    write_atomically(out, page([read_run(Path(path)) for path in run_dirs]))
    return out


def page(runs: Sequence[RunData]) -> str:
    """Return the whole page, as text that can be encoded as UTF-8.

    Of more than DRAWN runs, those with the best results come first, and have curves.
    """
    if len(runs) > DRAWN:
        runs = sorted(runs, key=_result, reverse=True)
    names = _names(runs)
    drawn, script = list(_figures(runs, names)), asset("report.js")
    return render(
        "compare.html.j2",
        style=asset("report.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        names=names,
        drawn=names[:DRAWN],
        colors=_COLORS[: len(runs)],
        results=list(_results(runs)),
        settings=list(differences(runs)),
        figures=drawn,
        readouts={name: asdict(one) for name, one in readouts(drawn).items()},
        footer=[f"page written {when(datetime.now(UTC).timestamp())}"],
    )


def differences(runs: Sequence[RunData]) -> Iterator[Compared]:
    """Yield the settings in which runs differ, with the value of each; a run without a config has none."""
    flat = [{} if run.config is None else dict(_flat(run.config)) for run in runs]
    for key in dict.fromkeys(key for one in flat for key in one):
        cells = tuple(one.get(key, "") for one in flat)
        if len(set(cells)) > 1 and not key.startswith(_PLACES):
            yield Compared(key, cells)


def _flat(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting with its value as a config would have it; of reward functions what is not the default."""
    short = redact(config.model_dump(exclude_defaults=True, warnings=False))
    for name, section in redact(as_dict(config)).items():
        for key, given in section.items():
            if isinstance(given, dict):
                yield from ((f"{name}.{key}.{inner}", _text(one)) for inner, one in given.items())
            else:
                differs = short.get(name, {}).get(key, given)
                yield f"{name}.{key}", _text(differs if isinstance(given, list) else given)


def _text(value: Any) -> str:
    return yaml_text.write_line(value) if isinstance(value, (list, dict)) else written(value)


def _names(runs: Sequence[RunData]) -> list[str]:
    """Return the names of runs; where some have the same, the ends of their paths that tell these apart."""
    names = [run.name for run in runs]
    told, folders = names, [run.path.absolute().parts for run in runs]
    for depth in range(1, max(map(len, folders)) + 1):
        if len(set(told)) == len(told):
            return told
        ends = (str(Path(*parts[-depth:])) for parts in folders)
        told = [name if names.count(name) == 1 else end for name, end in zip(names, ends, strict=True)]
    return [f"{place} {name}" for place, name in enumerate(told, 1)]  # one run is given twice


def _results(runs: Sequence[RunData]) -> Iterator[Compared]:
    """Yield how each run went: state, steps, reward and accuracy at first and at last, speed."""
    yield Compared("state", tuple(map(state, runs)))
    totals = ("" if run.max_steps is None else f" of {run.max_steps}" for run in runs)
    yield Compared("steps", tuple(f"{run.steps}{total}" for run, total in zip(runs, totals, strict=True)))
    yield Compared("reward, first and last tenth of the rollouts", tuple(_reward(run) for run in runs))
    if any(run.accuracy or run.not_graded for run in runs):
        yield Compared("accuracy on unseen prompts", tuple(_accuracy(run) for run in runs))
    yield Compared("completion tokens per second", tuple(_typical(run, "completion_tokens_per_s") for run in runs))
    yield Compared("seconds of a step", tuple(_typical(run, "seconds") for run in runs))


def _result(run: RunData) -> tuple[float, float]:
    """Return the last accuracy on unseen prompts and the last reward, by which runs are ordered."""
    went = course(run.train_records)
    return run.accuracy[-1][1] if run.accuracy else -math.inf, -math.inf if went is None else went.last


def _reward(run: RunData) -> str:
    went = course(run.train_records)
    if went is None:
        return ""
    return number(went.last) if went.is_one else f"{number(went.first)} → {number(went.last)}"


def _accuracy(run: RunData) -> str:
    """Return the first and the last accuracy; why there is none, where the latest evaluation was not graded."""
    found = [(step, number(share)) for step, share in run.accuracy]
    told = [text for _, text in sorted([*found, *run.not_graded[-1:]])]
    return " → ".join(told if len(told) < 2 else (told[0], told[-1]))


def _typical(run: RunData, key: str) -> str:
    found = [one for record in run.train_records if (one := value(record, key)) is not None]
    return number(statistics.fmean(found)) if found else ""


def _figures(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Figure]:
    """Yield a chart for each curve, with a line for each run, over the steps that any run has."""
    steps = sorted({int(record["step"]) for run in runs for record in run.train_records})
    if not steps:
        return
    if any(run.accuracy for run in runs):
        at = sorted({step for run in runs for step, _ in run.accuracy})
        lines = [
            Line(name, [dict(run.accuracy).get(step) for step in at], color, points=True)
            for name, run, color in zip(names, runs, _COLORS, strict=False)
        ]
        yield _figure(
            Chart("accuracy", "Accuracy", "greedy decoding on unseen prompts", at, lines, from_zero=True, legend=True)
        )
    for key, title, note in _CURVES:
        lines = [
            Line(name, _smooth(run, key, steps), color) for name, run, color in zip(names, runs, _COLORS, strict=False)
        ]
        if any(one is not None for line in lines for one in line.values):
            logarithmic = key in ("grad_norm", "logprob_gap_max")
            yield _figure(Chart(key, title, note, steps, lines, from_zero=True, logarithmic=logarithmic, legend=True))


def _figure(chart: Chart) -> Figure:
    return Figure(chart.key, chart.title, chart.note, "", line_chart(chart), None)


def _smooth(run: RunData, key: str, steps: Sequence[int]) -> list[float | None]:
    """Return the moving average of a run's curve over all steps; steps that it has not are gaps."""
    records = run.train_records
    values = [value(record, key) for record in records]
    window = max(1, min(_SMOOTHED, len(values) // 8))
    averages = dict(zip((int(record["step"]) for record in records), moving_average(values, window), strict=True))
    known = {int(record["step"]) for record, one in zip(records, values, strict=True) if one is not None}
    return [averages.get(step) if step in known else None for step in steps]
