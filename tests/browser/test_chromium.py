"""The browser of these tests: what it does with a page that leaves while it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import Navigated, Tab

LEAVE = "document.title === 'second' || (location.href = 'second.html', new Promise(() => {}))"


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A page beside a second one."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.html").write_text(f"<!doctype html><title>{name}</title><p>{name}</p>")
    return tmp_path / "first.html"


def test_a_page_that_leaves_while_it_is_asked_is_asked_again(first: Path, tab: Tab) -> None:
    """An expression is asked of the next page; asked once, its answer never comes, which is an error."""
    tab.show(first)
    with pytest.raises(Navigated):
        tab.run(LEAVE)
    tab.show(first)
    tab.until(LEAVE)
    assert tab.run("document.title") == "second"
