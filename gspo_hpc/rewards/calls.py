"""One call of a reward function in this process, whose error or unusable value is a text and not an exception."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_hpc.config.schema import RewardFunction
from gspo_hpc.config.schema import Sandbox as SandboxSettings
from gspo_hpc.data.outcomes import OUTCOMES, Outcome, OverBudget
from gspo_hpc.rewards.catalogue import PREPARATIONS, TURN, Answered, Graded, Grader, Turn, UnparsableGold
from gspo_hpc.rewards.registry import load

if TYPE_CHECKING:
    from gspo_hpc.runs.spending import Spending
    from gspo_hpc.sandbox.runner import Sandbox

LARGEST = 1e30  # a larger reward is a mistake; below, no mean or variance overflows
# Errors of a function's code, which the next call makes again. Others may come from a service that fails for a while.
MISTAKES = (TypeError, NameError, AttributeError, NotImplementedError, ImportError, SyntaxError)
ENVIRONMENT = "environment"  # the reward function that gives a conversation what its environment gave
TEXT = 300  # characters kept of a grader's error message


class Verdict(NamedTuple):
    """The result of one call: a value, or why there is none; the outcome, if it is known; whether it may pass."""

    value: float | None
    failure: str | None = None
    outcome: Outcome | None = None
    may_pass: bool = True  # False for a failure that another call would repeat
    seconds: float = 0.0  # that the call took, of a process without an answer its time limit or 0
    turn: Turn | None = None  # of a call of an environment: its answer


@dataclass(frozen=True)
class Sampled:
    """A completion as a reward function may ask for it."""

    text: str
    length: int  # in tokens, end token included
    tokens: tuple[int, ...] = ()  # their ids
    environment_reward: float | None = None  # of a conversation, the sum over its turns; None where it failed
    failure: str | None = None  # why the environment failed


@dataclass(frozen=True)
class Loaded:
    """A reward function, its arguments, its time limit in seconds, and how many processes of the run call it.

    `sandbox` is there if it asks for one; `spending`, if its requests count, as they do in a pool.
    """

    grader: Grader
    takes: frozenset[str]  # names of its parameters
    args: Mapping[str, Any]
    time_limit: float
    processes: int
    sandbox: Sandbox | None
    spending: Spending | None = None

    def call(self, group: Sequence[Sampled], index: int, prompt: str, fields: dict[str, Any]) -> Verdict:
        """Return the verdict on one completion of a group. Raises whatever the function raises."""
        one = group[index]
        if one.failure is not None and "environment_reward" in self.takes:
            return Verdict(None, one.failure, "failed", may_pass=False)
        offers = {
            "environment_reward": one.environment_reward,
            "response_length": one.length,
            "response_tokens": list(one.tokens),
            "group_completions": [each.text for each in group],
            "group_index": index,
        }
        return _number(self._result(one.text, offers, prompt, fields))

    def call_batched(self, group: Sequence[Sampled], prompt: str, fields: dict[str, Any]) -> list[Verdict]:
        """Return the verdicts of a batched function on a whole group. Raises whatever the function raises."""
        offers = {
            "environment_reward": [one.environment_reward for one in group],
            "response_length": [one.length for one in group],
            "response_tokens": [list(one.tokens) for one in group],
        }
        values = self._result([one.text for one in group], offers, prompt, fields)
        if isinstance(values, str | bytes | Mapping) or not (
            hasattr(values, "__len__") and hasattr(values, "__iter__")
        ):
            raise TypeError(f"returned {type(values).__name__}, not a list of {len(group)} numbers")
        if len(values) != len(group):
            raise TypeError(f"returned {len(values)} values for {len(group)} completions")
        return [_number(value) for value in values]

    def _result(self, given: str | list[str], offers: Mapping[str, Any], prompt: str, fields: dict[str, Any]) -> Any:
        own = {"time_limit": self.time_limit, "reward_processes": self.processes}
        offers = {**offers, **own, "sandbox": self.sandbox, "spending": self.spending}
        extra = {name: value for name, value in offers.items() if name in self.takes}
        value: Any = self.grader(given, prompt=prompt, fields=fields, **extra, **self.args)
        if not inspect.isawaitable(value):
            return value
        import asyncio  # here: commands that only check a config need not wait for it

        return asyncio.run(_awaited(value))


async def _awaited(value: Any) -> Any:
    return await value


def loaded(
    term: RewardFunction,
    *,
    time_limit: float = 10.0,
    processes: int = 1,
    sandbox: SandboxSettings | None = None,
    spending: Spending | None = None,
) -> Loaded:
    """Return the function, whose file is run. Raises whatever that file raises.

    Raises SandboxError where it, or a tool, asks for a sandbox and none can be used here.
    """
    grader, made = load(term.function), None
    takes = frozenset(inspect.signature(grader).parameters)
    if "sandbox" in takes:
        from gspo_hpc.sandbox.runner import Sandbox  # here: most functions need it no more than asyncio

        made = Sandbox(sandbox)
    PREPARATIONS.get(term.function, lambda: None)()
    if term.function == TURN:
        from gspo_hpc.rewards.environments.answering import prepare

        prepare(**term.args, sandbox=made)  # before any time limit begins
    elif made is not None:
        made.require()
    return Loaded(grader, takes, term.args, time_limit, processes, made, spending)


def raised(error: BaseException) -> Verdict:
    """Return the verdict of a call that raised an error."""
    if isinstance(error, MemoryError):
        return Verdict(None, "needed more memory than it may use (reward.memory_gb)", "failed")
    outcome: Outcome = "failed"
    if isinstance(error, UnparsableGold):
        outcome = "unparsable_gold"
    elif isinstance(error, TimeoutError):
        outcome = "timed_out"
    elif isinstance(error, OverBudget):
        return Verdict(None, f"was not called: {error}", "over_budget", may_pass=False)
    may_pass = not isinstance(error, (*MISTAKES, UnparsableGold))
    return Verdict(None, f"raised {error_text(error)}", outcome, may_pass)


def error_text(error: BaseException) -> str:
    """Return type and message of an error on one line of bounded length, printable anywhere."""
    try:
        message = str(error)
    except Exception:  # an error whose text raises
        message = ""
    line = " ".join(message[: 2 * TEXT].encode("utf-8", "backslashreplace").decode().split())[:TEXT]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _number(value: Any) -> Verdict:
    if isinstance(value, BaseException):  # among the values of a batched function
        return raised(value)
    outcome = value.outcome if isinstance(value, Graded) else None
    if outcome is not None and outcome not in OUTCOMES:  # the table of groups has a number for each of these alone
        known = ", ".join(OUTCOMES)
        return Verdict(None, f"returned the outcome {str(outcome)[:40]!r}: it must be one of {known}", "failed", False)
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
    return Verdict(number, outcome=outcome, turn=value.turn if isinstance(value, Answered) else None)
