"""One turn of an environment in a process of the pool, as a function that the pool calls like a reward function."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.schema import Tool
from gspo_hpc.rewards.catalogue import Answered, Turn
from gspo_hpc.rewards.environments import tools as toolbox
from gspo_hpc.rewards.environments.protocol import Environment, plain, scores_of, turn_of
from gspo_hpc.rewards.environments.registry import make

if TYPE_CHECKING:
    from gspo_hpc.sandbox.runner import Sandbox

_environments: dict[str, Environment] = {}  # by name; a process has one for its whole life
_tools: dict[str, Callable[..., Any]] = {}  # by the name by which the model calls them


def prepare(
    environment: str | None,
    arguments: dict[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    sandbox: Sandbox | None = None,
) -> None:
    """Make this process's object of the environment, and load its tools. Raises whatever that raises.

    Raises SandboxError where a tool asks for the sandbox and there is none.
    """
    if environment is not None and environment not in _environments:
        _environments[environment] = make(environment, arguments)
    for tool in (Tool(**one) for one in tools):
        if toolbox.name_of(tool) not in _tools:
            function = toolbox.load(tool)
            if sandbox is not None and toolbox.asks_for_sandbox(function):
                sandbox.require()
            _tools[toolbox.name_of(tool)] = functools.partial(function, **tool.args)


def environment_turn(
    message: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    environment: str | None,
    arguments: dict[str, Any],
    sandbox: Sandbox,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Answered:
    """Return the answer of an environment to a message, or of a tool to a call. Raises whatever it raises.

    `fields`: those of the data row ("row"), the seed of the conversation and its state, which is None at first; and the
    name and the arguments of a "call". With a "group", the environment scores its conversations.
    """
    prepare(environment, arguments, tools)
    state = fields["state"]
    if (call := fields.get("call")) is not None:
        tool = _tools[call["name"]]
        value = _result(tool(**call["arguments"], **toolbox.given(tool, fields["row"], sandbox)))
        return Answered(Turn(state, toolbox.as_text(value), 0.0, False))
    if environment is None:  # as in a trial of a config that has tools alone
        return Answered(Turn(state, "", 0.0, True))
    made = _environments[environment]
    if (group := fields.get("group")) is not None:
        return Answered(Turn(_scores(made, fields["row"], group), "", 0.0, True))
    if state is None:
        reset = getattr(made, "reset", None)
        state = {} if reset is None else plain(_result(reset(dict(fields["row"]), fields["seed"])))
    return Answered(turn_of(_result(made.step(state, message)), state))


def _scores(made: Environment, row: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the scores of a group; the sums of its rewards where the class turns out to have no method for it."""
    if not hasattr(made, "score_group"):
        return [one["reward"] for one in group]
    return scores_of(_result(made.score_group(dict(row), [dict(one) for one in group])), len(group))


def _result(value: Any) -> Any:
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value
