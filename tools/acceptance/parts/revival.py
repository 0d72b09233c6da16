"""An engine that is killed in the generation of a run, and started again in place."""

from __future__ import annotations

from pathlib import Path

from .. import runs
from ..environment import Environment
from ..rows import Recorder
from .faults import ROLLOUT, STEPS, compare, left_alone


def run(env: Environment, record: Recorder) -> None:
    """Kill the engine of a run, and compare it with one that is left alone."""
    config, alone = left_alone(env, record, "revival")
    _killed(env, record, config, alone)


def _killed(env: Environment, record: Recorder, config: Path, alone: runs.Run) -> None:
    """An engine whose core is killed is started again in place, gets the weights and samples what is missing."""
    what, killed = "the engine's core killed in generation", runs.Run(env, "killed", config)
    killed.start()
    killed.wait_for_generation(ROLLOUT)
    for core in killed.engine_cores():
        core.kill()
    runs.judge(record, what, killed, killed.finish(), STEPS)
    records = killed.records()
    restarts = int(records[-1]["engine_restarts"]) if records else 0
    record.check(f"{what}: engines started again", str(restarts), "1", restarts == 1)
    compare(env, record, what, killed, alone)
    killed.discard()
