"""The pages about reports, trackers, evaluation and cost name every setting of their sections, and figures of the code.

It takes a second. It catches a tracker, or a setting of evaluations, that no page explains, and a constant that changed
without its page.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from gspo_hpc.cli import parser
from gspo_hpc.config.learning import Eval, Tracking
from gspo_hpc.config.section import Section
from gspo_hpc.evaluation.scores import wilson_interval
from tests import pages
from tests.unit.house.test_figures import in_file


def points(total: int) -> float:
    """The width of the interval of an accuracy of one half, in points."""
    low, high = wilson_interval(total // 2, total)
    return round(100 * (high - low))


def every() -> float:
    """The default of report --every."""
    (action,) = [one for one in parser.parser_of("report")._actions if "--every" in one.option_strings]
    return float(action.default)


FIGURES: list[tuple[str, str, Callable[[], tuple[float, ...]]]] = [
    ("docs/report.md", r"again every (\d+) seconds", lambda: (every(),)),
    ("docs/evaluation.md", r"With (\d+) prompts it is about (\d+) points wide", lambda: (256, points(256))),
    (
        "docs/evaluation.md",
        r"gives it more than ([\d.]+)\.",
        lambda: in_file("gspo_hpc/evaluation/deciding.py", r"HALF = ([\d.]+)"),
    ),
    (
        "docs/cost.md",
        r"productive for ([\d.]+) % of its time",
        lambda: in_file("docs/reliability.md", r"\*\*([\d.]+)%\*\*"),
    ),
    (
        "docs/cost.md",
        r"here (\d+) in place of (\d+) seconds",
        lambda: in_file("docs/cost.md", r"(\d+) s a step \(\d+ to (\d+)\)")[::-1],
    ),
]


@pytest.mark.parametrize(("page", "pattern", "told"), FIGURES, ids=[f"{page}: {text}" for page, text, _ in FIGURES])
def test_a_figure_is_what_the_code_says(page: str, pattern: str, told: Callable[[], tuple[float, ...]]) -> None:
    assert in_file(page, pattern) == pytest.approx(told())


def not_named(section: type[Section], name: str, text: str) -> list[str]:
    """The settings of a section that a text names neither in backticks nor in a config."""
    found = {word for span in pages.spans(text) for word in span.replace("=", " ").split()}
    for block in pages.blocks(text, "yaml"):
        for part in re.findall(rf"(?m)^{name}:\n((?:  .*\n)+)", block):
            found |= {f"{name}.{key}" for key in re.findall(r"(?m)^  (\w+):", part)}
    return [key for key in section.model_fields if f"{name}.{key}" not in found]


@pytest.mark.parametrize(
    ("named", "section", "name"),
    [(("trackers", "report", "profiling"), Tracking, "tracking"), (("evaluation",), Eval, "eval")],
)
def test_pages_name_every_setting_of_their_section(named: tuple[str, ...], section: type[Section], name: str) -> None:
    text = "\n".join((pages.PROJECT / "docs" / f"{page}.md").read_text("utf-8") for page in named)
    assert not_named(section, name, text) == []


def test_a_planted_gap_is_found() -> None:
    text = "`eval.interval`, `eval.before`, `eval.after=true`, `eval.max_prompts`, `eval.samples`, `eval.temperature`"
    text += ", `eval.top_p`, `eval.top_k`, `eval.max_tokens`"
    assert not_named(Eval, "eval", text) == ["reward"]
    assert not_named(Eval, "eval", text + "\n\n```yaml\neval:\n  reward: a\n```\n") == []
