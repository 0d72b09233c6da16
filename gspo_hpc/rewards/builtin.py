"""The reward functions ("graders") that come with the package: those of numbers and texts; mathematics.py has another.

A reward function is a plain function

    grade(completion: str, *, prompt: str, fields: dict, **args) -> float

`completion` is the sampled text, `prompt` the text that the model saw, `fields` holds the other fields of the data row,
and `args` the arguments from the configuration. A function with a parameter `response_length` also gets the number of
the completion's tokens, end token included. It runs in a process of its own: raising an error costs the sample, never
the run. Imports at the top of its file happen before its time limit starts, imports inside the function count.

To add one to the package, write it here below ``@reward_function``; its name is then valid in the configuration, and
its annotations say which arguments are accepted. No other file changes. Users write theirs in files of their own, given
as path/to/file.py:function; CONTRIBUTING.md has a complete example.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from gspo_hpc.rewards import mathematics as mathematics
from gspo_hpc.rewards.catalogue import ARGUMENT_CHECKS as ARGUMENT_CHECKS
from gspo_hpc.rewards.catalogue import REGISTRY as REGISTRY
from gspo_hpc.rewards.catalogue import ROW_CHECKS, field_of, reward_function
from gspo_hpc.rewards.catalogue import Grader as Grader


def refusal(function: str, args: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    """Return why a built-in function, which takes these arguments, can grade no completion of a row; None if it can."""
    grader = REGISTRY[function]
    if function in ROW_CHECKS:
        try:
            ROW_CHECKS[function](fields, **args)
        except ValueError as error:
            return f"{error}; args: {{answer: FIELD}} names another field"
        return None
    takes = inspect.signature(grader).parameters
    length = {"response_length": 4} if "response_length" in takes else {}
    try:
        grader("The answer is 42.", prompt="", fields=fields, **length, **args)
    except ValueError as error:
        return f"{error}; args: {{answer: FIELD}} names another field" if "answer" in takes else str(error)
    return None


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


@reward_function
def number_match(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    answer: str = "answer",
    position: Literal["last", "first", "any"] = "last",
) -> float:
    """Return 1.0 if the last (first, any) number of the completion equals the field named `answer`, else 0.0.

    The field is a number, or a text whose last number counts. Values are compared exactly: 12 equals 12.0.
    Raises ValueError if the field is missing or holds no number.
    """
    value = field_of(fields, answer)
    plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    wanted = numbers_in(str(value)) if plain else []
    if not wanted:
        raise ValueError(f"field {answer!r} is {value!r}: it must be a number, or text that contains one")
    given = numbers_in(completion)
    if not given:
        return 0.0
    if position == "any":
        return float(wanted[-1] in given)
    return float(given[-1 if position == "last" else 0] == wanted[-1])


@reward_function
def exact_match(
    completion: str, *, prompt: str, fields: Mapping[str, Any], answer: str = "answer", ignore_case: bool = False
) -> float:
    """Return 1.0 if completion and the field named `answer` are the same text, else 0.0.

    White space around both is dropped first. Raises ValueError if the field is missing.
    """
    given, wanted = completion.strip(), str(field_of(fields, answer)).strip()
    return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


def _check_regex(pattern: str, **_: Any) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None


@reward_function(check=_check_regex)
def regex(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    pattern: str,
    mode: Literal["full", "search"] = "full",
) -> float:
    """Return 1.0 if the whole completion (`full`) or any part of it (`search`) matches the pattern, else 0.0.

    The pattern has Python's syntax; flags go into it, as in "(?s)<think>.*</think>.*". White space around the
    completion is dropped first.
    """
    match = re.fullmatch if mode == "full" else re.search
    return float(match(pattern, completion.strip()) is not None)


def _check_length(target: int, limit: int, **_: Any) -> None:
    if not 0 <= target < limit:
        raise ValueError(f"target {target} and limit {limit} do not fit: 0 <= target < limit must hold")


@reward_function(check=_check_length)
def length(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    response_length: int,
    target: int,
    limit: int,
    unit: Literal["tokens", "characters"] = "tokens",
) -> float:
    """Return a penalty on long answers: 0.0 up to `target`, falling linearly to -1.0 at `limit` and beyond."""
    used = response_length if unit == "tokens" else len(completion)
    return -min(1.0, max(0.0, (used - target) / (limit - target)))
