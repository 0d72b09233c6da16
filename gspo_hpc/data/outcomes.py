"""The outcomes that a grader can find; without numpy, because the processes of reward functions import it."""

from __future__ import annotations

from typing import Literal, get_args

# "unparsable": the completion has no answer; "unparsable_gold": that of the data row cannot be read.
Outcome = Literal["right", "wrong", "unparsable", "unparsable_gold", "timed_out", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
