"""A run of a mixture of experts that sends every token to the experts that it had before."""

from __future__ import annotations

from .. import models, runs
from ..rows import Recorder
from ..setting import Setting

STEPS = 4


def run(setting: Setting, record: Recorder) -> None:
    """Train with router replay: from the engine where vLLM reports its choices, else from the log-prob pass."""
    config = runs.write_config(
        setting,
        "mixture",
        models.mixture(setting),
        eager=True,
        run={"max_steps": STEPS, "seed": 7},
        moe={"router_replay": "auto"},
        checkpoint={"interval": 100},
    )
    replayed = runs.Run(setting, "mixture", config)
    replayed.start()
    runs.judge(record, "router replay", replayed, replayed.finish(), STEPS)
    runs.speed(record, "router replay", replayed)
    replayed.discard()
    if not setting.cuda:
        record.no_meaning("the engine's choice of experts (rollout): the CPU build does not report it")
