"""The reward functions ("graders") that come with the package: those of numbers and of exact text stand here.

Files beside this one have the others: mathematics.py, choices.py, formats.py, gym.py, texts.py, judges.py and
programs/code.py; models/function.py has the one that engines of the run score. All are imported here.

A reward function is a plain function

    grade(completion: str, *, prompt: str, fields: dict, **args) -> float

`completion` is the sampled text, `prompt` the text that the model saw, `fields` holds the other fields of the data row,
and `args` the arguments from the configuration. A function with a parameter `response_length` also gets the number of
the completion's tokens, end token included. It runs in a process of its own: raising an error costs the sample, never
the run. Imports at the top of its file happen before its time limit starts, imports inside the function count.

To add one to the package, write it here or in such a file below ``@reward_function``; its name is then valid in the
configuration, and its annotations say which arguments are accepted. No other file changes. Users write theirs in files
of their own, given as path/to/file.py:function; CONTRIBUTING.md has a complete example.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Container, Mapping
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Literal

from gspo_hpc.rewards import choices as choices
from gspo_hpc.rewards import gym as gym
from gspo_hpc.rewards import judges as judges
from gspo_hpc.rewards import mathematics as mathematics
from gspo_hpc.rewards import texts as texts
from gspo_hpc.rewards.catalogue import ANSWERS as ANSWERS
from gspo_hpc.rewards.catalogue import ARGUMENT_CHECKS as ARGUMENT_CHECKS
from gspo_hpc.rewards.catalogue import REGISTRY as REGISTRY
from gspo_hpc.rewards.catalogue import ROW_CHECKS, field_of, reward_function
from gspo_hpc.rewards.catalogue import Grader as Grader
from gspo_hpc.rewards.formats import check_tag, section
from gspo_hpc.rewards.models import function as function
from gspo_hpc.rewards.programs import code as code


def refusal(function: str, args: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    """Return why a built-in function, which takes these arguments, can grade no completion of a row; None if it can."""
    grader = REGISTRY[function]
    takes = inspect.signature(grader).parameters
    if function in ROW_CHECKS:
        try:
            ROW_CHECKS[function](fields, **args)
        except ValueError as error:
            return _with_hint(error, takes)
        return None
    length = {"response_length": 4} if "response_length" in takes else {}
    try:
        grader("The answer is 42.", prompt="", fields=fields, **length, **args)
    except ValueError as error:
        return _with_hint(error, takes)
    return None


def _with_hint(error: ValueError, takes: Container[str]) -> str:
    """Return the text of an error, and which argument may help."""
    return f"{error}; args: {{answer: FIELD}} names another field" if "answer" in takes else str(error)


# A minus is a sign only where it cannot be an operator: "7-5" holds 7 and 5. Commas group thousands ("1,234" is one
# number, "1, 2" two); digits inside a word ("x2") are no number; the point that ends a sentence is no decimal point.
_NUMBER = re.compile(
    r"(?P<sign>(?<![A-Za-z0-9_)\]])[-+\u2212](?:\\?[$€£])?)?"
    r"(?P<body>(?<![A-Za-z0-9_])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])\.\d+)"
)


def numbers_in(text: str) -> list[Decimal]:
    """Return all numbers of a text, in order and exact: "costs $1,234.50." holds 1234.50. U+2212 counts as a minus."""
    found = []
    for match in _NUMBER.finditer(text):
        sign = "-" if (match["sign"] or "")[:1] in ("-", "\u2212") else ""
        try:
            found.append(Decimal(sign + match["body"].replace(",", "")))
        except InvalidOperation:  # an exponent beyond what a Decimal holds
            continue
    return found


# Exact enough for any number of a text; differences beyond what a Decimal holds are infinite, not an error.
_ARITHMETIC = Context(prec=60, traps=[])


def _check_numbers(rel_tol: float = 0.0, abs_tol: float = 0.0, tag: str = "", **_: Any) -> None:
    for name, value in (("rel_tol", rel_tol), ("abs_tol", abs_tol)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}: it must be a finite number, at least 0")
    check_tag(tag)


def _number_answered(
    completion: str, *, position: Literal["last", "first", "any"] = "last", tag: str = "", **_: Any
) -> str | None:
    given = numbers_in(section(completion, tag) or "")
    if position != "any":
        given = given[-1:] if position == "last" else given[:1]
    return " ".join(sorted({str(one.normalize(_ARITHMETIC)) for one in given})) or None


@reward_function(check=_check_numbers, answered=_number_answered)
def number_match(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    answer: str = "answer",
    position: Literal["last", "first", "any"] = "last",
    rel_tol: float = 0.0,
    abs_tol: float = 0.0,
    tag: str = "",
) -> float:
    """Return 1.0 if the last (first, any) number of the completion equals the field named `answer`, else 0.0.

    The field is a number, or a text whose last number counts. Values are compared exactly: 12 equals 12.0. With a
    tolerance, numbers are equal that differ from the right one by at most `abs_tol`, or by at most `rel_tol` times it.
    With `tag`, only the last <tag>...</tag> of the completion is read.
    Raises ValueError if the field is missing or holds no number.
    """
    value = field_of(fields, answer)
    plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    wanted = numbers_in(str(value)) if plain else []
    if not wanted:
        raise ValueError(f"field {answer!r} is {value!r}: it must be a number, or text that contains one")
    given = numbers_in(section(completion, tag) or "")
    if position != "any":
        given = given[-1:] if position == "last" else given[:1]
    return float(any(_equal(one, wanted[-1], rel_tol, abs_tol) for one in given))


def _equal(given: Decimal, wanted: Decimal, rel_tol: float, abs_tol: float) -> bool:
    if given == wanted or not (rel_tol or abs_tol):
        return given == wanted
    # Tolerances as they are written: 0.1 is a tenth, not the binary fraction next to it.
    allowed = max(_ARITHMETIC.multiply(Decimal(str(rel_tol)), wanted.copy_abs()), Decimal(str(abs_tol)))
    return _ARITHMETIC.subtract(given, wanted).copy_abs() <= allowed


def _check_exact(tag: str = "", **_: Any) -> None:
    check_tag(tag)


@reward_function(check_row=lambda fields, **args: None)
def environment(
    completion: str, *, prompt: str, fields: Mapping[str, Any], environment_reward: float | None = None
) -> float:
    """Return the reward of the conversation: the sum of what its environment gave for each turn.

    Raises NotImplementedError without an environment (environment.name).
    """
    if environment_reward is None:
        raise NotImplementedError("there is no environment: set environment.name")
    return environment_reward


def _text_answered(completion: str, *, ignore_case: bool = False, tag: str = "", **_: Any) -> str | None:
    found = (section(completion, tag) or "").strip()
    return (found.casefold() if ignore_case else found) or None


@reward_function(check=_check_exact, answered=_text_answered)
def exact_match(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    answer: str = "answer",
    ignore_case: bool = False,
    tag: str = "",
) -> float:
    """Return 1.0 if completion and the field named `answer` are the same text, else 0.0.

    White space around both is dropped first. With `tag`, only the last <tag>...</tag> of the completion is compared.
    Raises ValueError if the field is missing.
    """
    wanted, found = str(field_of(fields, answer)).strip(), section(completion, tag)
    if found is None:
        return 0.0
    given = found.strip()
    return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)
