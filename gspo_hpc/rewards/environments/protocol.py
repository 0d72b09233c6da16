"""The protocol of an environment: a class with `step`, and `reset` if a conversation begins with something to remember.

A conversation's score is the sum of what its steps gave; with `score_group` the environment scores those of a group
together, once all are over.

    class Guess:
        def __init__(self, high: int = 100): ...

        def reset(self, fields, seed):
            return {"secret": seed % self.high + 1}

        def step(self, state, message):
            guess = int(message)
            if guess == state["secret"]:
                return {"reward": 1.0, "over": True}
            return {"reply": "higher" if guess < state["secret"] else "lower"}

The state of a conversation is plain JSON, and `step` gives it back: it stands in the journal of a rollout, so any
process can take the next turn, and after a kill no turn is asked for again. So an object of the class keeps nothing of
one conversation for another. It is made once in every process, with the arguments from the configuration. A task of a
single turn is one whose first `step` is over. Users write theirs in files of their own, given as path/to/file.py:Class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gspo_hpc.rewards.catalogue import Turn

ANSWER = ("reply", "reward", "over", "state")  # keys of what step returns
MOST_STATE = 1 << 20  # characters of JSON; it is written to the journal with every turn
MOST_REPLY = 1 << 18  # characters, which the rank that steps the engine tokenizes


class Environment(Protocol):
    """The other side of conversations; all those of a process share one object."""

    def reset(self, fields: dict[str, Any], seed: int) -> Any:
        """Return the state, of plain JSON, in which a conversation about a data row with these `fields` begins.

        `seed` is one of the conversation's own. A class without this method begins with {}.
        """

    def step(self, state: Any, message: str) -> Mapping[str, Any]:
        """Answer a message of the model in a conversation that is in this state.

        The answer may have `reply`, the text that the model sees next, as from the user; `reward` (0.0), which is
        added to that of the conversation; `over` (False), after which there is no reply; and the new `state`. Without
        `reply` the conversation is over. An error that is raised costs the conversation, which then has no reward.
        """

    def score_group(self, fields: dict[str, Any], conversations: list[dict[str, Any]]) -> Sequence[float]:
        """Return the score of each conversation of a group, of those that did not fail, in their order.

        A conversation has its last `state`, the sum of its rewards (`reward`), its `text`, and `finish_reason`. A class
        without this method gives each the sum. An error that is raised costs all of them.
        """


def scores_of(answer: Any, count: int) -> list[float]:
    """Return what `score_group` returned for so many conversations. Raises TypeError or ValueError for a mistake."""
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        raise TypeError(f"score_group returned {type(answer).__name__}, not a list of {count} numbers")
    scores = [*answer]
    if len(scores) != count:
        raise ValueError(f"score_group returned {len(scores)} scores for {count} conversations")
    for score in scores:
        if not _is_reward(score):
            raise ValueError(f"score_group returned {score!r}: finite numbers are needed")
    return [float(score) for score in scores]


def turn_of(answer: Any, state: Any) -> Turn:
    """Return what `step` returned, with the `state` before. Raises TypeError or ValueError for a mistake."""
    if not isinstance(answer, Mapping):
        raise TypeError(f"step returned {type(answer).__name__}, not a dict with {', '.join(ANSWER)}")
    if unknown := [repr(key) for key in answer if key not in ANSWER]:
        raise TypeError(f"step returned a dict with {', '.join(unknown)}; it may have {', '.join(ANSWER)}")
    reply, reward, over = answer.get("reply"), answer.get("reward", 0.0), answer.get("over", False)
    if reply is not None and not isinstance(reply, str):
        raise TypeError(f"step returned a reply that is {type(reply).__name__}, not text")
    if len(reply or "") > MOST_REPLY:
        raise ValueError(f"step returned a reply of {len(reply or ''):,} characters; it may have {MOST_REPLY:,}")
    try:
        (reply or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"step returned a reply that is no text of UTF-8: {error.reason}") from None
    if not _is_reward(reward):
        raise ValueError(f"step returned the reward {reward!r}: a finite number is needed")
    if not isinstance(over, bool):
        raise TypeError(f"step returned over={over!r}, not True or False")
    over = over or reply is None
    return Turn(plain(answer.get("state", state)), "" if over else str(reply), float(reward), over)


def _is_reward(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(state: Any) -> Any:
    """Return a state as it is read from the journal. Raises TypeError or ValueError where it is not plain JSON."""
    if state is None:
        raise TypeError("the state is None: return it from reset, and from step where it changes")
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the state is not plain JSON: {error}") from None
    if len(text) > MOST_STATE:
        raise ValueError(f"the state has {len(text):,} characters as JSON, and may have {MOST_STATE:,}")
    again = json.loads(text)
    if again != state:
        raise TypeError("the state is another one when it is read from JSON: use lists, and texts as keys")
    return again
