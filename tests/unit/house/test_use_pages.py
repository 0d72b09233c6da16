"""The pages about reports, trackers and evaluation name every setting of their sections.

It takes a tenth of a second. It catches a tracker, or a setting of evaluations, that no page explains.
"""

from __future__ import annotations

import pytest

from gspo_hpc.config.learning import Eval, Tracking
from gspo_hpc.config.section import Section
from tests import pages


def not_named(section: type[Section], name: str, text: str) -> list[str]:
    """The settings of a section that a page does not name in backticks."""
    found = {word for span in pages.spans(text) for word in span.replace("=", " ").split()}
    return [key for key in section.model_fields if f"{name}.{key}" not in found]


@pytest.mark.parametrize(("page", "section", "name"), [("report", Tracking, "tracking"), ("evaluation", Eval, "eval")])
def test_a_page_names_every_setting_of_its_section(page: str, section: type[Section], name: str) -> None:
    assert not_named(section, name, (pages.PROJECT / "docs" / f"{page}.md").read_text("utf-8")) == []


def test_a_planted_gap_is_found() -> None:
    text = "`eval.interval`, `eval.before`, `eval.after=true`, `eval.max_prompts`, `eval.samples`, `eval.temperature`"
    assert not_named(Eval, "eval", text) == ["reward"]
