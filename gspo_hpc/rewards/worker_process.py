"""Work of a process of the reward pool: it loads the graders once, then makes one call after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from gspo_hpc.config.schema import RewardFunction
from gspo_hpc.rewards.calls import Loaded, Sampled, Verdict, error_text, loaded, raised

ORPHAN_SECONDS = 2.0  # after its time limit, the kernel ends a grader that its pool did not end

_graders: list[Loaded | None] = []  # by term
_errors: list[str | None] = []  # by term: why it could not be loaded


def start(functions: tuple[RewardFunction, ...]) -> None:
    """Load the graders. Never raises, because pebble would take that for a broken pool."""
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's warnings are for the trainer
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a grader inside C code, such as a slow regular expression
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # a grader's prints must not reach the console and the logs of a run
        os.dup2(nothing, standard)
    os.environ["OMP_NUM_THREADS"] = "1"  # the cores belong to training and generation
    for term in functions:
        try:
            _graders.append(loaded(term))
            _errors.append(None)
        except BaseException as error:  # a user's file may raise anything, SystemExit too
            _graders.append(None)
            _errors.append(f"the function cannot be loaded: {error_text(error)}")


def load_errors() -> list[str | None]:
    """Return by term why its function could not be loaded, None where it was."""
    return _errors


def grade(
    term: int, limit: float, group: Sequence[Sampled], index: int | None, prompt: str, fields: dict[str, Any]
) -> list[Verdict]:
    """Return a grader's verdict on one completion of a group, or on all where `index` is None.

    `limit` is in seconds.
    """
    function = _graders[term]
    count = len(group) if index is None else 1
    if function is None:
        return [Verdict(None, _errors[term], "failed")] * count
    # The pool ends a call that takes too long; where the trainer is gone, this timer does.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit + ORPHAN_SECONDS)
    try:
        if index is None:
            return function.call_batched(group, prompt, fields)
        return [function.call(group, index, prompt, fields)]
    except BaseException as error:  # SystemExit too: a grader that exits costs its sample
        return [raised(error)] * count
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
