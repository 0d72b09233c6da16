"""When engines sleep beside a rollout: what depends on the loop, with stand-ins for all that is around it. What
sleeping means for the weights is tested with real engines in tests/gloo and tests/engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.algorithms import objective
from gspo_hpc.config.derived import Passes
from gspo_hpc.config.loader import from_dict
from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.ops.weight_parts import Memory, Part
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training import loop
from gspo_hpc.training.bringup import engine_settings
from gspo_hpc.training.observers.base import Observers
from gspo_hpc.training.progress import Progress
from gspo_hpc.training.recipe import Recipe
from gspo_hpc.training.sync import EngineWeights


class Sleeper:
    """An engine that says how it was put to sleep."""

    def __init__(self, dies: bool = False) -> None:
        self.levels: list[int] = []
        self.dies = dies

    def sleep(self, level: int) -> None:
        self.levels.append(level)
        if self.dies:
            raise EngineDied("gone")


def engine_weights(level: int, engine: Sleeper | None) -> EngineWeights:
    """Make the weights of an engine that sleeps at this level."""
    policy: Any = SimpleNamespace(
        config=from_dict({"rollout": {"sleep_level": level}}), ranks=SimpleNamespace(world_size=1)
    )
    weight_sync: Any = SimpleNamespace(policy=policy)
    worker: Any = SimpleNamespace(engine=engine)
    clock: Any = None
    made = EngineWeights(weight_sync, worker, clock)
    made._engine_version = made._version = 4
    made._awake = True  # as after a sync
    return made


class Scores:
    """An evaluator that has run."""

    has_prompts = True

    def run(self, step: int, phase: str) -> dict[str, float]:
        return {"eval/accuracy": 0.5}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("update", "interval", "sleeps"), [(1, 1, True), (0, 1, False), (1, 7, False)])
def test_engines_sleep_after_an_evaluation_inside_a_rollout(
    level: int, update: int, interval: int, sleeps: bool
) -> None:
    """Between rollouts they stay awake, for the next step begins with a rollout."""
    engine = Sleeper()
    weights = engine_weights(level, engine)
    config = from_dict({"eval": {"interval": interval, "after": False}, "run": {"max_steps": 9}})
    recipe = Recipe(config, objective.resolve(config.algorithm), Passes(False, False), 1, 2, attempt=1)
    session: Any = SimpleNamespace(
        recipe=recipe, evaluator=Scores(), weights=weights, observers=Observers(), clock=SimpleNamespace(seconds={})
    )
    loop.finish_step(session, Progress(Cursor(step=3, update=update), record={"step": 3}))
    assert engine.levels == ([level] if sleeps else [])
    assert weights._engine_version == (None if sleeps and level == 2 else 4)


def test_all_ranks_know_that_the_weights_are_gone() -> None:
    """Also those without an engine, and the one whose engine died of it: a push is a collective."""
    for engine in (None, Sleeper(), Sleeper(dies=True)):
        made = engine_weights(2, engine)
        made.sleep()
        assert made._engine_version is None


def test_an_engine_whose_restart_failed_is_a_dead_one(tiny_folder: Path) -> None:
    """A stop came before it could be started again: the save puts all engines to sleep, and must not end with that."""
    config = from_dict({"cluster": {"platform": "cuda"}, "model": {"path": str(tiny_folder / "model")}})
    engine = Engine(engine_settings(config, 1, experts=False))
    ended: list[bool] = []

    def stream(memory: Memory) -> Iterator[Sequence[Part]]:
        yield []
        ended.append(True)

    with pytest.raises(EngineDied, match="not running"):
        engine.sleep(2)
    with pytest.raises(EngineDied, match="not running"):
        engine.update_weights(stream)
    assert ended == [True], "a stream is a collective of all ranks"
    policy: Any = SimpleNamespace(config=config, ranks=SimpleNamespace(world_size=1))
    weight_sync: Any = SimpleNamespace(policy=policy)
    worker: Any = SimpleNamespace(engine=engine)
    clock: Any = None
    made = EngineWeights(weight_sync, worker, clock)
    made._awake = True
    made.sleep()
