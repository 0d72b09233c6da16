"""The outcomes that a grader can find; without numpy, because the processes of reward functions import it."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

# "unparsable": the completion has no answer; "unparsable_gold": that of the data row cannot be read; "timed_out" and
# "failed": the grader gave none; "over_budget": it might have asked nobody any more. Of programs that were run:
# "not_compiled", "crashed", "too_slow".
Outcome = Literal[
    "right",
    "wrong",
    "unparsable",
    "unparsable_gold",
    "timed_out",
    "failed",
    "not_compiled",
    "crashed",
    "too_slow",
    "over_budget",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class OverBudget(ValueError):
    """The budget of judges does not allow for another request."""


# Of a call of a tool. "unknown": there is no such tool; "malformed": no JSON, or arguments that it does not take.
CallOutcome = Literal["done", "unknown", "malformed", "failed", "timed_out"]
CALL_OUTCOMES: tuple[CallOutcome, ...] = get_args(CallOutcome)


class CallRecord(NamedTuple):
    """A call of a tool, with what the model sees of it."""

    name: str
    result: str
    outcome: CallOutcome
