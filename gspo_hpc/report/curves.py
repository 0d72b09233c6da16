"""The choice of curves that the report shows, and how each is drawn."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_hpc.config.constants import PHASES
from gspo_hpc.config.derived import gap_limits
from gspo_hpc.data.outcomes import OUTCOMES
from gspo_hpc.report.charts import Chart, Drawn, Line, ReadOut, line_chart, stacked_bars
from gspo_hpc.report.scales import Values, moving_average
from gspo_hpc.runs.reader import RunData, value

PHASE_NAMES = {
    **{"reward_wait": "waiting for rewards", "reward_model": "reward models"},
    **{"old_logprobs": "old log-probs", "eval": "evaluation"},
}
NARROW, WIDE, FULL = 400, 824, 1248  # pixels of one, two and three columns; the text of all is then equally large
FEW_STEPS = 12  # fewer steps than this are shown without a moving average


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend: a name, its colour and its share of the whole as text."""

    name: str
    color: str
    share: str


@dataclass(frozen=True)
class Figure:
    """A chart with its caption.

    `size` is "", "wide" or "full": one, two or three columns. A figure of several columns is also drawn for one, as
    `narrow`, for a screen that has no room for more.
    """

    key: str
    title: str
    note: str
    size: str
    drawn: Drawn
    narrow: Drawn | None
    legend: tuple[Key, ...] = ()


def figures(run: RunData) -> list[Figure]:
    """Return the charts of the page in order; none before the first optimizer step."""
    if not run.train_records:
        return []
    return [*(_figure(chart, line_chart) for chart in _charts(run)), *_phases(run)]


def readouts(found: Sequence[Figure]) -> dict[str, ReadOut]:
    """Return the read-outs of all charts that have values, by the name that the templates give to the plot."""
    named = [(one.key, one.drawn) for one in found]
    named += [(f"{one.key}-narrow", one.narrow) for one in found if one.narrow is not None]
    return {name: drawn.readout for name, drawn in named if drawn.readout is not None}


def _figure(chart: Chart, draw: Callable[[Chart], Drawn], legend: tuple[Key, ...] = ()) -> Figure:
    size = {WIDE: "wide", FULL: "full"}.get(chart.width, "")
    narrow = draw(replace(chart, width=NARROW, height=Chart.height)) if size else None
    return Figure(chart.key, chart.title, chart.note, size, draw(chart), narrow, legend)


