"""A run that is killed again and again ends as the one left alone: metrics, tokens and weights, bit for bit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gspo_hpc.runs import sample_record
from tests.run import harness


def saving(run_dir: Path) -> bool:
    """Whether a checkpoint is being written right now, with some of it on disk."""
    return any(path.stat().st_size > 0 for path in (run_dir / "checkpoints").glob(".*/megatron/*"))


MOMENTS: list[tuple[str, Callable[[Path], bool]]] = [
    ("in generation, some groups finished", lambda run: 0 < harness.journal_lines(run, 0)),
    ("between the two updates of a rollout", lambda run: harness.last_step(run) in (3, 5)),
    ("in a save", lambda run: harness.last_step(run) >= 4 and saving(run)),
    ("in an update", lambda run: harness.last_step(run) >= 6),
]


@pytest.mark.timeout(1500)  # five starts of two ranks and an engine
def test_killed_run_equals_the_uninterrupted_one(tiny_config: Path, uninterrupted: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *harness.OVERRIDES, *harness.RECORDED)
    for name, moment in MOMENTS:
        process = harness.start(command, log)
        harness.wait_for(lambda moment=moment: moment(run_dir), process, log)
        harness.kill(process)
        time.sleep(0.5)
        print(f"killed {name}, last logged step {harness.last_step(run_dir)}")
    process = harness.start(command, log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]

    assert harness.comparable(run_dir) == harness.comparable(uninterrupted)
    assert harness.samples(run_dir) == harness.samples(uninterrupted)
    recorded = list(sample_record.steps(run_dir / "record"))
    assert recorded == list(sample_record.steps(uninterrupted / "record"))
    assert [one.step for one in recorded] == list(range(1, harness.STEPS + 1))
    assert all(len(one.groups) == 3 for one in recorded)
    baselines = [
        (run / "checkpoints" / f"{harness.STEPS:06d}" / "baseline.json").read_text() for run in (run_dir, uninterrupted)
    ]
    assert baselines[0] == baselines[1] and json.loads(baselines[0])["probe"]["mean"] > 0
    reasons = [json.loads(p.read_text()) for p in sorted((run_dir / "attempts").glob("*/attempt.json"))]
    assert len(reasons) == len(MOMENTS) + 1 and reasons[-1]["reason"] == "done"
    ours = harness.export(run_dir, tmp_path / "exported")
    theirs = harness.export(uninterrupted, tmp_path / "expected")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_training_moved_the_weights(tiny_config: Path, uninterrupted: Path, tmp_path: Path) -> None:
    import yaml

    model = yaml.safe_load((uninterrupted / "config.yaml").read_text())["model"]["path"]
    trained = harness.export(uninterrupted, tmp_path / "trained")
    start = load_file(Path(model) / "model.safetensors")
    assert trained.keys() == start.keys()
    assert any(not np.array_equal(trained[name], start[name]) for name in start)
