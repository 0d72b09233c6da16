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
