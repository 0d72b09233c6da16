"""The file for node_exporter. Takes milliseconds; catches a file that Prometheus would refuse, and a dashboard of names
that nothing writes."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.config.schema import Tracking
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.trackers import registry
from gspo_hpc.trackers.feed import Feeds
from gspo_hpc.trackers.protocol import Record, TrackedRun
from gspo_hpc.trackers.services.prometheus import Prometheus, exposition

# The grammar of the text format (https://prometheus.io/docs/instrumenting/exposition_formats).
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
LINE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)\{{({LABEL}(?:,{LABEL})*)\}} (\S+)")
STEP = {"reward": 0.5, "reward/exact": 0.25, "seconds": 12.0, "seconds/update": 4.0, "grad_norm": math.nan}


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """A strict reader of the format: every metric has one TYPE, in front of all of its lines, and no line twice."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    typed: list[str] = []
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("#"):
            _, kind, metric, gauge = line.split(" ")
            assert (kind, gauge) == ("TYPE", "gauge") and metric not in typed
            typed.append(metric)
            continue
        match = LINE.fullmatch(line)
        assert match is not None and match[1] == typed[-1], line
        key = (match[1], tuple(re.findall(LABEL, match[2])))
        assert key not in found, line
        found[key] = float(match[match.lastindex or 0])
    return found


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.floats(), max_size=6), st.text(max_size=10))
def test_whatever_is_logged_can_be_read(values: dict[str, float], name: str) -> None:
    """Names of reward functions and of runs are texts of users."""
    plain = {f"reward/{key}": value for key, value in values.items()}
    text = exposition(plain | {"step": 3}, {"run": name})
    assert len(parsed(text.encode().decode())) == len(plain) + 1


def test_one_file_is_replaced_and_stays(tmp_path: Path) -> None:
    """A run's own files are for its user alone; node_exporter is another one."""
    sink = Prometheus(str(tmp_path), 'a "run"', "id7")
    before = os.umask(0o077)
    try:
        sink.log([Record(step, 1.7e9, STEP | {"step": step}) for step in (0, 1)])
        sink.log([Record(2, 1.7e9, STEP | {"step": 2}), Record(3, 1.7e9, STEP | {"step": 3})])
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".prom" and stat.S_IMODE(path.stat().st_mode) == 0o644 and str(path) in sink.place
    labels = (("run", r"a \"run\""), ("id", "id7"))
    found = parsed(path.read_text())
    assert found["gspo_hpc_step", labels] == 3 and found["gspo_hpc_running", labels] == 1
    assert found["gspo_hpc_reward", labels] == 0.5
    assert found["gspo_hpc_reward", (*labels, ("name", "exact"))] == 0.25
    assert found["gspo_hpc_seconds", (*labels, ("name", "update"))] == 4.0
    assert math.isnan(found["gspo_hpc_grad_norm", labels])
    sink.close(7)
    found = parsed(path.read_text())
    assert (found["gspo_hpc_running", labels], found["gspo_hpc_exit_code", labels]) == (0, 7)
    assert found["gspo_hpc_step", labels] == 3 and abs(found["gspo_hpc_time", labels] - time.time()) < 60


def test_a_run_feeds_it_and_a_folder_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.append_metrics({"step": 5, "reward": 0.5, "note": "text"})

    def run(folder: Path) -> tuple[list[str], list[str]]:
        said: list[str] = []
        told: list[str] = []
        tracking = Tracking(wandb="disabled", prometheus=str(folder))
        feeds = Feeds(
            registry.chosen(tracking),
            TrackedRun(run_dir.path, "id7", "demo", {}),
            warn=said.append,
            announce=told.append,
        )
        feeds.close(0)
        return said, told

    there = tmp_path / "textfile"
    there.mkdir()
    assert run(there) == ([], [f"tracker: Prometheus: {there / 'gspo_hpc_id7.prom'}"])
    assert 'gspo_hpc_step{run="demo",id="id7"} 5' in (there / "gspo_hpc_id7.prom").read_text()
    (warning,), _ = run(tmp_path / "nowhere")
    assert "Prometheus did not start (ValueError: tracking.prometheus: there is no folder" in warning


def test_the_dashboard_shows_what_is_written(project: Path) -> None:
    """Its metrics are those of records that a run writes: docs and report name the same."""
    board: dict[str, Any] = json.loads((project / "docs" / "grafana.json").read_text())
    exprs = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expr in exprs for name in re.findall(r"gspo_hpc_\w+", expr)}
    source = "\n".join(
        path.read_text()
        for folder in ("training", "rollout", "algorithms", "evaluation")
        for path in (project / "gspo_hpc" / folder).rglob("*.py")
    )
    for name in names:
        metric = name.removeprefix("gspo_hpc_")
        assert re.search(rf'["\']{metric}["\'/]', source), f"nothing writes {metric}"
    assert len(exprs) >= 12 and all('run=~"$run"' in expr for expr in exprs)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e-300, -0.0])
def test_odd_numbers(value: float) -> None:
    (found,) = parsed(exposition({"x": value}, {"run": "r"})).values()
    assert found == value or math.isnan(found) and math.isnan(value)
