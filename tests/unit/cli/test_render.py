"""Pages as lines: nothing is lost, broken or interpreted, whatever the width and whatever the text."""

from __future__ import annotations

import io

import pytest

from gspo_hpc.cli.pages.render import grid, item, lines, text

PATH = "/projects/" + "a-very-long-name/" * 8 + "model.safetensors"
PROSE = "The learning rate of every group is halved before the next optimizer step begins, and it stays there."


@pytest.fixture(params=[60, 80, 120])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def test_user_text_is_shown_as_it_is_without_control_characters() -> None:
    given = "[bold]x[/bold] :smile: [link=y] 1.5 \x1b[31m\r"
    shown = "[bold]x[/bold] :smile: [link=y] 1.5 ?[31m?"
    parts = [text(given), item("  - ", given), grid([(given, "a")])]
    assert list(lines(parts)) == [shown, f"  - {shown}", f"  {shown}  a"]


def test_a_path_is_neither_cut_nor_broken(columns: int) -> None:
    assert len(PATH) > 120
    assert list(lines([text("diagnosis of ", (PATH, "bold"), ": 1 problem")])) == [f"diagnosis of {PATH}: 1 problem"]
    found = list(lines([item("  - ", f"{PROSE} {PATH} {PROSE}")]))
    assert f"    {PATH}" in found and all(len(line) <= columns for line in found if PATH not in line)
    assert " ".join(" ".join(found).split()) == f"- {PROSE} {PATH} {PROSE}"


def test_columns_stay_whole_and_the_last_gives_way(columns: int) -> None:
    names = [f"quantity_{'x' * length}" for length in (1, 12, 18)]
    found = list(lines([grid([(name, f"{10**9:,}", PROSE) for name in names], "lrl")]))
    assert [line.split()[:2] for line in found if "quantity" in line] == [[name, "1,000,000,000"] for name in names]
    assert max(map(len, found)) <= columns and all(line == line.rstrip() for line in found)
    assert " ".join(" ".join(found).split()).count("halved") == 3


def test_more_than_a_page_holds_overflows() -> None:
    """Text keeps some room beside columns that stay whole, and no digit is lost."""
    number = f"{10**90:,}"
    (first, *rest) = lines([grid([(number, number, "some words here that wrap")])])
    assert first.split()[:2] == [number, number]
    assert " ".join([*first.split()[2:], *" ".join(rest).split()]) == "some words here that wrap"


def test_no_colour_where_there_is_no_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    part = text(("ok", "green"), " and ", ("bad", "red"))
    assert list(lines([part], io.StringIO())) == ["ok and bad"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NO_COLOR", raising=False)
        patch.setenv("TERM", "xterm")
        assert list(lines([part], Terminal())) == ["\033[32mok\033[0m and \033[31mbad\033[0m"]
