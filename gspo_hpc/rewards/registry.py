"""Reward functions by name: check that a configuration can call them, and load them in a worker process.

Only :func:`load` executes a user's file, and only worker processes call it; a configuration is checked by reading the
file's syntax tree.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.rewards.builtin import ARGUMENT_CHECKS, REGISTRY, Grader
from gspo_hpc.runs import snapshot
from gspo_hpc.system.text import near_miss

# Parameters that every reward function may have beside its own arguments.
RESERVED = ("completion", "prompt", "fields", "response_length")
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def part_names(reward: Reward) -> tuple[str, ...]:
    """Return the name of every term in `reward_parts`: the function as configured, "#2" added to its second use."""
    names: list[str] = []
    for term in reward.functions:
        uses = sum(other.function == term.function for other in reward.functions[: len(names)])
        names.append(f"{term.function}#{uses + 1}" if uses else term.function)
    return tuple(names)


def check(reward: Reward) -> None:
    """Raise ValueError with all mistakes of the configuration at once: names, files, arguments, weights."""
    mistakes = [] if reward.functions else [f"give at least one of {', '.join(REGISTRY)}, or path/to/file.py:function"]
    if reward.workers < 1:
        mistakes.append(f"reward.workers is {reward.workers}: it must be at least 1")
    if not (math.isfinite(reward.timeout) and reward.timeout > 0):
        mistakes.append(f"reward.timeout is {reward.timeout}: it must be more than 0 seconds")
    for name, term in zip(part_names(reward), reward.functions, strict=True):
        try:
            _check_term(term)
        except ValueError as mistake:
            mistakes.append(f"{name}: {mistake}")
    if mistakes:
        raise ValueError("reward.functions: " + "\n  ".join(mistakes))


def unknown(reward: Reward) -> dict[int, str]:
    """Return what is wrong with each function that cannot be called, by its position.

    A file that is not there is not wrong: a config can be planned where its files are not (:func:`absent`).
    """
    found, without = {}, absent(reward)
    for number, term in enumerate(reward.functions):
        if not _is_file(term.function) and term.function not in REGISTRY:
            found[number] = f"is {term.function!r}, which is not built in{_unknown(term.function)}"
        elif number not in without:
            try:
                _check_term(term)
            except ValueError as mistake:
                found[number] = f"is {term.function!r}: {mistake}"
    return found


def absent(reward: Reward) -> dict[int, str]:
    """Return the files of functions that are not there, by the position of the function."""
    paths = ((number, snapshot.grader_file(term.function)) for number, term in enumerate(reward.functions))
    return {number: str(path) for number, path in paths if path is not None and not snapshot.source(path).exists()}


def load(function: str) -> Grader:
    """Return the reward function of a registered name or path/to/file.py:function.

    It runs the user's file, so only worker processes call it. Raises whatever that file raises, and TypeError
    where the name is no function.
    """
    if not _is_file(function):
        return REGISTRY[function]
    path, name = _split(function)
    key = f"_grader:{path.resolve()}"
    if key not in sys.modules:
        spec = snapshot.grader_spec(key, path)
        assert spec.loader is not None
        module = sys.modules[key] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
        sys.path.append(str(path.resolve().parent))  # the file may import its neighbours
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    grader = getattr(sys.modules[key], name)
    if not callable(grader):
        raise TypeError(f"{function} is {type(grader).__name__}, not a function")
    return grader


def _check_term(term: RewardFunction) -> None:
    if not (isinstance(term.weight, int | float) and math.isfinite(term.weight)):
        raise ValueError(f"weight {term.weight!r} is not a finite number")
    if _is_file(term.function):
        path, name = _split(term.function)
        _check_arguments(_signature_in_file(path, name), term.args)
        return
    if term.function not in REGISTRY:
        raise ValueError(f"there is no such reward function{_unknown(term.function)}")
    _check_arguments(inspect.signature(REGISTRY[term.function], eval_str=True), term.args)
    if term.function in ARGUMENT_CHECKS:
        ARGUMENT_CHECKS[term.function](**term.args)


def _unknown(name: str) -> str:
    """Return what to write instead of a name that no function has, as the end of a sentence."""
    return f"{near_miss(name, sorted(REGISTRY), known=True)}. Give one of your own as path/to/file.py:function"


def _check_arguments(signature: inspect.Signature, args: Mapping[str, Any]) -> None:
    """Raise ValueError if a function of this signature cannot take these arguments, as far as its annotations show."""
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    own = [name for name in list(parameters)[1:] if name not in RESERVED and parameters[name].kind in _BY_NAME]
    for name, value in args.items():
        if name in RESERVED or (name not in own and not takes_any):
            raise ValueError(f"unknown argument {name!r}{near_miss(name, own, known=True)}")
        if name in parameters and not _fits(value, parameters[name].annotation):
            raise ValueError(f"argument {name} is {value!r}: it must be {_describe(parameters[name].annotation)}")
    given = {"prompt": "", "fields": {}, **args}
    if "response_length" in parameters:
        given["response_length"] = 0
    try:
        signature.bind("", **given)
    except TypeError as error:
        raise ValueError(
            f"cannot be called with these arguments: {error}. "
            "A reward function has the form f(completion, *, prompt, fields, ...its own arguments)"
        ) from None


def _fits(value: Any, annotation: Any) -> bool:
    """Return True if a value has the type that an annotation names; only plain types and Literal are checked."""
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if annotation in (int, float) and isinstance(value, bool):
        return False
    if annotation is float:
        return isinstance(value, int | float)
    return isinstance(value, annotation) if annotation in (int, str, bool) else True


def _describe(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(repr(choice) for choice in get_args(annotation))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[annotation]


def _signature_in_file(path: Path, name: str) -> inspect.Signature:
    """Return the signature of a function at the top level of a file, without running it and without annotations."""
    try:
        tree = ast.parse(snapshot.source(path).read_bytes(), filename=str(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; relative paths begin at {os.getcwd()}") from None
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{path} is not Python: {getattr(error, 'msg', error)}{line}") from None
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in defined:
        raise ValueError(
            f"{path} has no function {name!r} at its top level{near_miss(name, sorted(defined), known=True)}"
        )
    return _signature(defined[name].args)


def _signature(arguments: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if i < required else None,
        )
        for i, argument in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _is_file(function: str) -> bool:
    return ":" in function or function.endswith(".py")


def _split(function: str) -> tuple[Path, str]:
    path, _, name = function.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError("a reward function of your own must be given as path/to/file.py:function")
    return Path(path).expanduser(), name
