"""The map of experts in the report: every cell has its share, and a damaged file is no map. Under a second."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.report import experts
from gspo_hpc.runs.reader import RunData, read_run

LAYERS = st.lists(st.lists(st.integers(0, 1000), min_size=4, max_size=4).filter(any), min_size=1, max_size=5)


def of(layers: dict[int, list[int]] | None, step: int = 7) -> RunData:
    data = None if layers is None else (step, layers)
    return RunData(Path("run"), {}, None, {}, (), (), (), experts=data)


@given(LAYERS)
def test_every_expert_has_a_cell_of_its_shade(rows: list[list[int]]) -> None:
    (figure,) = experts.figures(of(dict(enumerate(rows))))
    cells: dict[str, float] = {}
    for path, style in re.findall(r'<path d="([^"]*)" style="([^"]*)"', str(figure.drawn.svg)):
        shade = re.search(r"opacity:([\d.]+)", style)
        assert shade is not None
        cells |= {at: float(shade[1]) for at in re.findall(r"M([\d. ]+)h", path)}
    assert len(cells) == sum(map(len, rows)), "a cell is missing, or lies on another"
    shades = [cells[at] for at in sorted(cells, key=lambda at: (float(at.split()[1]), float(at.split()[0])))]
    shares = [count / sum(row) for row in rows for count in row]
    pairs = sorted(zip(shares, shades, strict=True))
    assert [shade for _, shade in pairs] == sorted(shades), "an expert with more tokens is lighter"


def shown(layers: dict[int, list[int]]) -> tuple[dict[tuple[float, float], str], dict[str, tuple[float, float]]]:
    """Return the style of the cell at each place (x, y), and the place of each label."""
    (figure,) = experts.figures(of(layers))
    svg = str(figure.drawn.svg)
    cells = {
        (float(x), float(y)): style
        for path, style in re.findall(r'<path d="([^"]*)" style="([^"]*)"', svg)
        for x, y in re.findall(r"M([\d.]+) ([\d.]+)h", path)
    }
    texts = {}
    for attributes, text in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        found = dict(re.findall(r'(\w+)="([^"]*)"', attributes))
        texts[text] = (float(found["x"]), float(found["y"]))
    return cells, texts


def test_shades_are_in_parts_of_an_even_share() -> None:
    """Half of the legend's bound for an even share, whole at twice that, in another colour above it."""
    cells, _ = shown({0: [1, 1, 1, 1], 1: [0, 3, 0, 1]})
    rows = [[cells[place] for place in sorted(cells) if place[1] == y] for y in sorted({y for _, y in cells})]
    assert rows[0] == ["fill:var(--accent);opacity:0.55"] * 4
    assert rows[1][0] == rows[1][2] == "fill:var(--accent);opacity:0.05"
    assert (rows[1][1], rows[1][3]) == ("fill:var(--bad);opacity:1.00", "fill:var(--accent);opacity:0.55")


@pytest.mark.parametrize("part", range(experts.STEPS))
def test_twice_an_even_share_is_the_last_of_the_shades(part: int) -> None:
    """One of two experts has an odd number of sixteenths of the tokens, which is in the middle of a shade."""
    tokens = 2 * part + 1
    cells, _ = shown({0: [tokens, 16 - tokens]})
    assert cells[min(cells)] == f"fill:var(--accent);opacity:{(part + 0.4) / experts.STEPS:.2f}"


def test_the_legend_has_the_colours_of_the_cells() -> None:
    (figure,) = experts.figures(of({0: [1, 1]}))
    assert [(one.name, one.color) for one in figure.legend] == [
        ("up to twice an even share", "accent"),
        ("more", "bad"),
    ]


def test_cells_fill_the_map_and_the_ends_have_labels() -> None:
    """The first and the last layer by their numbers, and the first and the last expert, each beside its cells."""
    cells, texts = shown({3: [1] * 8, 4: [1] * 8, 9: [1] * 8})
    across, down = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
    assert (len(across), len(down)) == (8, 3) and set(texts) == {"3", "9", "0", "7"}
    assert down[0] < texts["3"][1] < down[1] and down[2] < texts["9"][1] and texts["3"][0] < across[0]
    assert across[0] < texts["0"][0] < across[1] and across[7] < texts["7"][0]
    (figure,) = experts.figures(of({3: [1] * 8, 4: [1] * 8}))
    size = re.search(r"v([\d.]+)h-", str(figure.drawn.svg))
    assert size is not None and float(size[1]) == pytest.approx(down[1] - down[0]), "rows touch"


def test_the_caption_has_the_numbers() -> None:
    (figure,) = experts.figures(of({3: [10, 30, 0, 40], 5: [20, 20, 20, 20]}))
    assert "step 7" in figure.note and "An even share is 25.00%" in figure.note
    assert "the largest is 50.00% (expert 3 of layer 3)" in figure.note
    assert "the smallest 0.00% (expert 2 of layer 3)" in figure.note
    assert figure.narrow is not None and experts.figures(of(None)) == []


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"step": 1},
        {"step": -1, "layers": {"0": [1]}},
        {"step": 1, "layers": {"0": []}},
        {"step": 1, "layers": {"x": [1]}},
        {"step": 1, "layers": {"0": ["<script>"]}},
        {"step": 1, "layers": [[1]]},
    ],
)
def test_a_damaged_file_is_no_map(content: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "experts.json").write_text(json.dumps(content))
    assert read_run(tmp_path).experts is None
    (tmp_path / "experts.json").write_text(json.dumps({"step": 2, "layers": {"10": [1, 2], "2": [3, 4]}}))
    assert read_run(tmp_path).experts == (2, {2: [3, 4], 10: [1, 2]})
