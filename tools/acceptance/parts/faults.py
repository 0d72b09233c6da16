"""A run that is stopped by SIGTERM in generation, and resumed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from .. import models, runs
from ..environment import Environment
from ..rows import Recorder

STEPS = 6  # three rollouts of two updates
ROLLOUT = 1  # that is disturbed: the second


def run(env: Environment, record: Recorder) -> None:
    """Stop a run and let it go on, and compare it with one that is left alone."""
    config, alone = left_alone(env, record, "faults")
    _stopped(env, record, config, alone)


def left_alone(env: Environment, record: Recorder, name: str) -> tuple[Path, runs.Run]:
    """Return the config of a part's runs, and one of them that nothing happened to."""
    length = {"max_steps": STEPS, "seed": 7}
    config = runs.write_config(env, name, models.light(env), eager=True, run=length)
    alone = runs.Run(env, f"{name}-alone", config)
    alone.start()
    runs.judge(record, "left alone", alone, alone.finish(), STEPS)
    alone.discard()
    return config, alone


def _stopped(env: Environment, record: Recorder, config: Path, alone: runs.Run) -> None:
    """SIGTERM in generation saves beside an engine that holds its memory; the same command goes on."""
    what, stopped = "SIGTERM in generation", runs.Run(env, "stopped", config)
    process = stopped.start()
    stopped.wait_for_generation(ROLLOUT)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = stopped.finish()
    record.check(f"{what}: exit code", f"{code} after {time.monotonic() - began:.1f} s", "75", code == 75)
    before = stopped.records()
    stopped.start()
    runs.judge(record, f"{what}, resumed", stopped, stopped.finish(), STEPS)
    ends = stopped.attempts()
    record.check(f"{what}: attempts", ", ".join(ends), "stopped, done", ends == ["stopped", "done"])
    kept = stopped.records()[: len(before)] == before
    record.check(f"{what}: records from before", "the same" if kept else "others", "the same", kept)
    compare(env, record, what, stopped, alone)
    stopped.discard()


def compare(env: Environment, record: Recorder, what: str, run: runs.Run, alone: runs.Run) -> None:
    """Compare with the run that was left alone: bit for bit on a CPU; on a GPU sampling in 16 bit is not repeatable."""
    found, wanted = runs.harness.comparable(run.folder), runs.harness.comparable(alone.folder)
    same = sum(a == b for a, b in zip(found, wanted, strict=False))
    figure = f"{same} of {len(wanted)} records are the same bit for bit"
    if env.cuda:
        record.figure(f"{what}: metrics", figure)
        pairs = [(float(a["reward"]), float(b["reward"])) for a, b in zip(found, wanted, strict=False)]
        gap = max((abs(a - b) for a, b in pairs), default=float("inf"))
        record.at_most(f"{what}: rewards of a step, largest difference", gap, 0.25)
    else:
        record.check(f"{what}: metrics", figure, "all", found == wanted)
