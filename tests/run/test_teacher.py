"""A run that a teacher alone teaches: nothing is graded; killed, refused beside other weights, and resumed.

It costs four starts of two ranks, three of them with an engine: three minutes beside three busy processes. It would
catch a divergence that is not learnt from, a teacher that a resume reads otherwise or that changes, and a place in the
loop, in the pool of reward functions or in the records that needs a reward.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.run import harness

STEPS = 8
TAUGHT = (
    *harness.OVERRIDES,
    "optimizer.lr_warmup_steps=0",
    "eval.before=false",
    "eval.after=false",
    "data.eval=null",
    "reward.functions=[]",
    "algorithm.kl_beta=1.0",
)


def near(source: Path, folder: Path, seed: int) -> Path:
    """A teacher that is not far from the model in a folder: its weights with noise."""
    shutil.copytree(source, folder)
    file, chance = folder / "model.safetensors", np.random.default_rng(seed)
    weights = load_file(file)
    noise = {name: chance.standard_normal(one.shape).astype(one.dtype) for name, one in sorted(weights.items())}
    moved = {name: one + 0.15 * one.std() * noise[name] for name, one in weights.items()}
    save_file(moved, file, {"format": "pt"})
    return folder


@pytest.mark.timeout(1200)
def test_a_killed_run_equals_the_one_left_alone_and_comes_nearer_to_its_teacher(
    tiny_folder: Path, tiny_config: Path, tmp_path: Path
) -> None:
    teacher = near(tiny_folder / "model", tmp_path / "teacher", 0)
    overrides, log = (*TAUGHT, f"algorithm.teacher={teacher}"), tmp_path / "log"
    alone = tmp_path / "alone"
    process = harness.start(harness.command(tiny_config, alone, *overrides), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    records = harness.metrics(alone)
    distances = [record["reference_kl"] for record in records]
    assert len(records) == STEPS and distances[-1] < 0.7 * distances[0], distances
    assert all(record["empty"] == 0 < record["grad_norm"] and "reward" not in record for record in records)
    said = log.read_text()
    assert f"taught by {teacher}," in said and "divergence from the teacher" in said and "learnt nothing" not in said

    run_dir = tmp_path / "killed"
    command = harness.command(tiny_config, run_dir, *overrides)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) == 3, process, log)  # between two updates of a rollout
    harness.kill(process)

    kept, refused = tmp_path / "kept", tmp_path / "refused"
    teacher.rename(kept)
    near(tiny_folder / "model", teacher, 1)
    assert harness.finish(harness.start(command, refused), refused) == 2, refused.read_text()
    assert "has other weights than those that this run has learned from" in refused.read_text()
    shutil.rmtree(teacher)
    kept.rename(teacher)

    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    assert harness.comparable(run_dir) == harness.comparable(alone)
    assert harness.samples(run_dir) == harness.samples(alone)
    one, other = (harness.export(run, tmp_path / f"{run.name}-model") for run in (run_dir, alone))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

    told = subprocess.run(
        [sys.executable, "-m", "gspo_hpc", "status", "--json", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(told.stdout)["learnt"] == "learnt"
    _, symptoms = harness.diagnose(run_dir)
    assert not {"learnt_nothing", "reward_always_zero", "reward_saturation"} & symptoms.keys()
