"""One turn of an environment in a process of the pool, as a function that the pool calls like a reward function."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from gspo_hpc.rewards.catalogue import Answered
from gspo_hpc.rewards.environments.protocol import Environment, plain, turn_of
from gspo_hpc.rewards.environments.registry import make

_environments: dict[str, Environment] = {}  # by name; a process has one for its whole life


def prepare(environment: str, arguments: dict[str, Any]) -> Environment:
    """Return this process's object of the environment, which is made the first time. Raises whatever that raises."""
    if environment not in _environments:
        _environments[environment] = make(environment, arguments)
    return _environments[environment]


def environment_turn(
    message: str, *, prompt: str, fields: Mapping[str, Any], environment: str, arguments: dict[str, Any]
) -> Answered:
    """Return the answer of an environment to a message. Raises whatever the environment raises.

    `fields`: those of the data row ("row"), the seed of the conversation and its state, which is None at first.
    """
    made, state = prepare(environment, arguments), fields["state"]
    if state is None:
        reset = getattr(made, "reset", None)
        state = {} if reset is None else plain(_result(reset(dict(fields["row"]), fields["seed"])))
    return Answered(turn_of(_result(made.step(state, message)), state))


def _result(value: Any) -> Any:
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value
