"""One call of a reward function in this process, whose error or unusable value is a text and not an exception."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gspo_hpc.config.schema import RewardFunction
from gspo_hpc.data.outcomes import Outcome
from gspo_hpc.rewards.catalogue import PREPARATIONS, Graded, Grader, UnparsableGold
from gspo_hpc.rewards.registry import load

LARGEST = 1e30  # a larger reward is a mistake; below, no mean or variance overflows
TEXT = 300  # characters kept of a grader's error message


class Verdict(NamedTuple):
    """The result of one call: a value, or why there is none; and the outcome, if it is known."""

    value: float | None
    failure: str | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Loaded:
    """A reward function with its own arguments."""

    grader: Grader
    takes_length: bool
    args: Mapping[str, Any]

    def call(self, completion: str, response_length: int, prompt: str, fields: dict[str, Any]) -> Verdict:
        """Return the value, or None and why it cannot be used. Raises whatever the function raises."""
        extra = {"response_length": response_length} if self.takes_length else {}
        return _number(self.grader(completion, prompt=prompt, fields=fields, **extra, **self.args))


def loaded(term: RewardFunction) -> Loaded:
    """Return the function, whose file is run. Raises whatever that file raises."""
    grader = load(term.function)
    PREPARATIONS.get(term.function, lambda: None)()
    return Loaded(grader, "response_length" in inspect.signature(grader).parameters, term.args)


def raised(error: BaseException) -> Verdict:
    """Return the verdict of a call that raised an error."""
    outcome: Outcome = "unparsable_gold" if isinstance(error, UnparsableGold) else "failed"
    return Verdict(None, f"raised {error_text(error)}", outcome)


def error_text(error: BaseException) -> str:
    """Return type and message of an error on one line of bounded length, printable anywhere."""
    try:
        message = str(error)
    except Exception:  # an error whose text raises
        message = ""
    line = " ".join(message[: 2 * TEXT].encode("utf-8", "backslashreplace").decode().split())[:TEXT]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _number(value: Any) -> Verdict:
    outcome = value.outcome if isinstance(value, Graded) else None
    if getattr(value, "shape", None) == ():  # a numpy scalar, or a tensor of no dimensions
        value = value.item()
    if not isinstance(value, numbers.Real):
        return Verdict(None, f"returned {type(value).__name__}, not a number", "failed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        return Verdict(None, f"returned {number}: a finite number up to {LARGEST:g} is needed", "failed")
    return Verdict(number, outcome=outcome)
