"""Server mode: engines on ranks of their own, in turns with training or one rollout ahead of it.

Costs seven starts of training ranks and an engine, about four minutes. It would catch a rollout that depends on
where engines are, a death of an engine or of a rank that generates which ends an attempt, and whatever of a rollout
ahead a kill loses or repeats: completions of weights that are gone, a checkpoint that needs them, old log-probs of
other weights, further rounds of a rollout whose groups had no signal (rollout.dynamic_sampling) under other weights or
with other prompts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from gspo_hpc.system import processes
from tests.run import harness

GENERATOR = 2  # the rank that generates
APART = ("cluster.gpus_per_node=3", "rollout.mode=server", "rollout.engines_per_node=1")
TWO_GENERATE = ("cluster.gpus_per_node=4", "rollout.mode=server", "rollout.engines_per_node=2")
AHEAD = (*APART, "rollout.max_staleness=1", "checkpoint.interval=3")  # between updates, and between rollouts
# Groups without signal are replaced by those of further rounds, by which a rollout ahead is met unfinished more often.
REPLACED = ("rollout.dynamic_sampling=true", "rollout.max_num_gen_batches=5")
# A reference that moves after steps 4 and 6: what a kill loses or repeats of it is seen in later updates.
MOVING = ("algorithm.kl_beta=0.05", "algorithm.reference_interval=3", "algorithm.reference_mixup=0.5")
# Grading takes long enough for a rollout to be met unfinished while the one before is trained on.
SLOW = ("reward.functions=[{function: 'tests/slurm/graders.py:slow'}]", "reward.timeout=120")
SECONDS = {"GSPO_HPC_TEST_GRADER_SECONDS": "0.2"}


def engine_core(run_dir: Path) -> psutil.Process:
    """The process in which vLLM computes."""
    marked = (psutil.Process(pid) for pid in processes.marked(harness.run_id(run_dir)))
    return next(one for one in marked if "gspo_hpc.engine.host" in one.cmdline())


def saved(run_dir: Path) -> int:
    """The newest step of which there is a whole checkpoint, 0 for none."""
    whole = run_dir.glob("checkpoints/[0-9]*/COMMITTED")  # other names are of one that is being retired
    return max((int(path.parent.name) for path in whole), default=0)


@pytest.mark.timeout(900)
def test_in_turns_it_equals_engines_that_share_the_gpus(tiny_config: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """An engine and two ranks that generate are killed; the other run was left alone, and shared the GPUs."""
    run_dir, log, note = tmp_path / "run", tmp_path / "log", tmp_path / "killed"
    command = harness.command(tiny_config, run_dir, *harness.OVERRIDES, *TWO_GENERATE)
    process = harness.start(command, log, **harness.planted("deaths", note, 2, 3))
    assert harness.finish(process, log, 600) == 0, log.read_text()[-3000:]
    killed = sorted(path.name for path in tmp_path.glob("killed-*"))
    assert killed == ["killed-between", "killed-engine", "killed-in-rollout"]
    assert harness.comparable(run_dir) == harness.comparable(uninterrupted)
    assert harness.samples(run_dir) == harness.samples(uninterrupted)
    attempts = [json.loads(path.read_text()) for path in sorted((run_dir / "attempts").glob("*/attempt.json"))]
    assert [record.get("reason") for record in attempts] == ["done"], attempts
    rows = harness.metrics(run_dir)
    assert rows[-1]["engine_restarts"] == 3, "a death is not in the record"
    told = [line for line in log.read_text().splitlines() if "and training goes on" in line]
    assert ["all 2 ranks that generate start again" in line for line in told] == [True, True], told
    found = harness.diagnose(run_dir)[1]["engine_restarts"]
    assert any("rank 2, which generates, was killed by SIGKILL" in line for line in found["evidence"]), found
    assert not harness.left_on_node(run_dir)


def step_of(run_dir: Path, attempt: int) -> int:
    """The newest step that this attempt has logged, -1 for none: earlier ones may stand there before it cuts them."""
    return max((row["step"] for row in harness.metrics(run_dir) if row.get("attempt") == attempt), default=-1)


def ahead_of_training(run_dir: Path) -> bool:
    """Return whether rollout 3 is being sampled in the fourth attempt while rollout 2 is trained on.

    The weights that sample it are gone from the trainer with its next update.
    """
    return step_of(run_dir, 4) >= 4 and 0 < harness.journal_lines(run_dir, 3) < 8


MOMENTS: list[tuple[str, Callable[[Path], bool], int]] = [  # and the rank that is killed; -1: all; -2: SIGTERM
    ("in the first rollouts, of which both have the first weights", lambda run: harness.journal_lines(run, 0) > 2, -1),
    ("after a save between two rollouts", lambda run: step_of(run, 2) >= 2, -1),
    ("between two updates, with a rollout ahead", lambda run: step_of(run, 3) >= 3, -2),
    ("while the rollout ahead is sampled", ahead_of_training, GENERATOR),
]


@pytest.mark.timeout(1500)
def test_one_rollout_ahead_it_resumes_bit_for_bit(tiny_config: Path, tmp_path: Path) -> None:
    whole, log = tmp_path / "whole", tmp_path / "log"
    process = harness.start(
        harness.command(tiny_config, whole, *harness.OVERRIDES, *AHEAD, *REPLACED, *SLOW, *MOVING), log, **SECONDS
    )
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    rows = {row["step"]: row for row in harness.metrics(whole) if row["step"]}
    assert [rows[step]["staleness"] for step in sorted(rows)] == [0, 0, *[2] * (harness.STEPS - 2)]
    assert [rows[step]["weights_version"] for step in (1, 3, 5, 7)] == [0, 0, 2, 4]
    assert [row["zero_variance_groups"] for row in rows.values()] == [0] * harness.STEPS
    assert max(row.get("rollout/rounds", 0) for row in rows.values()) > 1, "no group was replaced"
    # The first update on completions of older weights has ratios other than 1: the old log-probs are those of the
    # weights that sampled.
    assert rows[1]["ratio_deviation_max"] < 1e-5 < rows[3]["ratio_deviation_max"], rows[3]

    run_dir = tmp_path / "run"
    command = harness.command(tiny_config, run_dir, *harness.OVERRIDES, *AHEAD, *REPLACED, *SLOW, *MOVING)
    process = harness.start(command, log, **SECONDS)
    for name, moment, rank in MOMENTS:
        harness.wait_for(lambda moment=moment: moment(run_dir), process, log)
        if rank == -1:
            harness.kill(process)
        elif rank == -2:
            os.kill(process.pid, signal.SIGTERM)
            assert harness.finish(process, log) == 75, log.read_text()[-3000:]
        else:  # which starts again, and the attempt goes on
            harness.worker(run_dir, rank).kill()
            continue
        time.sleep(0.5)
        print(f"ended {name}, last logged step {harness.last_step(run_dir)}")
        process = harness.start(command, log, **SECONDS)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert harness.metrics(run_dir)[-1]["engine_restarts"] == 1 and len(list((run_dir / "attempts").iterdir())) == 4
    assert "rank 2, which generates, was killed by SIGKILL" in log.read_text()
    assert harness.comparable(run_dir) == harness.comparable(whole)
    assert harness.samples(run_dir) == harness.samples(whole)
    ours, theirs = harness.export(run_dir, tmp_path / "exported"), harness.export(whole, tmp_path / "expected")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.timeout(600)
def test_an_engine_of_two_ranks_is_filled_again(tiny_config: Path, tmp_path: Path) -> None:
    """The owner of the engine alone has kept the weights: the other rank on its GPUs gets them from there."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    # An engine that is met after its last completion of rollout 1 has another rollout to be missed in.
    words = (*AHEAD, "rollout.tensor_parallel_size=2", "run.max_steps=6")
    process = harness.start(harness.command(tiny_config, run_dir, *harness.OVERRIDES, *words), log)
    harness.wait_for((run_dir / "rollouts" / "000001").exists, process, log)
    engine_core(run_dir).kill()
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    rows = harness.metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(7)) and rows[-1]["engine_restarts"] == 1, rows[-1]
    assert all(0 < rows[step]["probe_logprob_gap_max"] < 1e-4 for step in (3, 5)), rows
