"""The environments that come with the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gspo_hpc.rewards.builtin import number_match
from gspo_hpc.rewards.catalogue import field_of
from gspo_hpc.rewards.environments.calculator import calculator
from gspo_hpc.rewards.environments.verifiers import Verifiers

_NUMBER = re.compile(r"\d{1,18}")
_OPERATION = re.compile(r"\d[\s)]*[-+*/×÷]+[\s(]*\d")
_RUN = re.compile(r"[\d .,()+\-*/×÷]+")


class GuessNumber:
    """A number is to be found: it is the conversation's seed, brought within the bounds.

    A message is the last number in it. The reward is 1 for the number itself; while it is not found, what a message
    shares of the way: how much nearer it is than the worst guess would be, times `hint`, once, for the last message.
    The replies are `higher` and `lower`, which are words that the model should know.
    """

    def __init__(
        self, low: int = 1, high: int = 100, hint: float = 0.0, higher: str = "higher", lower: str = "lower"
    ) -> None:
        """Take the smallest and the largest number. Raises ValueError where that is no range."""
        if not low < high:
            raise ValueError(f"low is {low} and high {high}: low must be below high")
        self._low, self._high, self._hint = low, high, hint
        self._higher, self._lower = higher, lower

    def reset(self, fields: dict[str, Any], seed: int) -> dict[str, Any]:
        """Draw the number."""
        return {"number": self._low + seed % (self._high - self._low + 1), "paid": 0.0}

    def step(self, state: dict[str, Any], message: str) -> dict[str, Any]:
        """Say where the number is."""
        number, paid = state["number"], state["paid"]
        numbers = _NUMBER.findall(message)
        if not numbers:
            return {"reply": f"Say a number from {self._low} to {self._high}."}
        guess = int(numbers[-1])
        if guess == number:
            return {"reward": 1.0 - paid, "over": True}
        worst = max(number - self._low, self._high - number)
        near = self._hint * max(0.0, 1.0 - abs(guess - number) / worst)
        reply = self._higher if guess < number else self._lower
        return {"reply": reply, "reward": near - paid, "state": {"number": number, "paid": near}}


class Calculator:
    """A question whose answer is a number is to be answered with the help of a calculator.

    A message with a calculation in it, such as `12 * 34`, asks the calculator, which computes the first one; what else
    the message says does not count. A message without one is the answer, with which the conversation is over: the
    reward is 1 if its last number is that of the row's field `answer`. While there is no right answer, a calculation
    whose value is right is worth `hint`, once.
    """

    def __init__(self, answer: str = "answer", hint: float = 0.0) -> None:
        """Take the name of the field with the right answer."""
        self._answer, self._hint = answer, hint

    def reset(self, fields: dict[str, Any], seed: int) -> dict[str, Any]:
        """Keep the right answer."""
        return {"answer": field_of(fields, self._answer), "paid": 0.0}

    def step(self, state: dict[str, Any], message: str) -> dict[str, Any]:
        """Compute, or grade the answer."""
        right, paid = {"answer": state["answer"]}, state["paid"]
        if (calculation := _calculation(message)) is None:
            return {"reward": max(0.0, number_match(message, prompt="", fields=right) - paid), "over": True}
        try:
            value = calculator(calculation)
        except (ValueError, ArithmeticError) as error:
            return {"reply": f"Error: {error}"}
        earned = max(0.0, self._hint * number_match(value, prompt="", fields=right) - paid)
        return {"reply": value, "reward": earned, "state": state | {"paid": paid + earned}}


def _calculation(message: str) -> str | None:
    """Return the first calculation of a message, without the commas of its numbers; None where there is none."""
    for found in _RUN.findall(message):
        if _OPERATION.search(found):
            return str(found).replace(",", "").strip(" .")
    return None


TASKS: dict[str, Callable[..., Any]] = {"calculator": Calculator, "guess_number": GuessNumber, "verifiers": Verifiers}
