"""A run of a mixture of experts that sends every token to the experts that it had before."""

from __future__ import annotations

from .. import models, runs
from ..environment import Environment
from ..rows import Recorder

STEPS = 4


def run(env: Environment, record: Recorder) -> None:
    """Train with router replay: from the engine where vLLM reports its choices, else from the log-prob pass."""
    config = runs.write_config(
        env,
        "mixture",
        models.mixture(env),
        eager=True,
        run={"max_steps": STEPS, "seed": 7},
        moe={"router_replay": "auto"},
        checkpoint={"interval": 100},
    )
    replayed = runs.Run(env, "mixture", config)
    replayed.start()
    runs.judge(record, "router replay", replayed, replayed.finish(), STEPS)
    runs.speed(record, "router replay", replayed)
    replayed.discard()
    if not env.cuda:
        record.no_meaning("the engine's choice of experts (rollout): the CPU build does not report it")
