"""The registry of the reward functions ("graders") that come with the package, and what they may return and raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from gspo_hpc.data.outcomes import Outcome

Grader = Callable[..., Any]  # a number, several of a batched one, or what is awaited for them
_G = TypeVar("_G", bound=Grader)

REGISTRY: dict[str, Grader] = {}  # reward functions by name
TURN = "environment_turn"  # the function of a pool in which an environment answers, which no configuration names
ARGUMENT_CHECKS: dict[str, Callable[..., None]] = {}  # by name: called with a function's arguments before a run starts
ROW_CHECKS: dict[str, Callable[..., None]] = {}  # by name: called with the fields of a row and a function's arguments
ASK_ELSEWHERE: set[str] = set()  # names of those that need a service, which perhaps only the nodes of a run reach
ANSWERS: dict[str, Callable[..., str | None]] = {}  # by name: which answer a completion gives, of those that have it
PREPARATIONS: dict[str, Callable[[], None]] = {}  # by name: called in a worker process before its first call

# What TRL, open-r1, ms-swift and verl call a reward function -> its name here.
PEER_NAMES = {
    **dict.fromkeys(("accuracy", "accuracy_reward", "reasoning_accuracy_reward", "math", "math_dapo"), "math_verify"),
    **dict.fromkeys(("gsm8k", "exact_number"), "number_match"),
    **dict.fromkeys(("format", "format_reward", "think_format_reward", "tag_count", "tag_count_reward"), "tag_format"),
    **dict.fromkeys(("repetition_penalty", "repetition_penalty_reward", "repetition_reward"), "repetition"),
    **dict.fromkeys(("soft_overlong", "soft_overlong_punishment", "overlong_buffer", "len_reward"), "length"),
    **dict.fromkeys(("get_soft_overlong_punishment", "dapo_overlong"), "length"),
    **dict.fromkeys(("choice", "mcq", "mmlu", "gpqa"), "multiple_choice"),
    **dict.fromkeys(("code_reward", "binary_code_reward", "code_accuracy", "prime_code"), "code"),
    **dict.fromkeys(("language", "language_consistency_reward"), "language_consistency"),
}


class Graded(float):
    """A reward that says why it is what it is, such as "right", or "unparsable" where the completion has no answer."""

    outcome: Outcome

    def __new__(cls, value: float, outcome: Outcome) -> Graded:
        """Return `value` with its outcome."""
        self = super().__new__(cls, value)
        self.outcome = outcome
        return self


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to one message."""

    state: Any
    reply: str  # empty where the conversation is over
    reward: float
    over: bool


class Answered(float):
    """The reward of a turn, which brings the rest of the answer along."""

    turn: Turn

    def __new__(cls, turn: Turn) -> Answered:
        """Return the reward of `turn`."""
        self = super().__new__(cls, turn.reward)
        self.turn = turn
        return self


class UnparsableGold(ValueError):
    """The right answer in a data row cannot be read, so no completion of that row can be graded."""


@overload
def reward_function(function: _G) -> _G: ...
@overload
def reward_function(
    *,
    check: Callable[..., None] | None = None,
    check_row: Callable[..., None] | None = None,
    prepare: Callable[[], None] | None = None,
    answered: Callable[..., str | None] | None = None,
    asks_elsewhere: bool = False,
) -> Callable[[_G], _G]: ...
def reward_function(
    function: _G | None = None,
    *,
    check: Callable[..., None] | None = None,
    check_row: Callable[..., None] | None = None,
    prepare: Callable[[], None] | None = None,
    answered: Callable[..., str | None] | None = None,
    asks_elsewhere: bool = False,
) -> _G | Callable[[_G], _G]:
    """Register a reward function under its own name, as ``@reward_function`` or ``@reward_function(check=...)``.

    `check` is called with the arguments from the configuration and raises ValueError for those that the types of the
    function's parameters allow, but that it cannot work with. `check_row(fields, **args)` raises ValueError for a data
    row that it cannot grade; without it, the function itself is tried. `prepare` runs once in every worker process,
    before any time limit begins: it imports what is slow to import. `answered(completion, **args)` returns the answer
    that a completion gives, in a form in which equal answers are equal texts, or None: an evaluation takes the answer
    of the majority. `asks_elsewhere`: the function needs a service.
    """

    def register(function: _G) -> _G:
        name = function.__name__
        assert name not in REGISTRY, f"two reward functions are called {name}"
        REGISTRY[name] = function
        for hooks, hook in ((ARGUMENT_CHECKS, check), (ROW_CHECKS, check_row), (PREPARATIONS, prepare)):
            if hook is not None:
                hooks[name] = hook  # type: ignore[index]
        if answered is not None:
            ANSWERS[name] = answered
        if asks_elsewhere:
            ASK_ELSEWHERE.add(name)
        return function

    return register if function is None else register(function)


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field of the data row. Raises ValueError, with the fields that there are, if it is missing."""
    if name not in fields:
        raise ValueError(f"the data row has no field {name!r}; it has: {', '.join(sorted(fields)) or 'none'}")
    return fields[name]
