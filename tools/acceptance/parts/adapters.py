"""Train adapters, which engines keep beside weights that stay: at both levels of sleep, with a resume."""

from __future__ import annotations

import signal
import time

from .. import models, runs
from ..environment import Environment
from ..rows import Recorder

STEPS = 4  # two rollouts of two updates
ADAPTER = {"type": "lora", "rank": 8, "alpha": 16.0, "engine": "adapters"}


def run(env: Environment, record: Recorder) -> None:
    """Train at each level of sleep; the gate of a run ends it where engine and trainer have other log-probs."""
    for level in (1, 2):
        config = runs.write_config(
            env,
            f"adapters-{level}",
            models.light(env),
            eager=True,
            run={"max_steps": STEPS, "seed": 7},
            adapter=ADAPTER,
            rollout={"sleep_level": level},
            optimizer={"lr": 1e-3},
            checkpoint={"interval": 2},
        )
        what, trained = f"adapters, sleep at level {level}", runs.Run(env, f"adapters-{level}", config)
        process = trained.start()
        if level == 2:  # the adapters alone are in the checkpoint; the weights are read again
            trained.wait_for_generation(1)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code = trained.finish()
            told = f"{code} after {time.monotonic() - began:.1f} s"
            record.check(f"{what}: exit code after SIGTERM", told, "75", code == 75)
            trained.start()
            what = f"{what}, resumed"
        runs.judge(record, what, trained, trained.finish(), STEPS)
        norms = [float(one["grad_norm"]) for one in trained.records()] or [0.0]
        record.check(f"{what}: gradients", f"norms {min(norms):.3g} to {max(norms):.3g}", "not 0", min(norms) > 0.0)
        runs.speed(record, what, trained)
        trained.discard()
