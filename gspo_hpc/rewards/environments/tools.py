"""Tools that the model calls in a conversation: their names and schemas, and what becomes of a call.

A call runs in a process of the environment's pool, one process a call, so several calls of a message run side by side,
each with its own time limit. Whatever goes wrong with one is told to the model as the tool's result, and counted.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Environment, Tool
from gspo_hpc.data.outcomes import CallOutcome, CallRecord
from gspo_hpc.rewards.environments import schemas, tool_calls
from gspo_hpc.rewards.environments.calculator import calculator
from gspo_hpc.rewards.environments.python_tool import python
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.system.text import near_miss, shortened

if TYPE_CHECKING:
    from gspo_hpc.sandbox.runner import Sandbox

REGISTRY: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}
_WHAT = "a tool"
_MOST_NAME = 64  # characters of a name that a model gives, as in the interface of OpenAI
_MOST_ERROR = 1000  # characters of what a model is told of a call that went wrong
# Parameters of which the model is not told: the fields of the data row, and the sandbox for programs.
_FIELDS, _SANDBOX = "fields", "sandbox"


@dataclass(frozen=True)
class Toolbox:
    """The tools of a config, and the form in which the model calls them."""

    settings: Environment
    parser: str
    _by_name: dict[str, dict[str, Any]] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def of(cls, settings: Environment, template: str) -> Toolbox:
        """Return the tools for a chat template. Raises ValueError where it asks for calls in a form unknown here."""
        if not re.search(r"\btools\b", template):
            raise ValueError(
                "the chat template does not show tools to the model: take a model whose template does, or give a "
                "template by data.chat_template_kwargs"
            )
        parser = tool_calls.asked_for(template) if settings.tool_parser == "auto" else settings.tool_parser
        if parser is None:
            raise ValueError(
                "the chat template asks for tool calls in a form that is not known here; give one of "
                f"{', '.join(tool_calls.PARSERS)} as environment.tool_parser, and a template that fits by "
                "data.chat_template_kwargs"
            )
        return cls(settings, parser)

    @cached_property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The JSON Schema of each tool's parameters, by the tool's name."""
        return {one["function"]["name"]: one["function"]["parameters"] for one in shown(self.settings)}

    def calls(self, text: str) -> list[CallRecord | tool_calls.Call]:
        """Return the calls in a message; those that cannot be made have their results already."""
        found: list[CallRecord | tool_calls.Call] = []
        for number, call in enumerate(map(self._typed, tool_calls.PARSERS[self.parser](text))):
            if number >= self.settings.max_calls:
                most = self.settings.max_calls
                found.append(_wrong(call.name, "failed", f"only the first {most} calls of a message are made"))
            elif call.error is not None:
                found.append(_wrong(call.name, "malformed", call.error))
            elif call.name not in self.parameters:
                near = near_miss(call.name, list(self.parameters), known=True)
                found.append(_wrong(call.name, "unknown", f"there is no tool {_name(call.name)!r}{near}"))
            elif (why := schemas.misfit(call.arguments, self.parameters[call.name])) is not None:
                found.append(_wrong(call.name, "malformed", why))
            else:
                found.append(call)
        return found

    def _typed(self, call: tool_calls.Call) -> tool_calls.Call:
        """Return a call whose arguments were written as texts with the values that they stand for."""
        if not call.texts or call.name not in self.parameters:
            return call
        arguments = {
            name: schemas.value(text, self.parameters[call.name], name) for name, text in call.arguments.items()
        }
        return tool_calls.Call(call.name, arguments, call.error)

    def result(self, call: tool_calls.Call, result: RewardResult) -> CallRecord:
        """Return what came of a call that was made."""
        if result.turn is None:
            outcome: CallOutcome = "timed_out" if "timed_out" in result.outcomes.values() else "failed"
            why = (result.failure or "no answer").removeprefix("environment: ").removeprefix("raised ")
            return _wrong(call.name, outcome, why)
        text, most = result.turn.reply, self.settings.max_result
        if len(text) > most:
            text = f"{text[:most]}\n[cut off: {most:,} of {len(text):,} characters]"
        return CallRecord(call.name, text, "done")


