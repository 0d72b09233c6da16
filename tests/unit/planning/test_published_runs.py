"""Every published run of docs/estimates.md is a config whose command prints what its file and the page say.

Takes about 6 s. It would catch a row that `plan` refuses, and one whose page shows other seconds than the command.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main

PROJECT = Path(__file__).parents[3]
RUNS = sorted((PROJECT / "docs" / "estimates").glob("*.yaml"))


def cells(key: str) -> list[str]:
    """Return the cells of the row of a run on the page."""
    lines = (PROJECT / "docs" / "estimates.md").read_text("utf-8").splitlines()
    (row,) = (line for line in lines if f"](estimates/{key}.yaml)" in line)
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_command_of_a_row_prints_its_seconds(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    head = [line.removeprefix("# ") for line in path.read_text("utf-8").splitlines()[:4]]
    program, *words = shlex.split(head[2])
    assert (program, *words[:2]) == ("gspo-hpc", "plan", f"docs/estimates/{path.name}")
    assert main(words) == 3  # the model is not here
    printed = re.search(r"^ +a rollout +([0-9.]+) s ", capsys.readouterr().out, re.MULTILINE)
    assert printed is not None
    assert main([*words, "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] and told["runnable"] is None and not told["missing"] and told["memory"] is not None

    said = re.match(
        r"prints for a rollout of gspo_hpc: ([0-9.]+) s(?:; estimated for their system: ([0-9.]+) s)?", head[3]
    )
    assert said is not None, head[3]
    _, _, published, own, theirs, error = cells(path.stem)
    assert printed[1] == said[1] == own == f"{told['time']['seconds_per_rollout']:.1f}"
    assert theirs == (said[2] or said[1])
    assert float(error.rstrip("%")) == pytest.approx(100 * (float(theirs) / float(published) - 1), abs=0.6)
    assert f": {float(published):g} s a step" in head[0]


def test_generation_far_ahead_is_a_warning_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (far,) = (path for path in RUNS if "max_staleness: 8" in path.read_text("utf-8"))
    assert main(["plan", str(far), "--json"]) == 3
    older, saves = json.loads(capsys.readouterr().out)["warnings"]
    assert "rollout.max_staleness (8)" in older and "checkpoint.interval (50)" in saves
    assert main(["plan", str(far)]) == 3
    (line,) = re.findall(r"^ +old_logprobs +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert line == "not needed: generation is ahead, so those of the engines are taken"
