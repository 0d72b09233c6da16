"""The answer that a completion gives, as the reward function sees it that decides whether it is right."""

from __future__ import annotations

import functools
from collections.abc import Callable

from gspo_hpc.config.derived import decider
from gspo_hpc.config.schema import Config, Rows
from gspo_hpc.rewards.builtin import ANSWERS

HALF = 0.5  # a completion that is given more than this counts as right


def answer_of(config: Config, source: Rows | None = None) -> Callable[[str], str | None] | None:
    """Return what tells which answer a completion gives; None for functions that do not say it."""
    name = decider(config, source)
    arguments = next((term.args for term in config.reward.functions if term.function == name), {})
    return functools.partial(ANSWERS[name], **arguments) if name in ANSWERS else None
