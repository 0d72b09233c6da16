"""A conversation of the model with an environment while it grows, and the group that it belongs to.

It may be left unfinished at the end of a rollout, and goes on in a later one from its completion.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from gspo_hpc.data.outcomes import CallOutcome, CallRecord
from gspo_hpc.data.records import UNFINISHED, Completion, Prompt, Standing
from gspo_hpc.data.turns import TurnRecord
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.rewards.calls import ENVIRONMENT
from gspo_hpc.rewards.catalogue import Turn
from gspo_hpc.rewards.environments.tool_calls import Call


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a message: that of the completion for the first, so a single turn is sampled as without."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "little") >> 2


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
    pieces: dict[int, int] = field(default_factory=dict)  # sampled tokens by their weights, where these are told
    began: float = field(default_factory=lambda: time.monotonic())  # less the seconds that it took before a kill
    over: bool = False

    @property
    def seconds(self) -> float:
        """The seconds that it has taken."""
        return time.monotonic() - self.began

    @classmethod
    def continued(cls, slot: int, sample: int, seed: int, known: Completion) -> tuple[Conversation, Completion | None]:
        """Return what :meth:`left` gave as a conversation, and the message that was not answered, if any is begun."""
        standing, one = known.standing, cls(slot, sample, seed)
        if standing is None:  # nothing was sampled of it
            return one, None
        answered = standing.answered
        one.tokens = known.tokens[:answered].tolist()
        one.theirs = [0] * answered if known.environment is None else known.environment[:answered].tolist()
        sampled = answered - sum(one.theirs)
        one.logprobs, one.texts = [known.logprobs[:sampled]], [known.text] if standing.messages else []
        one.messages, one.state, one.reward = standing.messages, standing.state, standing.reward
        one.num_cached_tokens, one.calls = known.num_cached_tokens, Counter(known.calls)
        one.pieces, one.began = dict(_between(known.pieces, 0, sampled)), time.monotonic() - standing.seconds
        one.over, one.failure = known.finish_reason != UNFINISHED, known.failure
        if one.over:
            one.finish_reason = known.finish_reason
        message = Completion(
            tokens=known.tokens[answered:],
            logprobs=known.logprobs[sampled:],
            text=standing.text,
            finish_reason=standing.finish_reason,
            seed=known.seed,
            num_cached_tokens=known.num_cached_tokens,
            pieces=tuple(_between(known.pieces, sampled, len(known.logprobs))),
        )
        return one, message if len(message.tokens) else None

    def add(self, message: Completion | TurnRecord) -> None:
        """Add a message of the model."""
        if self.messages == 0:
            self.num_cached_tokens = message.num_cached_tokens
        self.tokens += message.tokens.tolist()
        self.theirs += [0] * len(message.tokens)
        self.logprobs.append(message.logprobs)
        self.texts.append(message.text)
        self.messages += 1
        self.finish_reason = message.finish_reason
        for version, tokens in message.pieces:
            self.pieces[version] = self.pieces.get(version, 0) + tokens

    def completion(self) -> Completion:
        """Return the completion that it has become."""
        return Completion(
            tokens=np.asarray(self.tokens, dtype=np.int32),
            logprobs=np.concatenate(self.logprobs),
            text="\n".join(self.texts),
            finish_reason=self.finish_reason,
            seed=self.seed,
            reward=0.0 if self.failure else self.reward,
            reward_parts={} if self.failure else {ENVIRONMENT: self.reward},
            failure=self.failure,
            num_cached_tokens=self.num_cached_tokens,
            environment=np.asarray(self.theirs, dtype=np.uint8) if any(self.theirs) else None,
            calls=dict(self.calls),
            pieces=tuple(self.pieces.items()),
        )

    def left(self, message: Completion | None, seed: int) -> Completion:
        """Return what is there of it, with a last message that is not answered, or not even whole; None if it is over.

        `seed`: of the environment. The conversation is not to be used any more.
        """
        standing = Standing(
            messages=self.messages,
            answered=len(self.tokens),
            finish_reason=self.finish_reason if message is None else message.finish_reason,
            text="" if message is None else message.text,
            state=self.state,
            seed=seed,
            reward=self.reward,
            seconds=self.seconds,
        )
        text = "\n".join(self.texts)
        if message is not None:
            self.add(message)
            self.finish_reason = UNFINISHED
        return replace(self.completion(), text=text, reward=0.0, reward_parts={}, standing=standing)


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
    seed: int  # of the environment: one for the conversations of a group, which are about the same
    may_stop: bool

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


def _between(pieces: tuple[tuple[int, int], ...], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces of the sampled tokens from `begin` to `end`."""
    start = 0
    for version, tokens in pieces:
        inside = min(end, start + tokens) - max(begin, start)
        if inside > 0:
            yield version, inside
        start += tokens
