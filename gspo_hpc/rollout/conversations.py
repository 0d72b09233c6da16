"""Conversations of the model with an environment: many at once, so that the engine stays full.

To :class:`gspo_hpc.rollout.generation.Generation` they look like an engine: it submits a prompt, takes steps, and gets
whole groups. Each message of the model is a request of its own, which the engine continues from its prefix cache. A
conversation ends when the environment says so, after environment.max_turns messages, or where the next reply would
leave no token of rollout.max_response_length for the model. So its last token is always one that the model sampled.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

import numpy as np

from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.replies import Replies
from gspo_hpc.data.turns import TurnRecord
from gspo_hpc.engine.engine import Engine, Sampling
from gspo_hpc.policy.passes import never
from gspo_hpc.rewards.calls import ENVIRONMENT, error_text
from gspo_hpc.rewards.environments.turns import asked
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.rollout.notices import POLL_SECONDS
from gspo_hpc.runs.journal import Journal


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a message: that of the completion for the first, so a single turn is sampled as without."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "little") >> 2


@dataclass
class _Conversation:
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


@dataclass
class _Open:
    """A group whose conversations are not all over."""

    prompt: Prompt
    sampling: Sampling
    conversations: list[_Conversation]
    over: int = 0

    @cached_property
    def crc(self) -> int:
        """The CRC-32 of the prompt's tokens."""
        return zlib.crc32(self.prompt.tokens.astype("<i4").tobytes())


