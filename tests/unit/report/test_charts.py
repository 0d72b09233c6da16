"""Charts and axes are well formed, within their frame and true to the values, whatever the values are."""

from __future__ import annotations

import itertools
import math
import random
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.report import charts
from gspo_hpc.report.charts import Chart, Line, line_chart, stacked_bars
from gspo_hpc.report.scales import Scale, gather, log_ticks, moving_average, nice_ticks, number, step_ticks

finite = st.floats(-1e299, 1e299, allow_nan=False)
values_ = st.lists(st.one_of(st.none(), finite, st.floats(0, 1), st.just(0.0)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=100)
@given(values_, st.booleans(), st.booleans(), st.one_of(st.none(), st.floats(1e-6, 1e3)))
def test_any_curve_stays_within_its_plot(
    values: list[float | None], logarithmic: bool, from_zero: bool, limit: float | None
) -> None:
    steps = list(range(3, 3 + len(values)))
    lines = [Line("a", values), Line("b", moving_average(values, 3), "second"), Line("c", values, points=True)]
    chart = Chart("k", "t", "n", steps, lines, limit=limit, logarithmic=logarithmic, from_zero=from_zero)
    drawn = line_chart(chart)
    ElementTree.fromstring(drawn.svg)  # well formed
    assert "nan" not in drawn.svg and "inf" not in drawn.svg
    if drawn.readout is None:
        assert all(value is None for value in values)
        return
    for series in drawn.readout.series:
        for at in series.y:
            assert at is None or charts.TOP <= at <= chart.height - charts.BOTTOM
    assert drawn.readout.x == sorted(drawn.readout.x)
    shown = drawn.readout.series[0].y
    known = [(value, at) for value, at in zip(values, shown, strict=True) if value is not None and at is not None]
    for one, at in known:  # larger is higher
        assert all(at <= other_at for other, other_at in known if other <= one)


@pytest.mark.parametrize("seed", range(5))
def test_bars_stack_to_the_total(seed: int) -> None:
    chance = random.Random(seed)
    columns = [[chance.choice([None, 0.0, chance.uniform(0, 100)]) for _ in range(150)] for _ in range(3)]
    drawn = stacked_bars(Chart("k", "t", "n", range(1, 151), [Line(str(i), one) for i, one in enumerate(columns)]))
    ElementTree.fromstring(drawn.svg)  # well formed
    assert drawn.readout is not None
    assert drawn.readout.steps == [f"{2 * index + 1}–{2 * index + 2}" for index in range(75)]  # two steps a bar
    for index, shown in enumerate(drawn.readout.series[-1].texts):
        whole = math.fsum(column[2 * index + at] or 0.0 for column in columns for at in (0, 1))
        assert shown == number(whole / 2)


def test_a_bar_is_as_high_as_its_value() -> None:
    drawn = stacked_bars(Chart("k", "t", "n", [1], [Line("a", [5.0], "p0"), Line("b", [15.0], "p1")]))
    tops = {
        color: (float(bottom), float(top))
        for bottom, top, color in re.findall(r'd="M[\d.]+ ([\d.]+)V([\d.]+)h.*?var\(--(\w+)\)', drawn.svg)
    }
    floor, ceiling = 188 - charts.BOTTOM, charts.TOP
    assert tops["p0"] == (floor, floor - (floor - ceiling) / 4)
    assert tops["p1"] == (tops["p0"][1], ceiling)


def test_a_gap_interrupts_the_line() -> None:
    drawn = line_chart(Chart("k", "t", "n", range(1, 8), [Line("a", [1, 2, None, 3, None, 4, 5])]))
    assert len(re.findall(r'<path class="line"', drawn.svg)) == 2
    assert drawn.svg.count("<circle") == 1  # the value between two gaps


@pytest.mark.parametrize("level", [0.0, 5.0, 10.0])
def test_labels_do_not_cover_each_other(level: float) -> None:
    lines = [Line(name, [level, level]) for name in "abcd"]
    drawn = line_chart(Chart("k", "t", "n", [1, 2], [*lines, Line("high", [10.0, 10.0]), Line("low", [0.0, 0.0])]))
    heights = sorted(float(y) for y in re.findall(r'class="label" x="[\d.]+" y="([\d.]+)"', drawn.svg))
    assert len(heights) == 6
    for earlier, later in itertools.pairwise(heights):
        assert later - earlier >= charts.LABEL_HEIGHT - 0.11
    assert heights[0] >= charts.TOP and heights[-1] <= 188 - charts.BOTTOM + 4


@pytest.mark.parametrize("width", [400, 824, 1248])
def test_labels_have_room_beside_the_plot(width: int) -> None:
    lines = [Line("accuracy", [0.1, 0.988], "second"), Line("reward", [0.1, 0.918])]
    svg = line_chart(Chart("k", "t", "n", [1, 2], lines, width=width)).svg
    ends = [float(x) for x in re.findall(r'class="axis" x1="[\d.]+" x2="([\d.]+)"', svg)]
    places = [(float(x), text) for x, text in re.findall(r'class="label" x="([\d.]+)"[^>]*>([^<]*)<', svg)]
    assert len(ends) == 1 and len(places) == 2
    for x, text in places:
        assert ends[0] < x and x + 7 * len(text) <= width  # DejaVu Sans Bold of 12 pixels, a wide font, has 7 a letter


def test_a_wide_chart_has_a_bar_for_each_step() -> None:
    line = Line("a", [float(step) for step in range(1, 201)])
    for width, bars in ((1248, 200), (400, 67)):
        drawn = stacked_bars(Chart("k", "t", "n", range(1, 201), [line], width=width))
        assert drawn.readout is not None and len(drawn.readout.steps) == bars


def test_names_are_escaped_in_the_picture() -> None:
    name = "<b onload='x'>&\""
    drawn = line_chart(Chart("k", name, "n", [1, 2], [Line(name, [1, 2]), Line("other", [2, 3])]))
    svg = ElementTree.fromstring(drawn.svg)
    assert svg.get("aria-label") == name
    assert any((text.text or "").startswith(name) for text in svg.iter("text"))
    assert svg.find(".//b") is None


def test_a_limit_is_shown_where_it_can_be() -> None:
    near = Chart("k", "t", "n", [1, 2], [Line("a", [1e-5, 2e-3])], limit=1e-3, logarithmic=True)
    far = Chart("k", "t", "n", [1, 2], [Line("a", [0.1, 0.2])], limit=50.0)
    assert 'class="limit"' in line_chart(near).svg
    assert 'class="limit"' not in line_chart(far).svg  # it would flatten the curve


def test_many_steps_are_gathered_and_spikes_stay() -> None:
    values: list[float | None] = [1.0] * 5000
    values[1234] = 100.0
    gathered = gather(range(1, 5001), values, 600)
    assert len(gathered.mean) <= 600 and gathered.first[0] == 1 and gathered.last[-1] == 5000
    assert max(one for one in gathered.high if one is not None) == 100.0
    assert math.isclose(
        sum((one or 0) * (b - a + 1) for one, a, b in zip(gathered.mean, gathered.first, gathered.last, strict=True)),
        5099,
    )
    drawn = line_chart(Chart("k", "t", "n", range(1, 5001), [Line("a", values)]))
    assert 'class="band"' in drawn.svg and len(drawn.svg) < 60_000


@given(finite, finite)
def test_ticks_are_round_few_and_cover(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-280):
        return
    ticks = nice_ticks(low, high, 4)
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step
    digits = f"{step:.6e}".split("e")[0].rstrip("0").rstrip(".")
    assert digits in ("1", "2", "2.5", "5")


def test_ticks_by_hand() -> None:
    assert nice_ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1.0]
    assert nice_ticks(0.42, 0.79, 4) == [0.4, 0.5, 0.6, 0.7, 0.8]
    assert step_ticks(1, 60) == [10, 20, 30, 40, 50, 60]
    assert step_ticks(7, 7) == [7]
    assert step_ticks(1, 2) == [1, 2]
    assert log_ticks(3e-6, 4e-4) == [1e-6, 1e-5, 1e-4, 1e-3]
    assert Scale(1.0, 100.0, 0.0, 200.0, logarithmic=True)(10.0) == 100.0
    assert Scale(0.0, 10.0, 100.0, 0.0)(2.5) == 75.0


@given(values_, st.integers(1, 10))
def test_moving_average_is_the_mean_of_the_latest_known(values: list[float | None], window: int) -> None:
    averages = moving_average(values, window)
    for index, average in enumerate(averages):
        known = [one for one in values[: index + 1] if one is not None][-window:]
        assert (average is None) == (not known)
        if average is not None:
            assert math.isclose(average, math.fsum(known) / len(known), rel_tol=1e-12, abs_tol=1e-300)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.8069, "0.807"),
        (0.5, "0.5"),
        (-0.25, "−0.25"),
        (12.345, "12.3"),
        (1234.0, "1,234"),
        (12345.0, "12.3k"),
        (1.25e6, "1.2M"),
        (3.14e-5, "3.1e−5"),
        (1e-4, "1e−4"),
        (100.0, "100"),
        (10.0, "10"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text
