"""Reward functions by name: check that a configuration can call them, and load them in a worker process.

Only :func:`load` executes a user's file, and only worker processes call it; a configuration is checked by reading the
file's syntax tree.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from gspo_hpc.config.derived import decider, term_names
from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Config, Reward, RewardFunction, RewardModel, Rows
from gspo_hpc.config.sections.reward_models import FUNCTION as REWARD_MODEL
from gspo_hpc.data.sources.selection import FIELD
from gspo_hpc.rewards.builtin import ARGUMENT_CHECKS, REGISTRY, Grader
from gspo_hpc.rewards.catalogue import PEER_NAMES, TURN
from gspo_hpc.rewards.judges import PATTERN, TEMPLATE, check_form
from gspo_hpc.system.text import near_miss

# Parameters that every reward function may have beside its own arguments.
ASKED = (  # given to those that have them
    *("response_length", "response_tokens", "group_completions", "group_index", "environment_reward"),
    *("time_limit", "reward_processes", "sandbox", "spending"),
)
RESERVED = ("completion", "completions", "prompt", "fields", *ASKED)
_FUNCTION = "a reward function"
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def part_names(reward: Reward) -> tuple[str, ...]:
    """Return the name of every term in `reward_parts`: the function as configured, "#2" added to its second use."""
    return term_names(["environment" if term.function == TURN else term.function for term in reward.functions])


def source_weights(reward: Reward, source: Rows | None) -> dict[int, float]:
    """Return the weights of the terms that grade the prompts of a source, by their positions.

    By default these are all terms, but for those that grade only where they are named.
    """
    if source is None or source.rewards is None:
        return {number: term.weight for number, term in enumerate(reward.functions) if not term.only_named}
    names = {name: number for number, name in enumerate(part_names(reward))}
    given = {names[name]: float(weight) for name, weight in source.rewards.items() if name in names}
    return dict(sorted(given.items()))


class FunctionWeights:
    """The weights of the terms that are functions, for the prompts of each source: reward models score the others."""

    def __init__(self, reward: Reward, sources: Sequence[Rows]) -> None:
        self._by_source = {one.name: _of_functions(reward, one) for one in sources}
        self._others = _of_functions(reward, None)

    def of(self, fields: Mapping[str, Any]) -> dict[int, float]:
        """Return the weights by term for a prompt with these fields, of which one names its source."""
        return self._by_source.get(fields.get(FIELD, ""), self._others)


def _of_functions(reward: Reward, source: Rows | None) -> dict[int, float]:
    found = source_weights(reward, source)
    return {term: weight for term, weight in found.items() if reward.functions[term].function != REWARD_MODEL}


def grading_terms(config: Config, source: Rows | None, *, trains: bool) -> dict[str, int]:
    """Return the positions of the reward functions that have to grade the rows of a source, by name.

    Of rows to evaluate on it is the one that decides: they may lack what only training asks for.
    """
    names, decides = part_names(config.reward), decider(config, source)
    weights = source_weights(config.reward, source)
    return {names[number]: number for number in weights if trains or names[number] == decides}


def clipped(value: float, term: RewardFunction) -> float:
    """Return a value of a term within its `clip_range`."""
    if term.clip_range is None:
        return value
    low, high = term.clip_range
    return min(max(value, low), high)


def time_limit(reward: Reward, term: int) -> tuple[float, str]:
    """Return how many seconds a call of a term may take, and what says so."""
    own = reward.functions[term].timeout
    if reward.functions[term].function == TURN:
        return reward.timeout, "environment.timeout"
    return (reward.timeout, "reward.timeout") if own is None else (own, "timeout of the function")


def check(reward: Reward) -> None:
    """Raise ValueError with all mistakes of the configuration at once: names, files, arguments, weights."""
    mistakes = (
        [] if reward.functions else [f"give at least one of {', '.join(sorted(REGISTRY))}, or path/to/file.py:function"]
    )
    if reward.workers < 1:
        mistakes.append(f"reward.workers is {reward.workers}: it must be at least 1")
    if not (math.isfinite(reward.timeout) and reward.timeout > 0):
        mistakes.append(f"reward.timeout is {reward.timeout}: it must be more than 0 seconds")
    mistakes += [f"{name}: {text}" for name, text, _ in wrong_terms(reward).values()]
    if mistakes:
        raise ValueError("reward.functions: " + "\n  ".join(mistakes))


class Mistake(NamedTuple):
    """The reason why a function cannot be called as configured."""

    name: str
    text: str
    absent: bool  # its file is not on this machine, and may be where the run will be


def wrong_terms(reward: Reward) -> dict[int, Mistake]:
    """Return what is wrong with each function that cannot be called, by its position."""
    found = {}
    for number, (name, term) in enumerate(zip(part_names(reward), reward.functions, strict=True)):
        try:
            _check_term(term)
            _check_model(reward.model_of(term))
        except ValueError as mistake:
            found[number] = Mistake(name, str(mistake), isinstance(mistake, own_code.FileAbsent))
    return found


def is_batched(signature: inspect.Signature) -> bool:
    """Return whether a function of this signature grades a group in one call: its first parameter is `completions`."""
    return next(iter(signature.parameters), "") == "completions"


def asks_for_group(signature: inspect.Signature) -> bool:
    """Return whether a function of this signature grades one completion, and sees the others of its group."""
    return "group_completions" in signature.parameters or "group_index" in signature.parameters


def asks_for_sandbox(reward: Reward) -> bool:
    """Tell whether a reward function asks for the sandbox. No file is run; raises ValueError as `check` does."""
    return bool(terms_with(reward, lambda signature: "sandbox" in signature.parameters))


def asks_endpoints(reward: Reward) -> bool:
    """Tell whether a reward function notes its requests in the account of the run. No file is run."""
    return bool(terms_with(reward, lambda signature: "spending" in signature.parameters))


def terms_with(reward: Reward, wanted: Callable[[inspect.Signature], bool]) -> frozenset[int]:
    """Return the positions of the functions whose signature is as wanted. No file is run."""
    signatures = [
        own_code.signature(*own_code.split(term.function, _FUNCTION), may_be_async=True)
        if own_code.is_file(term.function)
        else inspect.signature(_named(term.function))
        for term in reward.functions
    ]
    return frozenset(number for number, signature in enumerate(signatures) if wanted(signature))


def load(function: str) -> Grader:
    """Return the reward function of a registered name or path/to/file.py:function.

    It runs the user's file, so only worker processes call it. Raises whatever that file raises, and TypeError
    where the name is no function.
    """
    if not own_code.is_file(function):
        return _named(function)
    grader = own_code.load(*own_code.split(function, _FUNCTION))
    if not callable(grader):
        raise TypeError(f"{function} is {type(grader).__name__}, not a function")
    found: Grader = grader
    return found


def _named(function: str) -> Grader:
    if function != TURN:
        return REGISTRY[function]
    from gspo_hpc.rewards.environments.answering import environment_turn

    return environment_turn


def _check_term(term: RewardFunction) -> None:
    if not (isinstance(term.weight, int | float) and math.isfinite(term.weight)):
        raise ValueError(f"weight {term.weight!r} is not a finite number")
    if term.clip_range is not None and not term.clip_range[0] < term.clip_range[1]:
        raise ValueError(f"clip_range is [{', '.join(f'{one:g}' for one in term.clip_range)}]: low must be below high")
    if own_code.is_file(term.function):
        path, name = own_code.split(term.function, _FUNCTION)
        _check_arguments(own_code.signature(path, name, may_be_async=True), term.args)
        return
    if term.function == TURN:
        return
    if term.function not in REGISTRY:
        raise ValueError(f"there is no such reward function{_unknown(term.function)}")
    _check_arguments(inspect.signature(REGISTRY[term.function], eval_str=True), term.args)
    if term.function in ARGUMENT_CHECKS:
        ARGUMENT_CHECKS[term.function](**term.args)


def _check_model(model: RewardModel | None) -> None:
    """Raise ValueError where a generative model is asked in a way that gives no score."""
    if model is not None and model.kind == "generative":
        template, pattern = model.template, model.pattern
        check_form(TEMPLATE if template is None else template, PATTERN if pattern is None else pattern)


def _unknown(name: str) -> str:
    """Return what to write instead of a name that no function has, as the end of a sentence."""
    here = f"; here it is {PEER_NAMES[name]}" if name in PEER_NAMES else near_miss(name, sorted(REGISTRY), known=True)
    return f"{here}. Give one of your own as path/to/file.py:function"


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
    given |= {name: None for name in ASKED if name in parameters}
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
