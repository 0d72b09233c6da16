"""The reward function that decides whether an answer of an evaluation is right."""

from __future__ import annotations

import functools
from collections.abc import Callable

from gspo_hpc.config.schema import Config, Source
from gspo_hpc.rewards.builtin import ANSWERS

HALF = 0.5  # a completion that is given more than this counts as right


def decider(config: Config, source: Source | None = None) -> str:
    """Return the name of the function that decides: `eval.reward`, by default the first.

    For a source with functions of its own it is the first of these, unless `eval.reward` is among them.
    """
    own = None if source is None else source.rewards
    if own is not None and config.eval.reward not in own:
        return str(next(iter(own)))
    return config.eval.reward or config.reward.functions[0].function


def answer_of(config: Config, source: Source | None = None) -> Callable[[str], str | None] | None:
    """Return what tells which answer a completion gives; None for functions that do not say it."""
    name = decider(config, source)
    arguments = next((term.args for term in config.reward.functions if term.function == name), {})
    return functools.partial(ANSWERS[name], **arguments) if name in ANSWERS else None
