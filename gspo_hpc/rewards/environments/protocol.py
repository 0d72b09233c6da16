"""The protocol of an environment: a class with `step`, and `reset` if a conversation begins with something to remember.

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
from collections.abc import Mapping
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
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"step returned the reward {reward!r}: a finite number is needed")
    if not isinstance(over, bool):
        raise TypeError(f"step returned over={over!r}, not True or False")
    over = over or reply is None
    return Turn(plain(answer.get("state", state)), "" if over else str(reply), float(reward), over)


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