def _charts(run: RunData) -> list[Chart]:
    records = run.train_records
    steps = [record["step"] for record in records]
    marks = [
        later["step"]
        for earlier, later in itertools.pairwise(records)
        if earlier.get("attempt") != later.get("attempt")
    ]
    updates = 1 + int(max((value(record, "update") or 0.0 for record in records[-50:]), default=0.0))

    def curve(key: str) -> list[float | None]:
        return [value(record, key) for record in records]

    def smooth(key: str) -> list[Line]:
        """Return the values as a faint line and their moving average; of few steps, the values alone."""
        values = curve(key)
        if len(steps) < FEW_STEPS:
            return [Line("each step", values)]
        window = max(3, min(25, len(steps) // 8))
        window = math.ceil(window / updates) * updates  # whole rollouts: the first update of each is unlike the others
        averages = _keep_gaps(values, moving_average(values, window))
        return [Line("each step", values, faint=True), Line(f"mean of {window}", averages)]

    def chart(key: str, title: str, note: str, lines: list[Line], **how: Any) -> Chart:
        return Chart(key, title, note, steps, lines, marks=marks, from_zero=True, **how)

    taught = run.config is not None and run.config.algorithm.has_teacher
    divergences = [
        Line("old policy", curve("approx_kl"), "accent"),
        Line("teacher" if taught else "reference", curve("reference_kl"), "second"),
    ]
    divergences = [line for line in divergences if any(one is not None for one in line.values)]
    charts = [
        *_rewards(run, steps, marks, smooth("reward")),
        *_evaluation_sets(run),
        *(
            chart(f"reward-{place}", f"Reward: {name}", _weight(run, name), smooth(f"reward/{name}"))
            for place, name in enumerate(_reward_functions(run))
        ),
        *(
            chart(f"outcome-{place}", f"Outcomes: {name}", "shares of the step's completions", lines)
            for place, (name, lines) in enumerate(_outcomes(run, curve).items())
        ),
        *_sources(run, chart, curve),
        chart("length", "Response length", "mean tokens per completion", smooth("response_length")),
        chart("truncated", "Truncated completions", "share that were cut off", smooth("truncated_fraction")),
        chart("entropy", "Entropy", "nats per token", smooth("entropy")),
        chart("kl", "KL divergence", "of the policy from others, nats per token", divergences),
        chart("grad", "Gradient norm", "before clipping", smooth("grad_norm"), logarithmic=True),
        chart("lr", "Learning rate", "of each optimizer step", [Line("learning rate", curve("lr"))]),
        chart("clip", "Clip fraction", "share of importance ratios that were clipped", smooth("clip_fraction")),
        _gap(run, chart, curve),
        chart("speed", "Completion tokens per second", "over the whole step", smooth("completion_tokens_per_s")),
        chart(
            "signal", "Groups without a signal", "groups whose rewards are all equal", smooth("zero_variance_groups")
        ),
    ]
    return [one for one in charts if any(inner is not None for line in one.lines for inner in line.values)]


def _reward_functions(run: RunData) -> list[str]:
    """Return the reward functions that have a curve of their own: none if there is one, which is the whole reward."""
    prefix = "reward/"
    names = {key.removeprefix(prefix) for record in run.train_records for key in record if key.startswith(prefix)}
    if len(names) == 1:
        (only,) = names
        pairs = [(value(record, "reward"), value(record, prefix + only)) for record in run.train_records]
        if all(part is None or part == whole for whole, part in pairs):
            return []
    return sorted(names)


def _outcomes(run: RunData, curve: Callable[[str], list[float | None]]) -> dict[str, list[Line]]:
    """Return the lines of the outcomes of each reward function that has some; no line is zero everywhere."""
    prefix = "reward_outcome/"
    keys = sorted({key for record in run.train_records for key in record if key.startswith(prefix)})
    colors: dict[str, str] = dict(
        zip(OUTCOMES, ("accent", "second", "third", "p3", "p5", "p6", "p7", "p1", "p8", "p4"), strict=True)
    )
    found: dict[str, list[Line]] = {}
    for key in keys:
        name, _, outcome = key.removeprefix(prefix).rpartition("/")
        if any(curve(key)):
            found.setdefault(name, []).append(Line(outcome.replace("_", " "), curve(key), colors.get(outcome, "p7")))
    return found


def _sources(run: RunData, chart: Callable[..., Chart], curve: Callable[[str], list[float | None]]) -> list[Chart]:
    """Return what differs between sources of prompts, a line for each of them; nothing where there are no sources."""
    sources = () if run.config is None else run.config.data.sources
    colors = ("accent", "second", "third", *(f"p{number}" for number in range(3, 8)))
    return [
        chart(
            f"source-{metric}",
            f"{title} by source",
            note,
            [Line(one.name, curve(f"source/{one.name}/{metric}"), next(color)) for one in sources],
        )
        for metric, title, note in (
            ("reward", "Reward", "mean over the step's completions of a source"),
            ("accuracy", "Right answers", "share of the step's completions of a source"),
            ("no_signal_fraction", "Groups without a signal", "share of a source's groups whose rewards are all equal"),
            ("response_length", "Response length", "mean tokens per completion of a source"),
        )
        if (color := itertools.cycle(colors))
    ]


def _evaluation_sets(run: RunData) -> list[Chart]:
    """Return the accuracy on each set of unseen prompts that has a name; nothing where there are none."""
    records = [record for record in run.records if "eval/accuracy" in record]
    names = dict.fromkeys(
        key.split("/")[1] for record in records for key in record if re.fullmatch(r"eval/[^/]+/accuracy", key)
    )
    colors = itertools.cycle(("accent", "second", "third", *(f"p{number}" for number in range(3, 8))))
    lines = [
        Line(name, [value(record, f"eval/{name}/accuracy") for record in records], color, points=True)
        for name, color in zip(names, colors, strict=False)
    ]
    note, steps = "greedy decoding on the unseen prompts of each set", [record["step"] for record in records]
    return [Chart("accuracy-by-set", "Accuracy by set", note, steps, lines, from_zero=True)] if lines else []


def _weight(run: RunData, name: str) -> str:
    """Return the note of a reward function's curve, with its weight where the config has one function of the name."""
    functions = () if run.config is None else run.config.reward.functions
    weights = [one.weight for one in functions if one.function.rpartition(":")[2] == name]
    return f"mean, before its weight of {weights[0]:g}" if len(weights) == 1 else "mean, before its weight"


def _rewards(run: RunData, steps: Sequence[int], marks: Sequence[int], lines: list[Line]) -> list[Chart]:
    """Return reward and accuracy on one axis if both are shares between 0 and 1, else as two charts."""
    known = [one for line in lines for one in line.values if one is not None]
    note, also = "mean over the step's completions", "greedy decoding on unseen prompts"
    shares = dict(run.accuracy)
    if shares and not all(-0.05 <= one <= 1.05 for one in known):
        accuracy = Line("accuracy", list(shares.values()), "second", points=True)
        return [
            Chart("reward", "Reward", note, steps, lines, marks=marks, width=WIDE),
            Chart("accuracy", "Accuracy", also, list(shares), [accuracy]),
        ]
    if shares:
        steps = sorted({*steps, *shares})
        places = {step: index for index, step in enumerate(steps)}

        def spread(values: Values) -> list[float | None]:
            result: list[float | None] = [None] * len(steps)
            for record, one in zip(run.train_records, values, strict=True):
                result[places[record["step"]]] = one
            return result

        lines = [Line(line.name, spread(line.values), line.color, line.faint) for line in lines]
        lines[-1] = Line("reward", lines[-1].values)
        lines.append(Line("accuracy", [shares.get(step) for step in steps], "second", points=True))
        note = f"reward: {note}; accuracy: {also}"
    return [Chart("reward", "Reward", note, steps, lines, marks=marks, width=WIDE)]


def _gap(run: RunData, chart: Callable[..., Chart], curve: Callable[[str], list[float | None]]) -> Chart:
    """Return the differences between the log-probs of engine and trainer, and those of the probe with their limit."""
    limits = None if run.config is None else gap_limits(run.config)
    weighted = limits is not None and limits.weighted
    limit = None if limits is None else limits.mean if weighted else limits.max
    lines = [
        Line("max", curve("logprob_gap_max"), "accent"),
        Line("mean", curve("logprob_gap_mean"), "third"),
        Line("probe", curve("probe_logprob_gap_weighted" if weighted else "probe_logprob_gap_max"), "second"),
    ]
    lines = [line for line in lines if any(one is not None for one in line.values)]
    note = "absolute difference of log-probs per token"
    return chart("gap", "Engine against trainer", note, lines, logarithmic=True, limit=limit)


def _phases(run: RunData) -> list[Figure]:
    """Return the seconds of each phase, stacked; time that no phase accounts for is `other`. Empty without any time."""
    records = run.train_records
    seconds = {phase: [value(record, f"seconds/{phase}") or 0.0 for record in records] for phase in PHASES}
    both = zip(seconds["generate"], seconds["reward_wait"], strict=True)
    seconds["generate"] = [max(0.0, whole - waited) for whole, waited in both]  # its seconds include those of the wait
    parts: dict[str, list[float | None]] = {PHASE_NAMES.get(phase, phase): [*seconds[phase]] for phase in PHASES}
    known = [math.fsum(one or 0.0 for one in column) for column in zip(*parts.values(), strict=True)]
    whole = [value(record, "seconds") or 0.0 for record in records]
    parts["other"] = [max(0.0, total - sure) for total, sure in zip(whole, known, strict=True)]
    scored = PHASE_NAMES["reward_model"]  # which few runs have: the last colour is its own
    colors = {name: f"p{index}" for index, name in enumerate(sorted(parts, key=lambda name: name == scored))}
    sums = {name: math.fsum(one or 0.0 for one in values) for name, values in parts.items()}
    total = math.fsum(sums.values())
    if total <= 0:
        return []
    shown = {name: color for name, color in colors.items() if sums[name] / total >= 0.001}
    chart = Chart(
        "phases",
        "Where the time goes",
        "seconds per step, by phase",
        [record["step"] for record in records],
        [Line(name, parts[name], color) for name, color in shown.items()],
        unit="s",
        width=FULL,
        height=220,
    )
    shares = {name: sums[name] / total for name in shown}
    legend = tuple(
        Key(name, color, f"{shares[name]:.0%}" if shares[name] >= 0.005 else "<1%") for name, color in shown.items()
    )
    return [_figure(chart, stacked_bars, legend)]


def _keep_gaps(values: Values, averages: Values) -> list[float | None]:
    """Return the averages at the steps that have a value: a gap stays a gap."""
    return [average if present is not None else None for present, average in zip(values, averages, strict=True)]
