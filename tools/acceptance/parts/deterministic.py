"""Two runs with run.deterministic that are the same bit for bit, one of which is stopped and resumed."""

from __future__ import annotations

import signal

from .. import models, runs
from ..environment import Environment
from ..rows import Recorder

STEPS = 4  # two rollouts of two updates
# Sums over all completions of a step, of what was sampled, computed and learned.
BITWISE = ("loss", "grad_norm", "reward", "entropy", "sampled_crc32")


def run(env: Environment, record: Recorder) -> None:
    """Leave one run alone, stop the other within a rollout and resume it, and compare all that they recorded."""
    config = runs.write_config(
        env,
        "deterministic",
        models.light(env),
        eager=True,
        run={"max_steps": STEPS, "seed": 7, "deterministic": True},
        checkpoint={"interval": 2},
        tracking={"samples": 64},
    )
    alone = runs.Run(env, "deterministic", config)
    alone.start()
    runs.judge(record, "run.deterministic", alone, alone.finish(), STEPS)
    runs.speed(record, "run.deterministic", alone)
    alone.discard()
    again = runs.Run(env, "deterministic-again", config)
    process = again.start()
    again.wait_for_generation(1)
    process.send_signal(signal.SIGTERM)
    code = again.finish()
    record.check("stopped in generation: exit code", str(code), "75", code == 75)
    again.start()
    runs.judge(record, "run.deterministic, resumed", again, again.finish(), STEPS)
    again.discard()
    found, wanted = (runs.harness.comparable(one.folder) for one in (again, alone))
    for name in BITWISE:
        values = [[one.get(name) for one in records] for records in (found, wanted)]
        there = all(value is not None for value in values[1])
        same = there and values[0] == values[1]
        record.check(f"resumed against left alone: {name}", "the same" if same else f"{values}", "the same", same)
    said, expected = (runs.harness.samples(one.folder) for one in (again, alone))
    count = sum(said.get(key) == text for key, text in expected.items())
    bound = "all, and at least 1"
    record.check("the same completions", f"{count} of {len(expected)}", bound, 0 < len(expected) == count == len(said))
