"""Prompt, Completion and Group: the only records that travel between the phases of a step.

Arrays are written as base64 of little-endian bytes, so a record that is read back is the same bit for bit, and nothing
is ever unpickled.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gspo_hpc.data.outcomes import CallOutcome, Outcome
from gspo_hpc.system.text import parse_json

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.uint8]
Experts = npt.NDArray[np.unsignedinteger[Any]]  # 8 or 16 bit [tokens, layers, experts of a token]

OUT_OF_TIME = "time"  # the finish_reason of a conversation that took longer than environment.max_seconds
UNFINISHED = "unfinished"  # that of a completion which a later rollout goes on with


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, ready to be sampled from."""

    index: int  # row in the data set
    tokens: Ints  # [prompt_len]
    text: str  # what the model sees, after the chat template
    fields: dict[str, Any]  # all other fields of the row: answers, for the rewards


class Standing(NamedTuple):
    """Place in a conversation that goes on in a later rollout: before the answer to its last message.

    Its completion has that message last, as far as it is sampled, and the texts of what is before it.
    """

    messages: int  # of the model that are answered
    answered: int  # tokens of these, with their answers
    finish_reason: str  # of the message behind them, UNFINISHED if the model has not ended it
    text: str  # of that message, once the model has ended it
    state: Any  # of the environment
    seed: int  # which the environment was given
    reward: float
    seconds: float  # that the conversation has taken


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled answer, its reward, and its log-probs.

    In a conversation of several turns, tokens of the model and of its environment follow each other, the last one is
    the model's. The model is trained on its own tokens alone, and the arrays [sampled_len] have values for these.
    """

    tokens: Ints  # [response_len], with the end token if the model ended by itself
    logprobs: Floats  # [sampled_len], of the sampled tokens, as the engine computed them
    text: str
    finish_reason: str  # "stop" or "length", OUT_OF_TIME of a conversation, or UNFINISHED
    seed: int  # of its newest piece, if it has several
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)  # by grader, unweighted
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by grader, of those that failed or tell it
    failure: str | None = None  # why a grader failed; such a sample may be excluded from the update
    excluded: bool = False  # True: no part in advantages and loss
    advantage: float = 0.0
    old_logprobs: Floats | None = None  # [sampled_len], under the policy that sampled it, from the trainer
    reference_logprobs: Floats | None = None  # [sampled_len], under the reference model
    selected: Flags | None = None  # [sampled_len], 1 for tokens whose policy term is trained; None: all are
    experts: Experts | None = None  # of its tokens but the last, which no model computes
    num_cached_tokens: int = 0  # of its prompt that the engine took from its prefix cache
    environment: Flags | None = None  # [response_len], 1 for tokens of the environment; None: all are the model's
    calls: dict[CallOutcome, int] = field(default_factory=dict)  # of tools, by what came of them
    # With rollout.unfinished continue or rollout.in_flight_updates: the weights that sampled its tokens, one after the
    # other, as (the number of steps that had made them, the number of tokens); else empty: those of its rollout did.
    pieces: tuple[tuple[int, int], ...] = ()
    standing: Standing | None = None  # of an unfinished conversation

    @property
    def sampled(self) -> npt.NDArray[np.intp]:
        """The places [sampled_len] of the tokens that the model sampled."""
        return np.arange(len(self.tokens)) if self.environment is None else np.flatnonzero(self.environment == 0)

    def with_piece(self, weights_version: int) -> Completion:
        """Return the completion; its sampled tokens that have no weights yet were sampled by these."""
        counts = dict(self.pieces)
        more = len(self.logprobs) - sum(counts.values())
        counts[weights_version] = counts.get(weights_version, 0) + more
        return replace(self, pieces=tuple(counts.items())) if more else self

    @property
    def turns(self) -> int:
        """The messages of the model: pieces of sampled tokens, one where there is no environment."""
        if self.environment is None:
            return 1
        own = np.concatenate(([0], self.environment == 0))
        return int(np.count_nonzero(np.diff(own) == 1))


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt and its completions. `slot` is the number of the prompt among those of its rollout, from 0."""

    slot: int
    prompt: Prompt
    completions: tuple[Completion, ...]
    prompt_experts: Experts | None = None  # of the prompt's tokens

    def to_json(self) -> str:
        """Return the group as one line of JSON, without a line break."""
        return json.dumps(
            {
                "slot": self.slot,
                "prompt": {
                    "index": self.prompt.index,
                    "tokens": encode(self.prompt.tokens),
                    "text": self.prompt.text,
                    "fields": self.prompt.fields,
                },
                "prompt_experts": _encode_experts(self.prompt_experts),
                "completions": [
                    {
                        "tokens": encode(c.tokens),
                        "logprobs": encode(c.logprobs),
                        "text": c.text,
                        "finish_reason": c.finish_reason,
                        "seed": c.seed,
                        "reward": c.reward,
                        "reward_parts": c.reward_parts,
                        "outcomes": c.outcomes,
                        "failure": c.failure,
                        "excluded": c.excluded,
                        "advantage": c.advantage,
                        "old_logprobs": None if c.old_logprobs is None else encode(c.old_logprobs),
                        "reference_logprobs": None if c.reference_logprobs is None else encode(c.reference_logprobs),
                        "selected": None if c.selected is None else encode(c.selected),
                        "experts": _encode_experts(c.experts),
                        "num_cached_tokens": c.num_cached_tokens,
                        "environment": None if c.environment is None else encode(c.environment),
                        "calls": c.calls,
                        "pieces": c.pieces,
                        "standing": None if c.standing is None else c.standing._asdict(),
                    }
                    for c in self.completions
                ],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, line: str) -> Group:
        """Return the group that :meth:`to_json` wrote. Raises one of MALFORMED for anything else."""
        raw = parse_json(line, finite=False)  # as fields of a row may be
        prompt = raw["prompt"]
        return cls(
            slot=int(raw["slot"]),
            prompt=Prompt(int(prompt["index"]), decode_ints(prompt["tokens"]), prompt["text"], prompt["fields"]),
            completions=tuple(
                Completion(
                    tokens=decode_ints(c["tokens"]),
                    logprobs=decode_floats(c["logprobs"]),
                    text=c["text"],
                    finish_reason=c["finish_reason"],
                    seed=int(c["seed"]),
                    reward=float(c["reward"]),
                    reward_parts=c["reward_parts"],
                    outcomes=c.get("outcomes", {}),
                    failure=c["failure"],
                    excluded=bool(c["excluded"]),
                    advantage=float(c["advantage"]),
                    old_logprobs=_floats(c["old_logprobs"]),
                    reference_logprobs=_floats(c["reference_logprobs"]),
                    selected=_flags(c.get("selected")),
                    experts=_experts(c.get("experts")),
                    num_cached_tokens=int(c.get("num_cached_tokens", 0)),
                    environment=_flags(c.get("environment")),
                    calls=c.get("calls", {}),
                    pieces=tuple((int(version), int(tokens)) for version, tokens in c.get("pieces", ())),
                    standing=None if c.get("standing") is None else Standing(**c["standing"]),
                )
                for c in raw["completions"]
            ),
            prompt_experts=_experts(raw.get("prompt_experts")),
        )

    def with_piece(self, weights_version: int) -> Group:
        """Return the group with :meth:`Completion.with_piece` of all completions."""
        return self.with_completions(tuple(one.with_piece(weights_version) for one in self.completions))

    def with_completions(self, completions: tuple[Completion, ...]) -> Group:
        """Return the same prompt and slot with other completions."""
        return replace(self, completions=completions)


def encode(array: npt.NDArray[Any]) -> str:
    """Return an array as base64 of its little-endian bytes."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _flags(text: str | None) -> Flags | None:
    return None if text is None else np.frombuffer(base64.b64decode(text), np.uint8).copy()


def decode_ints(text: str) -> Ints:
    """Return the numbers that :func:`encode` wrote."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4").astype(np.int32)


def decode_floats(text: str) -> Floats:
    """Return the numbers that :func:`encode` wrote."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4").astype(np.float32)


def _floats(text: str | None) -> Floats | None:
    return None if text is None else decode_floats(text)


def _encode_experts(array: Experts | None) -> dict[str, Any] | None:
    return None if array is None else {"bytes": array.itemsize, "shape": list(array.shape), "data": encode(array)}


def _experts(raw: dict[str, Any] | None) -> Experts | None:
    if raw is None:
        return None
    found = np.frombuffer(base64.b64decode(raw["data"], validate=True), dtype=f"<u{int(raw['bytes'])}")
    return found.astype(np.uint8 if found.itemsize == 1 else np.uint16).reshape(raw["shape"])
