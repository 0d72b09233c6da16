"""The processes in which environments answer: a pool of reward functions with one function, a turn.

So an environment that raises, hangs, exits or eats memory costs its conversation, a process that dies costs a
repetition of the same turn, and nothing of a user's runs in the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.schema import Config, Reward, RewardFunction
from gspo_hpc.rewards.catalogue import TURN
from gspo_hpc.rewards.environments.tool_calls import Call

if TYPE_CHECKING:
    from gspo_hpc.rewards.pool import RewardPool


def turn_function(config: Config) -> RewardFunction:
    """Return the function that takes a turn in the environment of a config."""
    settings = config.environment
    tools = [{"function": one.function, "args": dict(one.args)} for one in settings.tools]
    arguments = {"environment": settings.name, "arguments": dict(settings.args), "tools": tools}
    return RewardFunction(function=TURN, args=arguments)


def named(config: Config) -> str:
    """Return the setting that names the environment or, without one, the tools; with its value."""
    settings = config.environment
    tools = ", ".join(tool.function for tool in settings.tools)
    return f"environment.tools: {tools}" if settings.name is None else f"environment.name: {settings.name}"


def asked_for_scores(row: Mapping[str, Any], conversations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what that function gets where the environment is to score a group, whose scores come as the state."""
    return {"row": row, "state": None, "group": conversations}


def asked(row: Mapping[str, Any], seed: int, state: Any, call: Call | None = None) -> dict[str, Any]:
    """Return what that function gets beside a message: the fields of the row, the conversation's seed and its state.

    The state is None before the first answer. With a `call`, a tool is asked, and not the environment.
    """
    found = {"row": row, "seed": seed, "state": state}
    return found if call is None else found | {"call": {"name": call.name, "arguments": call.arguments}}


def turn_pool(config: Config, pools: int) -> RewardPool:
    """Return processes of one of so many `pools` that take turns in the environment of a config.

    Raises ValueError where it cannot be made.
    """
    from gspo_hpc.rewards.pool import RewardPool  # only here: doctor is to try an environment without its library

    settings = config.environment
    turns = Reward(
        functions=(turn_function(config),),
        workers=settings.workers,
        timeout=settings.timeout,
        memory_gb=config.reward.memory_gb,
    )
    try:
        return RewardPool(turns, pools, config.sandbox)
    except ValueError as mistake:
        text = str(mistake).removeprefix("reward.functions: ").removeprefix("environment: ")
        raise ValueError(f"{named(config)}: {text}") from None
