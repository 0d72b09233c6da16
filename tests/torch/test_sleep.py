"""When engines sleep beside a rollout: what depends on the loop, with stand-ins for all that is around it. What
sleeping means for the weights is tested with real engines in tests/gloo and tests/engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc import trainer
from gspo_hpc.config_file import from_dict
from gspo_hpc.cursor import Cursor
from gspo_hpc.engine import EngineDied


class Sleeper:
    """An engine that says how it was put to sleep."""

    def __init__(self, dies: bool = False) -> None:
        self.levels: list[int] = []
        self.dies = dies

    def sleep(self, level: int) -> None:
        self.levels.append(level)
        if self.dies:
            raise EngineDied("gone")


def session(level: int, engine: Sleeper | None, interval: int = 1) -> Any:
    config = from_dict(
        {"rollout": {"sleep_level": level}, "eval": {"interval": interval, "after": False}, "run": {"max_steps": 9}}
    )
    outlet = SimpleNamespace(step=lambda record: None)
    station = SimpleNamespace(engine=engine)
    made = SimpleNamespace(config=config, eval_prompts=["a"], seconds={}, outlet=outlet, station=station)
    made.synced_version = 4
    return made


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("update", "interval", "sleeps"), [(1, 1, True), (0, 1, False), (1, 7, False)])
def test_engines_sleep_after_an_evaluation_inside_a_rollout(
    level: int, update: int, interval: int, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between rollouts they stay awake, for the next step begins with a rollout."""
    monkeypatch.setattr(trainer, "_evaluate", lambda *args: {"eval/accuracy": 0.5})
    engine = Sleeper()
    made = session(level, engine, interval)
    trainer._finish(made, Cursor(step=3, update=update), {"step": 3})
    assert engine.levels == ([level] if sleeps else [])
    assert made.synced_version == (-1 if sleeps and level == 2 else 4)


def test_all_ranks_know_that_the_weights_are_gone() -> None:
    """Also those without an engine, and the one whose engine died of it: a push is a collective."""
    for engine in (None, Sleeper(), Sleeper(dies=True)):
        made = session(2, engine)
        trainer._sleep(made)
        assert made.synced_version == -1
