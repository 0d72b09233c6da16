"""Train on two ranks with an engine of two GPUs, and plant an error in one rank while the other waits for it."""

from __future__ import annotations

import json
import time
from typing import Any

from gspo_hpc.system import processes

from .. import models, runs
from ..environment import Environment
from ..rows import Recorder

STEPS = 4  # two rollouts of two updates
SECONDS = 30.0  # from a rank's error to the end of the run
TWO = {"gpus_per_node": 2}
HALVES = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def run(env: Environment, record: Recorder) -> None:
    """Train in halves with an engine in halves, the same with a shared optimizer, then plant an error in rank 1."""
    _trains(env, record, "TP 2, an engine of two GPUs", "pair-tp", parallel=HALVES, rollout={"tensor_parallel_size": 2})
    shared = {"lr": 1e-5, "distributed": True}
    _trains(env, record, "DP 2, a shared optimizer", "pair-dp", rollout={"engines_per_node": 2}, optimizer=shared)
    _fails(env, record)


def _trains(env: Environment, record: Recorder, what: str, name: str, **sections: Any) -> None:
    config = runs.write_config(
        env, name, models.light(env), eager=True, cluster=TWO, run={"max_steps": STEPS, "seed": 7}, **sections
    )
    trained = runs.Run(env, name, config)
    trained.start()
    runs.judge(record, what, trained, trained.finish(), STEPS)
    runs.speed(record, what, trained)
    trained.discard()


def _fails(env: Environment, record: Recorder) -> None:
    """An error in one rank ends the run with that error, though process groups would never end by themselves."""
    config = runs.write_config(
        env, "pair-fails", models.light(env), eager=True, cluster=TWO, run={"max_steps": STEPS, "seed": 7}
    )
    failed = runs.Run(env, "pair-fails", config)
    note = env.work / "planted"
    note.unlink(missing_ok=True)
    failed.start(**runs.harness.planted("error", note))
    code, what = failed.finish(), "an error in rank 1"
    seconds = time.time() - note.stat().st_mtime if note.exists() else float("inf")
    record.check(f"{what}: exit code", str(code), "1", code == 1)
    record.at_most(f"{what}: until the run has ended", seconds, SECONDS, " s")
    detail = str(json.loads((failed.folder / "attempts/0001/attempt.json").read_text())["detail"])
    record.check(f"{what}: the reason of the attempt", detail, "rank 1 and its error", "rank 1" in detail)
    left = processes.marked(runs.harness.run_id(failed.folder))
    record.at_most(f"{what}: processes that are left", len(left), 0)
