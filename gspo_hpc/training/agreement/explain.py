"""The questions that engine and trainer are asked once they disagree, to name the cause of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_hpc.data.records import Experts, Floats
from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.exchange.transport import Transport, gather_unordered
from gspo_hpc.policy import offload
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.training.agreement.causes import TOP, ProbeAnswers, name_cause
from gspo_hpc.training.agreement.scoring import Sequences, score

_PAIRS = 64


@dataclass(frozen=True)
class PairScores:
    """The trainer's answers on pairs of tokens."""

    logprobs: Sequence[Floats]  # [1] of each pair
    experts: Experts | None  # of the first tokens [pairs, layers, top_k]

    def values(self) -> dict[str, Any]:
        """Return them as plain values, for ranks that have no trainer."""
        experts = None if self.experts is None else self.experts.tolist()
        return {"logprobs": [one.tolist() for one in self.logprobs], "experts": experts}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> PairScores:
        """Return what :meth:`values` gave."""
        experts = None if values["experts"] is None else np.asarray(values["experts"])
        return cls([np.asarray(one, dtype=np.float32) for one in values["logprobs"]], experts)


@dataclass(frozen=True)
class EngineScores:
    """The answers of an engine."""

    probe: Sequence[Floats]  # log-probs [len - 1] of each sequence
    pairs: Sequence[Floats]  # [1] of each pair
    top: Sequence[Floats]  # of the most likely tokens of each sequence [len - 1, several]


def explain(
    policy: Policy,
    engine: Engine | None,
    sequences: Sequences,
    ours: Sequence[Floats],
    theirs: Sequence[Floats],  # what `engine` answered; empty where it did not
    monitor: PassMonitor | None,
) -> str:
    """Return the cause of a mismatch, equal on all ranks. Collective.

    The run is about to end: engines are put to sleep for good, so that the trainer can compute again.
    """
    answers = ask_engine(engine, sequences, theirs)
    if engine is not None:
        with contextlib.suppress(EngineDied):
            engine.sleep(2)
    offload.wait_for_all(policy)
    return likeliest(ours, ask_trainer(policy, sequences, monitor), answers, policy.ranks.exchange.transport)


def ask_trainer(policy: Policy, sequences: Sequences, monitor: PassMonitor | None) -> PairScores:
    """Return the trainer's answers on pairs of the sequences' tokens. Collective."""
    found = score(policy, pairs_of(sequences), monitor, record_experts=policy.arch.experts is not None)
    return PairScores(found.logprobs, np.concatenate([one[:1] for one in found.experts]) if found.experts else None)


def ask_engine(engine: Engine | None, sequences: Sequences, theirs: Sequence[Floats]) -> EngineScores | None:
    """Return an engine's answers beside `theirs`, its log-probs of the sequences; None if it gives none."""
    if engine is None or not theirs:
        return None
    try:
        return EngineScores(theirs, engine.prompt_logprobs(pairs_of(sequences)), engine.top_logprobs(sequences, TOP))
    except EngineDied:
        return None


def likeliest(ours: Sequence[Floats], pairs: PairScores, answers: EngineScores | None, transport: Transport) -> str:
    """Return the cause that an engine's answers show beside the trainer's, equal on all ranks. Collective."""
    cause = ""
    if answers is not None:
        found = ProbeAnswers(
            probe=_gaps(ours, answers.probe),
            pairs=_gaps(pairs.logprobs, answers.pairs),
            experts=pairs.experts,
            top=np.concatenate(answers.top),
        )
        cause = name_cause(found)
    causes = gather_unordered(transport, cause.encode())
    return next((text.decode() for text in causes if text), "unknown, because no engine answered")


def pairs_of(sequences: Sequences) -> list[list[int]]:
    """Return pairs of neighbours in the sequences, each with another first token."""
    pairs: dict[int, list[int]] = {}
    for tokens in sequences:
        for first, second in zip(tokens, tokens[1:], strict=False):
            pairs.setdefault(int(first), [int(first), int(second)])
    return list(pairs.values())[:_PAIRS]


def _gaps(ours: Sequence[Floats], theirs: Sequence[Floats]) -> Floats:
    gaps = np.concatenate([np.abs(a - b) for a, b in zip(ours, theirs, strict=True)])
    return np.nan_to_num(gaps, nan=np.inf).astype(np.float32)
