"""Which curves the report shows, and how. Floor 6."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from gspo_hpc.charts import Chart, Drawn, Line, as_legend, line_chart, stacked_bars
from gspo_hpc.report_data import RunData, value
from gspo_hpc.report_samples import escape
from gspo_hpc.scales import Values, moving_average

GAP_LIMITS = {"float32": 1e-3}  # of rollout.probe_max_gap where it is not set
GAP_LIMIT_16_BIT = 0.5
PHASES = ("generate", "reward_wait", "old_logprobs", "reference", "update", "sync", "save", "eval")
PHASE_NAMES = {"reward_wait": "waiting for rewards", "old_logprobs": "old log-probs", "eval": "evaluation"}
WIDE, FULL = 824, 1248  # two and three columns of charts: their text is then as large as that of the others


def chart_section(run: RunData) -> tuple[str, dict[str, Any]]:
    """The charts as HTML, and the data of their read-outs by the key of the chart."""
    if not run.train_records:
        return '<p class="lead" style="margin-top:28px">No optimizer step has been logged yet.</p>', {}
    figures, data = [], {}
    charts = _charts(run)
    for chart in charts:
        drawn = line_chart(chart)
        figures.append(_figure(chart, drawn, "wide" if chart.width == WIDE else ""))
        data[chart.key] = drawn.data
    phases, legend = _phases(run)
    if phases is not None:
        drawn = stacked_bars(phases)
        figures.append(_figure(phases, drawn, "full", legend))
        data[phases.key] = drawn.data
    return f'<h2>Curves</h2><div class="charts">{"".join(figures)}</div>', data


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

    def smooth(key: str, color: str = "accent") -> list[Line]:
        """The values faintly, and their moving average on top; alone where there are few."""
        values = curve(key)
        if len(steps) < 12:
            return [Line("each step", values, color)]
        window = max(3, min(25, len(steps) // 8))
        window = math.ceil(window / updates) * updates  # whole rollouts: the first update of each is unlike the others
        return [
            Line("each step", values, color, faint=True),
            Line(f"mean of {window}", _where(values, moving_average(values, window)), color),
        ]

    def chart(key: str, title: str, note: str, lines: list[Line], **how: Any) -> Chart:
        return Chart(key, title, note, steps, lines, marks=marks, **how)

    charts = [
        *_rewards(run, steps, marks, smooth("reward")),
        chart("length", "Response length", "tokens a completion, mean", smooth("response_length"), from_zero=True),
        chart("entropy", "Entropy", "nats a token", smooth("entropy"), from_zero=True),
        chart("grad", "Gradient norm", "before clipping", smooth("grad_norm"), logarithmic=True, from_zero=True),
        chart("clip", "Clip fraction", "share of clipped ratios", smooth("clip_fraction"), from_zero=True),
        _gap(run, chart, curve),
        chart("speed", "Completion tokens per second", "whole step", smooth("completion_tokens_per_s"), from_zero=True),
        chart(
            "signal",
            "Groups without a signal",
            "all rewards of the group are equal",
            smooth("zero_variance_groups"),
            from_zero=True,
        ),
    ]
    return [one for one in charts if any(inner is not None for line in one.lines for inner in line.values)]


def _rewards(run: RunData, steps: Sequence[int], marks: Sequence[int], lines: list[Line]) -> list[Chart]:
    """Reward and the accuracy on unseen prompts: on one axis where both are shares, else apart."""
    known = [one for line in lines for one in line.values if one is not None]
    note, also = "mean of the step's completions", "accuracy by greedy decoding on unseen prompts"
    shares = dict(run.accuracy)
    if shares and not all(-0.05 <= one <= 1.05 for one in known):
        right = Line("accuracy", list(shares.values()), "second", points=True)
        return [
            Chart("reward", "Reward", note, steps, lines, marks=marks, width=WIDE),
            Chart("accuracy", "Accuracy", also, list(shares), [right]),
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
        note = f"{note}, and {also}"
    return [Chart("reward", "Reward", note, steps, lines, marks=marks, width=WIDE)]


def _gap(run: RunData, chart: Any, curve: Any) -> Chart:
    """Engine against trainer: the largest and mean difference of log-probs, and that of the probe with its limit."""
    limit = None
    if run.config is not None:
        given = run.config.rollout.probe_max_gap
        limit = given if given is not None else GAP_LIMITS.get(run.config.model.dtype, GAP_LIMIT_16_BIT)
    lines = [
        Line("max", curve("gap_max"), "accent"),
        Line("mean", curve("gap_mean"), "third"),
        Line("probe", curve("probe_gap_max"), "second"),
    ]
    lines = [line for line in lines if any(one is not None for one in line.values)]
    note = "difference of log-probs"
    built: Chart = chart(
        "gap", "Engine against trainer", note, lines, logarithmic=True, from_zero=True, limit=limit, limit_name="limit"
    )
    return built


def _phases(run: RunData) -> tuple[Chart | None, str]:
    """Seconds by phase, stacked; what no phase accounts for is `other`."""
    records = run.train_records
    parts: dict[str, list[float | None]] = {
        PHASE_NAMES.get(phase, phase): [value(record, f"seconds/{phase}") or 0.0 for record in records]
        for phase in PHASES
    }
    known = [math.fsum(one or 0.0 for one in column) for column in zip(*parts.values(), strict=True)]
    whole = [value(record, "seconds") or 0.0 for record in records]
    parts["other"] = [max(0.0, total - sure) for total, sure in zip(whole, known, strict=True)]
    colors = {name: f"p{index}" for index, name in enumerate(parts)}
    sums = {name: math.fsum(one or 0.0 for one in values) for name, values in parts.items()}
    total = math.fsum(sums.values())
    if total <= 0:
        return None, ""
    shown = {name: color for name, color in colors.items() if sums[name] / total >= 0.001}
    chart = Chart(
        "phases",
        "Where the time goes",
        "seconds a step, by phase",
        [record["step"] for record in records],
        [Line(name, parts[name], color) for name, color in shown.items()],
        unit="s",
        width=FULL,
        height=220,
    )
    return chart, as_legend(shown, {name: sums[name] / total for name in shown})


def _figure(chart: Chart, drawn: Drawn, kind: str, legend: str = "") -> str:
    keys = f'<div class="legend">{legend}</div>' if legend else ""
    return (
        f'<figure class="{kind}" data-chart="{chart.key}"><figcaption><h3>{escape(chart.title)}</h3>'
        f'<output></output><span class="note">{escape(chart.note)}</span>{keys}</figcaption>'
        f'<div class="plot">{drawn.svg}</div></figure>'
    )


def _where(values: Values, averages: Values) -> list[float | None]:
    """The averages where there is a value: a gap stays a gap."""
    return [average if present is not None else None for present, average in zip(values, averages, strict=True)]
