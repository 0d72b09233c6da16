"""The graders that come with the package.

Floor 2, standard library only. A grader is a plain function

    grade(completion: str, *, prompt: str, fields: dict, **args) -> float

`completion` is the sampled text, `prompt` what the model saw, `fields` the other fields of the data row, `args` what
the config gives for this grader. One that also names a parameter `response_length` is told the completion's tokens, end
token included. It runs in a process of its own; raising costs the sample, never the run. What it imports at
the top of its file is loaded before its time is counted, what it imports in the call is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

Grader = Callable[..., float]

# A minus is a sign only where it cannot be an operator: "7-5" holds 7 and 5. Commas group thousands ("1,234" is one
# number, "1, 2" two); digits inside a word ("x2") are no number; the point that ends a sentence is no decimal point.
_NUMBER = re.compile(
    r"(?P<sign>(?<![A-Za-z0-9_)\]])[-+\u2212](?:\\?[$€£])?)?"
    r"(?P<body>(?<![A-Za-z0-9_])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])\.\d+)"
)


def numbers_in(text: str) -> list[Decimal]:
    """All numbers of a text, in order, exact: "costs $1,234.50." holds 1234.50. U+2212 counts as a minus."""
    found = []
    for match in _NUMBER.finditer(text):
        sign = "-" if (match["sign"] or "")[:1] in ("-", "\u2212") else ""
        try:
            found.append(Decimal(sign + match["body"].replace(",", "")))
        except InvalidOperation:  # an exponent beyond what a Decimal holds
            continue
    return found


def number_match(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    answer: str = "answer",
    position: Literal["last", "first", "any"] = "last",
) -> float:
    """1.0 if the last (first, any) number of the completion equals the field named `answer`, else 0.0.

    The field is a number, or a text whose last number counts. Values are compared exactly: 12 equals 12.0.
    Raises ValueError if the field is missing or holds no number.
    """
    value = _field(fields, answer)
    plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    wanted = numbers_in(str(value)) if plain else []
    if not wanted:
        raise ValueError(f"field {answer!r} is {value!r}: neither a number nor a text that holds one")
    given = numbers_in(completion)
    if not given:
        return 0.0
    if position == "any":
        return float(wanted[-1] in given)
    return float(given[-1 if position == "last" else 0] == wanted[-1])


def exact_match(
    completion: str, *, prompt: str, fields: Mapping[str, Any], answer: str = "answer", ignore_case: bool = False
) -> float:
    """1.0 if completion and the field named `answer` are the same text, white space around both aside, else 0.0."""
    given, wanted = completion.strip(), str(_field(fields, answer)).strip()
    return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


def regex(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    pattern: str,
    mode: Literal["full", "search"] = "full",
) -> float:
    """1.0 if the whole completion (`full`) or any part of it (`search`) matches the pattern, else 0.0.

    Python's syntax; flags go into the pattern, as in "(?s)<think>.*</think>.*". White space around the completion is
    dropped first.
    """
    match = re.fullmatch if mode == "full" else re.search
    return float(match(pattern, completion.strip()) is not None)


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
    """A penalty on long answers: 0.0 up to `target`, falling in a straight line to -1.0 at `limit` and beyond."""
    used = response_length if unit == "tokens" else len(completion)
    return -min(1.0, max(0.0, (used - target) / (limit - target)))


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"the data row has no field {name!r}; it has: {', '.join(sorted(fields)) or 'none'}")
    return fields[name]


def _check_regex(pattern: str, **_: Any) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None


def _check_length(target: int, limit: int, **_: Any) -> None:
    if not 0 <= target < limit:
        raise ValueError(f"target {target} and limit {limit}: need 0 <= target < limit")


REGISTRY: dict[str, Grader] = {
    "number_match": number_match,
    "exact_match": exact_match,
    "regex": regex,
    "length": length,
}
# What the types of the arguments do not tell: called with a grader's arguments before a run starts.
ARGUMENT_CHECKS: dict[str, Callable[..., None]] = {"regex": _check_regex, "length": _check_length}
