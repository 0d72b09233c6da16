"""The questions that engine and trainer are asked once they disagree, to name the cause of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gspo_hpc.data.records import Experts, Floats
from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.exchange.transport import gather_unordered
from gspo_hpc.models.parts import Rope
from gspo_hpc.policy import offload
from gspo_hpc.policy.model import rotated_by
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.training.agreement.causes import TOP, ProbeAnswers, name_cause
from gspo_hpc.training.agreement.scoring import Sequences, score

_PAIRS = 64
_THETAS = tuple(float(digit * 10**power) for power in range(3, 8) for digit in (1, 2, 5))
_FACTORS = (2.0, 4.0, 8.0, 32.0)


def explain(
    policy: Policy,
    engine: Engine | None,
    sequences: Sequences,
    theirs: Sequence[Floats],  # what `engine` answered; empty where it did not
    monitor: PassMonitor | None,
) -> str:
    """Return the cause of a mismatch, equal on all ranks. Collective.

    The run is about to end: engines are put to sleep for good, so that the trainer can compute again.
    """
    pairs = pairs_of(sequences)
    answers: tuple[list[Floats], list[Floats]] | None = None
    if engine is not None:
        with contextlib.suppress(EngineDied):
            if theirs:
                answers = engine.prompt_logprobs(pairs), engine.top_logprobs(sequences, TOP)
            engine.sleep(2)
    offload.wait_for_all(policy)
    own = score(policy, sequences, monitor)
    own_pairs = score(policy, pairs, monitor, record_experts=policy.arch.experts is not None)
    ropes = _under_other_ropes(policy, sequences, monitor)
    cause = ""
    if answers is not None:
        of_pairs, top = answers
        found = ProbeAnswers(
            probe=_gaps(own.logprobs, theirs),
            pairs=_gaps(own_pairs.logprobs, of_pairs),
            experts=_of_first_tokens(own_pairs.experts),
            top=np.concatenate(top),
            ropes={name: float(_gaps(logprobs, theirs).mean()) for name, logprobs in ropes.items()},
        )
        cause = name_cause(found)
    causes = gather_unordered(policy.ranks.exchange.transport, cause.encode())
    return next((text.decode() for text in causes if text), "unknown, because no engine answered")


def pairs_of(sequences: Sequences) -> list[list[int]]:
    """Return pairs of neighbours in the sequences, each with another first token."""
    pairs: dict[int, list[int]] = {}
    for tokens in sequences:
        for first, second in zip(tokens, tokens[1:], strict=False):
            pairs.setdefault(int(first), [int(first), int(second)])
    return list(pairs.values())[:_PAIRS]


def other_ropes(rope: Rope) -> Mapping[str, Rope]:
    """Return rotary embeddings that an engine may have read instead of `rope`, by what to call them."""
    found = {f"rope_theta {theta:g}": replace(rope, theta=theta) for theta in _THETAS if theta != rope.theta}
    if rope.kind != "default":
        return found | {"no rope scaling": Rope(rope.theta)}
    return found | {f"linear rope scaling by {by:g}": Rope(rope.theta, "linear", by) for by in _FACTORS}


def _under_other_ropes(
    policy: Policy, sequences: Sequences, monitor: PassMonitor | None
) -> dict[str, Sequence[Floats]]:
    found: dict[str, Sequence[Floats]] = {}
    for name, rope in _usable_ropes(policy):
        with rotated_by(policy.chunks, rope, policy.arch.head_dim):
            found[name] = score(policy, sequences, monitor).logprobs
    return found


def _usable_ropes(policy: Policy) -> Iterator[tuple[str, Rope]]:
    if policy.config.model.provider == "own":  # others compute rotary embeddings in their own way
        yield from other_ropes(policy.arch.rope).items()


def _gaps(ours: Sequence[Floats], theirs: Sequence[Floats]) -> Floats:
    gaps = np.concatenate([np.abs(a - b) for a, b in zip(ours, theirs, strict=True)])
    return np.nan_to_num(gaps, nan=np.inf).astype(np.float32)


def _of_first_tokens(experts: Sequence[Experts]) -> Experts | None:
    return np.concatenate([one[:1] for one in experts]) if experts else None
