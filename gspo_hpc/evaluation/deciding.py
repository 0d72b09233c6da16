"""The reward function that decides whether an answer of an evaluation is right."""

from __future__ import annotations

import functools
from collections.abc import Callable

from gspo_hpc.config.schema import Config
from gspo_hpc.rewards.builtin import ANSWERS

HALF = 0.5  # a completion that is given more than this counts as right


def decider(config: Config) -> str:
    """Return the name of the function that decides: `eval.reward`, by default the first."""
    return config.eval.reward or config.reward.functions[0].function


def answer_of(config: Config) -> Callable[[str], str | None] | None:
    """Return what tells which answer a completion gives; None for functions that do not say it."""
    name = decider(config)
    arguments = next((term.args for term in config.reward.functions if term.function == name), {})
    return functools.partial(ANSWERS[name], **arguments) if name in ANSWERS else None
