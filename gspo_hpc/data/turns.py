"""The record of a turn of a conversation: what the model sampled, and what the environment answered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gspo_hpc.data.outcomes import CallRecord
from gspo_hpc.data.records import Floats, Ints, decode_floats, decode_ints, encode
from gspo_hpc.system.text import parse_json

GROUP = -1  # the sample of what concerns all conversations of a group


@dataclass(frozen=True, eq=False)
class TurnRecord:
    """A turn of the conversation of one completion; they are numbered from 0.

    What an environment scores of a whole group is a turn of the sample GROUP: its state has the scores.
    """

    slot: int
    sample: int
    turn: int
    past: int  # CRC-32 of the prompt's tokens and of all of the conversation before it
    tokens: Ints  # [message_len], as sampled
    logprobs: Floats  # [message_len]
    text: str  # of the message
    finish_reason: str
    num_cached_tokens: int
    state: Any  # of the environment, after it
    reply: str
    reward: float
    over: bool
    calls: tuple[CallRecord, ...] = ()  # of tools, whose results are the reply
    seconds: float = 0.0  # that the conversation took until its answer
    pieces: tuple[tuple[int, int], ...] = ()  # of the message; see Completion
    failure: str | None = None  # why there is no answer: the environment failed, and the conversation is over

    def to_json(self) -> str:
        """Return the turn as one line of JSON."""
        raw = {**self.__dict__, "tokens": encode(self.tokens), "logprobs": encode(self.logprobs)}
        return json.dumps(raw, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> TurnRecord:
        """Return the turn that :meth:`to_json` wrote. Raises one of MALFORMED for anything else."""
        raw = parse_json(line, finite=False)
        return cls(
            **raw
            | {name: int(raw[name]) for name in ("slot", "sample", "turn", "past", "num_cached_tokens")}
            | {
                "tokens": decode_ints(raw["tokens"]),
                "logprobs": decode_floats(raw["logprobs"]),
                "calls": tuple(CallRecord(*call) for call in raw.get("calls", ())),
                "pieces": tuple((int(version), int(tokens)) for version, tokens in raw.get("pieces", ())),
            }
        )
