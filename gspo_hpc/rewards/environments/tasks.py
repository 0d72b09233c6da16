"""The environments that come with the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gspo_hpc.rewards.environments.verifiers import Verifiers

_NUMBER = re.compile(r"\d{1,18}")


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


TASKS: dict[str, Callable[..., Any]] = {"guess_number": GuessNumber, "verifiers": Verifiers}
