"""A conversation of the model with an environment while it grows, and the group that it belongs to."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gspo_hpc.data.outcomes import CallOutcome, CallRecord
from gspo_hpc.data.records import Completion, Prompt
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.rewards.catalogue import Turn
from gspo_hpc.rewards.environments.tool_calls import Call


@dataclass
class Conversation:
    """One completion while it grows."""

    slot: int
    sample: int
    seed: int
    tokens: list[int] = field(default_factory=list)  # of both sides
    theirs: list[int] = field(default_factory=list)  # 1 for each token of the environment
    logprobs: list[np.ndarray] = field(default_factory=list)  # by message
    texts: list[str] = field(default_factory=list)  # of messages and replies in turns
    messages: int = 0  # of the model
    state: object = None  # of the environment; None before its first answer
    reward: float = 0.0
    failure: str | None = None
    finish_reason: str = "stop"
    num_cached_tokens: int = 0
    calls: Counter[CallOutcome] = field(default_factory=Counter)
    began: float = field(default_factory=lambda: time.monotonic())  # less the seconds that it took before a kill

    @property
    def seconds(self) -> float:
        """The seconds that it has taken."""
        return time.monotonic() - self.began


@dataclass
class Answering:
    """A message of the model that waits for its answer: the environment's, or the results of tools."""

    message: Completion
    calls: list[CallRecord | Call] = field(default_factory=list)  # a call in the place of what will come of it
    turn: Turn | None = None
    failure: str | None = None

    @property
    def waits(self) -> bool:
        """Tell whether a result is still to come."""
        if self.calls:
            return any(isinstance(one, Call) for one in self.calls)
        return self.turn is None and self.failure is None


@dataclass
class OpenGroup:
    """A group whose conversations are not all over."""

    prompt: Prompt
    sampling: Sampling
    conversations: list[Conversation]
    over: int = 0

    @property
    def scored(self) -> list[Conversation]:
        """The conversations that an environment scores together: those that did not fail."""
        return [one for one in self.conversations if one.failure is None]

    def told(self) -> list[dict[str, Any]]:
        """Return what it is told of these, once they are over."""
        return [
            {
                "state": one.state,
                "reward": one.reward,
                "text": "\n".join(one.texts),
                "finish_reason": one.finish_reason,
            }
            for one in self.scored
        ]

    @property
    def ended(self) -> int:
        """The CRC-32 of what it is told."""
        return zlib.crc32(json.dumps(self.told()).encode(), self.crc)

    @cached_property
    def crc(self) -> int:
        """The CRC-32 of the prompt's tokens."""
        return zlib.crc32(self.prompt.tokens.astype("<i4").tobytes())
