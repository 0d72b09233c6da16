"""Conversations of the model with an environment: many at once, so that the engine stays full.

To :class:`gspo_hpc.rollout.generation.Generation` they look like an engine: it submits a prompt, takes steps, and gets
whole groups. Each message of the model is a request of its own, which the engine continues from its prefix cache. A
conversation ends when the environment says so (without one, with a message that calls no tool), after
environment.max_turns messages, with the first answer after environment.max_seconds, or where the next reply would leave
no token of rollout.max_response_length for the model. So its last token is always one that the model sampled.

A rollout may end before its conversations do, and a later one goes on with them: behind the last token of the model, or
with the message that the environment has not answered. What it has answered is not asked for again.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from gspo_hpc.data.outcomes import CallRecord
from gspo_hpc.data.records import OUT_OF_TIME, UNFINISHED, Completion, Group, Prompt
from gspo_hpc.data.replies import Replies
from gspo_hpc.data.turns import GROUP, TurnRecord
from gspo_hpc.engine.engine import Engine, Sampling
from gspo_hpc.policy.passes import never
from gspo_hpc.rewards.calls import error_text
from gspo_hpc.rewards.catalogue import Turn
from gspo_hpc.rewards.environments.tool_calls import Call
from gspo_hpc.rewards.environments.tools import Toolbox
from gspo_hpc.rewards.environments.turns import asked, asked_for_scores
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.rollout.conversation import Answering, Conversation, OpenGroup, turn_seed
from gspo_hpc.rollout.notices import POLL_SECONDS
from gspo_hpc.runs.journal import Journal

_NO_TOKENS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class Conversations:
    """The part of an engine that generation uses, with an environment between the messages of a completion."""

    def __init__(
        self,
        engine: Engine,
        pool: RewardPool,
        replies: Replies,
        max_turns: int,
        max_seconds: float | None = None,
        *,
        slots: Container[int] = (),
        journal: Journal | None = None,
        stop_requested: Callable[[], bool] = never,
        toolbox: Toolbox | None = None,
        answers: bool = True,
        scores_groups: bool = False,
        weights_version: Callable[[], int] = int,
    ) -> None:
        """Take what the journal has of conversations of these slots.

        `answers`: there is an environment, which answers messages that call no tool. `scores_groups`: it scores the
        conversations of a group together, once all are over. `weights_version` returns the number of steps that had
        made the weights of the engine.
        """
        self._weights_version = weights_version
        self._toolbox, self._answers, self._scores_groups = toolbox, answers, scores_groups
        self._engine, self._pool, self._replies = engine, pool, replies
        self._max_turns, self._max_seconds = max_turns, math.inf if max_seconds is None else max_seconds
        self._journal, self._stop_requested = journal, stop_requested
        self._past = {} if journal is None else journal.turns(slots)
        self._open: dict[int, OpenGroup] = {}  # by slot
        self._asked: dict[int, Conversation] = {}  # by the number of the engine's request
        self._answering: dict[tuple[int, int], Answering] = {}  # by slot and sample
        self._numbers = count()
        self._waited = 0.0
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
        self,
        slot: int,
        prompt: Prompt,
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        reports_experts: bool = False,
        begun: Sequence[Completion] = (),
        may_stop: bool = False,
    ) -> None:
        """Begin a conversation about `prompt` for each seed, or go on with those of `begun`, which :meth:`stop` gave.

        See :meth:`Engine.submit`. No experts are reported. With `may_stop` completions tell the weights that sampled.
        """
        if begun and all(one.standing is None for one in begun):  # they are only to be graded
            self._finished.append(Group(slot, prompt, tuple(begun)))
            return
        known = begun or [Completion(_NO_TOKENS, _NO_LOGPROBS, "", UNFINISHED, seed) for seed in seeds]
        seed = next((one.standing.seed for one in known if one.standing is not None), seeds[0])
        found = [Conversation.continued(slot, i, seeds[i], one) for i, one in enumerate(known)]
        opened = self._open[slot] = OpenGroup(prompt, sampling, [one for one, _ in found], seed, may_stop)
        if all(one.over for one in opened.conversations):
            self._score(opened)
            return
        for one, message in found:
            goes_on = not one.over
            for record in self._past.pop((slot, one.sample), []):
                # Behind a damaged line of the journal there may be turns of a conversation that went on otherwise.
                if not goes_on or record.turn != one.messages or record.past != self._crc(one):
                    break
                goes_on, message = self._take(one, record), None
            if goes_on and message is not None and message.finish_reason != UNFINISHED:
                self._ask(one, message)
            elif goes_on:
                self._ask_model(one, message)

    def step(self) -> list[Group]:
        """Have the engine make one step, give its messages to the environment, and return the groups that are over.

        Raises EngineDied as :meth:`Engine.step` does; what the environment has is kept.
        """
        for group in self._engine.step() if self._engine.pending else []:
            one, (message,) = self._asked.pop(group.slot), group.completions
            self._ask(one, self._told(one, message))
        waits = not self._engine.pending and not self._finished and bool(self._pool.pending)
        began = time.monotonic()
        results = self._pool.poll(timeout=POLL_SECONDS if waits else 0.0)
        self._waited += time.monotonic() - began if waits else 0.0
        if any(result.failure for _, result in results) and self._stop_requested():
            return []  # Slurm signals every process of a job: an environment that died of that has not failed
        self._note(results)
        self._go_on([key for key, answering in self._answering.items() if not answering.waits])
        finished, self._finished = self._finished, []
        return finished

    def waited(self) -> float:
        """Return the seconds since the last call in which only the environment or tools were waited for."""
        found, self._waited = self._waited, 0.0
        return found

    def stop(self) -> list[Group]:
        """Drop all groups that are not finished, and return them with what is there of their conversations.

        See :meth:`Engine.stop`. Answers and scores that are still to come are dropped, too, and asked for when the
        groups go on.
        """
        last = {key: answering.message for key, answering in self._answering.items()}
        for group in self._engine.stop():
            one, (message,) = self._asked[group.slot], group.completions
            last[one.slot, one.sample] = self._told(one, message)
        stopped = [
            Group(
                slot,
                opened.prompt,
                tuple(one.left(last.get((slot, one.sample)), opened.seed) for one in opened.conversations),
            )
            for slot, opened in self._open.items()
        ]
        self.abort()
        return stopped

    def abort(self) -> None:
        """Drop all conversations."""
        self._engine.abort()
        self._open.clear()
        self._asked.clear()
        self._answering.clear()
        self._finished.clear()
        self._pool.drop()

    def _told(self, one: Conversation, message: Completion) -> Completion:
        """Return a message that has just come, with the weights that sampled it if they are to be told."""
        return message.with_piece(self._weights_version()) if self._open[one.slot].may_stop else message

    def _ask(self, one: Conversation, message: Completion) -> None:
        """Give a message to the tools that it calls, or to the environment."""
        answering = self._answering[one.slot, one.sample] = Answering(message)
        row, seed = self._open[one.slot].prompt.fields, self._open[one.slot].seed
        if self._toolbox is not None and message.finish_reason != "length":
            answering.calls = self._toolbox.calls(self._replies.text(message.tokens.tolist()))
        for place, call in enumerate(answering.calls):
            if isinstance(call, Call):
                self._pool.submit((one.slot, one.sample, place), "", 0, "", asked(row, seed, one.state, call))
        if not answering.calls and self._answers:
            fields = asked(row, seed, one.state)
            self._pool.submit((one.slot, one.sample, -1), message.text, len(message.tokens), "", fields)
        elif not answering.calls:
            answering.turn = Turn(one.state, "", 0.0, True)

    def _note(self, results: Sequence[tuple[tuple[int, int, int], RewardResult]]) -> None:
        """Note what the environment and the tools have answered."""
        for (slot, sample, place), result in results:
            if sample == GROUP:
                self._note_scores(slot, result)
                continue
            answering = self._answering[slot, sample]
            if place < 0:
                answering.turn = result.turn
                if result.turn is None:
                    answering.failure = result.failure or "the environment gave no answer"
                continue
            call = answering.calls[place]
            assert isinstance(call, Call) and self._toolbox is not None
            answering.calls[place] = self._toolbox.result(call, result)

    def _go_on(self, answered: Sequence[tuple[int, int]]) -> None:
        """Go on with the conversations whose last messages are answered, or whose environment failed."""
        records = []
        for slot, sample in answered:
            answering, one = self._answering.pop((slot, sample)), self._open[slot].conversations[sample]
            message, failed = answering.message, answering.failure is not None
            calls = tuple(call for call in answering.calls if isinstance(call, CallRecord))
            # Without one it is of tools, which do not change the state, or the environment failed.
            turn = answering.turn or Turn(one.state, "", 0.0, over=failed)
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
                    calls=calls,
                    seconds=one.seconds,
                    failure=answering.failure,
                    pieces=message.pieces,
                )
            )
        if records and self._journal is not None:
            self._journal.append_turns(records)
        for record in records:
            one = self._open[record.slot].conversations[record.sample]
            if self._take(one, record):
                self._ask_model(one)

    def _crc(self, one: Conversation) -> int:
        """Return the CRC-32 of all tokens that the next message of a conversation follows."""
        return zlib.crc32(np.asarray(one.tokens, dtype="<i4").tobytes(), self._open[one.slot].crc)

    def _take(self, one: Conversation, record: TurnRecord) -> bool:
        """Add a turn to its conversation; False if that is over now."""
        one.add(record)
        one.state, one.reward = record.state, one.reward + record.reward
        one.calls.update(call.outcome for call in record.calls)
        one.failure = record.failure
        one.began = min(one.began, time.monotonic() - record.seconds)
        if record.over or one.messages == self._max_turns or record.finish_reason == "length":
            self._end(one)
            return False
        if record.seconds > self._max_seconds:
            one.finish_reason = OUT_OF_TIME
            self._end(one)
            return False
        try:
            said: str | list[tuple[str, str]] = [(one.name, one.result) for one in record.calls] or record.reply
            reply = self._replies.tokens(said, one.tokens[-1])
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
        told = [said] if isinstance(said, str) else [result for _, result in said]
        one.texts += [f"> {line}" for text in told for line in text.split("\n")]
        return True

    def _ask_model(self, one: Conversation, begun: Completion | None = None) -> None:
        """Have the engine sample the next message, of which it may have sampled a part."""
        opened, number = self._open[one.slot], next(self._numbers)
        tokens = np.concatenate((opened.prompt.tokens, np.asarray(one.tokens, dtype=np.int32)))
        left = replace(opened.sampling, max_tokens=opened.sampling.max_tokens - len(one.tokens))
        self._asked[number] = one
        prompt = Prompt(opened.prompt.index, tokens, "", {})
        self._engine.submit(
            number,
            prompt,
            [turn_seed(one.seed, one.messages)],
            left,
            reports_experts=False,
            begun=[] if begun is None else [begun],
            may_stop=opened.may_stop,
        )

    def _end(self, one: Conversation) -> None:
        """Note the end of a conversation; with the last one of its group, that is finished."""
        one.over, opened = True, self._open[one.slot]
        if all(other.over for other in opened.conversations):
            self._score(opened)

    def _score(self, opened: OpenGroup) -> None:
        """Finish a group whose conversations are over, with the environment's scores if it gives any."""
        slot = opened.conversations[0].slot
        if not self._scores_groups or not opened.scored:
            self._finish(slot)
            return
        for record in self._past.pop((slot, GROUP), []):
            if record.past == opened.ended:
                self._take_scores(record)
                return
        self._pool.submit((slot, GROUP, 0), "", 0, "", asked_for_scores(opened.prompt.fields, opened.told()))

    def _note_scores(self, slot: int, result: RewardResult) -> None:
        """Note what the environment gave the conversations of a group, or why it gave nothing."""
        scores = None if result.turn is None else result.turn.state
        failure = result.failure or ("the environment gave no scores" if scores is None else None)
        record = TurnRecord(
            slot=slot,
            sample=GROUP,
            turn=0,
            past=self._open[slot].ended,
            tokens=_NO_TOKENS,
            logprobs=_NO_LOGPROBS,
            text="",
            finish_reason="stop",
            num_cached_tokens=0,
            state=scores,
            reply="",
            reward=0.0,
            over=True,
            failure=failure,
        )
        if self._journal is not None:
            self._journal.append_turns([record])
        self._take_scores(record)

    def _take_scores(self, record: TurnRecord) -> None:
        """Give the conversations of a group their scores; they have failed where the environment failed with them."""
        opened = self._open[record.slot]
        for place, one in enumerate(opened.scored):
            if record.failure is None:
                one.reward = record.state[place]
            else:
                one.failure = record.failure
        self._finish(record.slot)

    def _finish(self, slot: int) -> None:
        opened = self._open.pop(slot)
        completions = tuple(one.completion() for one in opened.conversations)
        self._finished.append(Group(slot, opened.prompt, completions))