class Conversations:
    """The part of an engine that generation uses, with an environment between the messages of a completion."""

    def __init__(
        self,
        engine: Engine,
        pool: RewardPool,
        replies: Replies,
        max_turns: int,
        *,
        slots: Container[int] = (),
        journal: Journal | None = None,
        stop_requested: Callable[[], bool] = never,
    ) -> None:
        """Take what the journal has of conversations of these slots."""
        self._engine, self._pool, self._replies, self._max_turns = engine, pool, replies, max_turns
        self._journal, self._stop_requested = journal, stop_requested
        self._past = {} if journal is None else journal.turns(slots)
        self._open: dict[int, _Open] = {}  # by slot
        self._asked: dict[int, _Conversation] = {}  # by the number of the engine's request
        self._answering: dict[tuple[int, int], Completion] = {}  # messages that the environment has, by slot and sample
        self._numbers = count()
        self._finished: list[Group] = []

    @property
    def pending(self) -> int:
        """Number of groups that were submitted and not returned yet."""
        return len(self._open) + len(self._finished)

    @property
    def running(self) -> int:
        """Number of messages that the engine is working on."""
        return self._engine.running

    @property
    def tokens_generated(self) -> int:
        """Number of tokens that the engine has sampled."""
        return self._engine.tokens_generated

    def submit(
        self, slot: int, prompt: Prompt, seeds: Sequence[int], sampling: Sampling, *, reports_experts: bool = False
    ) -> None:
        """Begin a conversation about `prompt` for each seed; see :meth:`Engine.submit`. No experts are reported."""
        conversations = [_Conversation(slot, sample, seed) for sample, seed in enumerate(seeds)]
        self._open[slot] = _Open(prompt, sampling, conversations)
        for one in conversations:
            goes_on = True
            for record in self._past.pop((slot, one.sample), []):
                # Behind a damaged line of the journal there may be turns of a conversation that went on otherwise.
                if not goes_on or record.past != self._crc(one):
                    break
                goes_on = self._take(one, record)
            if goes_on:
                self._ask_model(one)

    def step(self) -> list[Group]:
        """Have the engine make one step, give its messages to the environment, and return the groups that are over.

        Raises EngineDied as :meth:`Engine.step` does; what the environment has is kept.
        """
        for group in self._engine.step() if self._engine.pending else []:
            one, (message,) = self._asked.pop(group.slot), group.completions
            self._answering[one.slot, one.sample] = message
            opened = self._open[one.slot]  # whose conversations are about the same, so they have one seed
            fields = asked(opened.prompt.fields, opened.conversations[0].seed, one.state)
            self._pool.submit((one.slot, one.sample), message.text, len(message.tokens), "", fields)
        waits = not self._engine.pending and not self._finished
        results = self._pool.poll(timeout=POLL_SECONDS if waits else 0.0)
        if any(result.failure for _, result in results) and self._stop_requested():
            return []  # Slurm signals every process of a job: an environment that died of that has not failed
        self._answered(results)
        finished, self._finished = self._finished, []
        return finished

    def abort(self) -> None:
        """Drop all conversations."""
        self._engine.abort()
        self._open.clear()
        self._asked.clear()
        self._answering.clear()
        self._finished.clear()
        self._pool.drop()

    def _answered(self, results: Sequence[tuple[tuple[int, int], RewardResult]]) -> None:
        """Go on with the conversations whose last messages the environment has answered, or failed to."""
        records = []
        for (slot, sample), result in results:
            message, one = self._answering.pop((slot, sample)), self._open[slot].conversations[sample]
            turn = result.turn
            if turn is None:
                one.failure = result.failure or "the environment gave no answer"
                self._add(one, message)
                self._end(one)
                continue
            records.append(
                TurnRecord(
                    slot=slot,
                    sample=sample,
                    turn=one.messages,
                    past=self._crc(one),
                    tokens=message.tokens,
                    logprobs=message.logprobs,
                    text=message.text,
                    finish_reason=message.finish_reason,
                    num_cached_tokens=message.num_cached_tokens,
                    state=turn.state,
                    reply=turn.reply,
                    reward=turn.reward,
                    over=turn.over,
                )
            )
        if records and self._journal is not None:
            self._journal.append_turns(records)
        for record in records:
            one = self._open[record.slot].conversations[record.sample]
            if self._take(one, record):
                self._ask_model(one)

    def _crc(self, one: _Conversation) -> int:
        """Return the CRC-32 of all tokens that the next message of a conversation follows."""
        return zlib.crc32(np.asarray(one.tokens, dtype="<i4").tobytes(), self._open[one.slot].crc)

    def _take(self, one: _Conversation, record: TurnRecord) -> bool:
        """Add a turn to its conversation; False if that is over now."""
        self._add(one, record)
        one.state, one.reward = record.state, one.reward + record.reward
        if record.over or one.messages == self._max_turns or record.finish_reason == "length":
            self._end(one)
            return False
        try:
            reply = self._replies.tokens(record.reply, one.tokens[-1])
        except Exception as error:  # of a template or a tokenizer, whatever it is
            one.failure = f"the reply cannot be tokenized: {error_text(error)}"
            self._end(one)
            return False
        if len(one.tokens) + len(reply) >= self._open[one.slot].sampling.max_tokens:
            one.finish_reason = "length"
            self._end(one)
            return False
        one.tokens += reply
        one.theirs += [1] * len(reply)
        one.texts += [f"> {line}" for line in record.reply.split("\n")]
        return True

    def _add(self, one: _Conversation, message: Completion | TurnRecord) -> None:
        if one.messages == 0:
            one.num_cached_tokens = message.num_cached_tokens
        one.tokens += message.tokens.tolist()
        one.theirs += [0] * len(message.tokens)
        one.logprobs.append(message.logprobs)
        one.texts.append(message.text)
        one.messages += 1
        one.finish_reason = message.finish_reason

    def _ask_model(self, one: _Conversation) -> None:
        opened, number = self._open[one.slot], next(self._numbers)
        tokens = np.concatenate((opened.prompt.tokens, np.asarray(one.tokens, dtype=np.int32)))
        left = replace(opened.sampling, max_tokens=opened.sampling.max_tokens - len(one.tokens))
        self._asked[number] = one
        prompt = Prompt(opened.prompt.index, tokens, "", {})
        self._engine.submit(number, prompt, [turn_seed(one.seed, one.messages)], left, reports_experts=False)

    def _end(self, one: _Conversation) -> None:
        """Note the end of a conversation; with the last one of its group, that is finished."""
        opened = self._open[one.slot]
        opened.over += 1
        if opened.over < len(opened.conversations):
            return
        del self._open[one.slot]
        self._finished.append(Group(one.slot, opened.prompt, tuple(map(self._completion, opened.conversations))))

    def _completion(self, one: _Conversation) -> Completion:
        return Completion(
            tokens=np.asarray(one.tokens, dtype=np.int32),
            logprobs=np.concatenate(one.logprobs),
            text="\n".join(one.texts),
            finish_reason=one.finish_reason,
            seed=one.seed,
            reward=0.0 if one.failure else one.reward,
            reward_parts={} if one.failure else {ENVIRONMENT: one.reward},
            failure=one.failure,
            num_cached_tokens=one.num_cached_tokens,
            environment=np.asarray(one.theirs, dtype=np.uint8) if any(one.theirs) else None,
        )