def _wrong(name: str, outcome: CallOutcome, why: str) -> CallRecord:
    # What the model wrote may be long, and hold halves of characters, which no tokenizer takes.
    told = _name(name), shortened(f"Error: {why}", _MOST_ERROR)
    plain, error = (text.encode("utf-8", "replace").decode() for text in told)
    return CallRecord(plain, error, outcome)


def _name(name: str) -> str:
    """Return the name of a tool as the model gave it, of which no more is told than any tool's may have."""
    return shortened(name, _MOST_NAME)


def check(settings: Environment) -> None:
    """Raise ValueError for a tool that is not there or cannot be called; FileAbsent for one whose file is not here."""
    names = [name_of(tool) for tool in settings.tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two tools are called {twice[0]}")
    shown(settings)


def shown(settings: Environment) -> list[dict[str, Any]]:
    """Return the tools as chat templates show them to a model. No file is run. Raises what :func:`check` does."""
    return [{"type": "function", "function": _declared(tool)} for tool in settings.tools]


def name_of(tool: Tool) -> str:
    """Return the name by which the model calls a tool."""
    return tool.function.rpartition(":")[2]


def load(tool: Tool) -> Callable[..., Any]:
    """Return the function of a tool. It runs a user's file: raises whatever that raises."""
    if own_code.is_file(tool.function):
        found = own_code.load(*own_code.split(tool.function, _WHAT))
        if not callable(found):
            raise TypeError(f"{tool.function} is {type(found).__name__}, not a function")
        return found  # type: ignore[no-any-return]
    return REGISTRY[tool.function]


def given(function: Callable[..., Any], fields: Mapping[str, Any], sandbox: Sandbox) -> dict[str, Any]:
    """Return what a tool gets beside its arguments: the fields of the data row and the sandbox, if it asks for them."""
    takes = inspect.signature(function).parameters
    return {name: value for name, value in ((_FIELDS, dict(fields)), (_SANDBOX, sandbox)) if name in takes}


def asks_for_sandbox(function: Callable[..., Any]) -> bool:
    """Tell whether a tool has a parameter for the sandbox."""
    return _SANDBOX in inspect.signature(function).parameters


def any_asks_for_sandbox(settings: Environment) -> bool:
    """Tell whether a tool runs programs in the sandbox. No file is run; raises ValueError for one that is not there."""
    nodes = map(_definition, settings.tools)
    return any(one.arg == _SANDBOX for node in nodes for one in (*node.args.args, *node.args.kwonlyargs))


def as_text(value: Any) -> str:
    """Return what a tool returned as the model sees it: text as it is, anything else as JSON. Raises TypeError."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def _declared(tool: Tool) -> dict[str, Any]:
    node = _definition(tool)
    every = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
    if wrong := [name for name in tool.args if name not in every]:
        text = f"{tool.function} has no parameter {wrong[0]!r}{near_miss(wrong[0], every, known=True)}"
        raise ValueError(text)
    found = schemas.declared(node, frozenset({_FIELDS, _SANDBOX, *tool.args}))
    own = {"description": tool.description, "parameters": tool.parameters}
    return found | {name: value for name, value in own.items() if value}


def _definition(tool: Tool) -> ast.FunctionDef | ast.AsyncFunctionDef:
    if own_code.is_file(tool.function):
        return own_code.definition(*own_code.split(tool.function, _WHAT), may_be_async=True)
    if tool.function not in REGISTRY:
        near = near_miss(tool.function, sorted(REGISTRY), known=True)
        raise ValueError(
            f"there is no such tool: {tool.function}{near}. Give one of your own as path/to/file.py:function"
        )
    (node,) = ast.parse(inspect.getsource(REGISTRY[tool.function])).body
    assert isinstance(node, ast.FunctionDef)
    return node
