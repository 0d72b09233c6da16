"""The record of one optimizer step: what goes to the console, metrics.jsonl and the trackers.

Floor 4. Rewards and lengths are those of the completions of this step's global batch; losses, ratios and gaps are over
the completions that were computed (those with an advantage); seconds are wall time by phase.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_hpc.cursor import Cursor
from gspo_hpc.pipeline import StepResult
from gspo_hpc.records import Group

MEAN_OF = {"gap": "gap_mean", "ratio": "ratio_mean"}  # names beside which a maximum stands


def step_record(
    before: Cursor,
    after: Cursor,
    groups: Sequence[Group],
    result: StepResult | None,
    seconds: Mapping[str, float],
    total_seconds: float,
) -> dict[str, Any]:
    """One flat record of the step that led from `before` to `after`."""
    completions = [c for group in groups for c in group.completions]
    kept = [c for c in completions if not c.excluded]
    rewards = np.array([c.reward for c in kept], dtype=np.float64)
    lengths = np.array([len(c.tokens) for c in completions], dtype=np.float64)
    record: dict[str, Any] = {
        "step": after.step,
        "rollout": before.rollout,
        "update": before.update,
        "epoch": before.epoch,
        "reward": float(rewards.mean()) if len(rewards) else None,
        "reward_std": float(rewards.std()) if len(rewards) else None,
        "failures": sum(c.failure is not None for c in completions),
        "excluded": len(completions) - len(kept),
        "zero_variance_groups": sum(all(c.advantage == 0.0 for c in group.completions) for group in groups),
        "response_length": float(lengths.mean()),
        "response_length_max": int(lengths.max()),
        "truncated_fraction": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "completion_tokens": int(lengths.sum()),
        "tokens": after.completion_tokens,
        "sampled_crc32": zlib.crc32(b"".join(c.tokens.tobytes() for c in completions)),  # equal runs sample equally
        "seconds": total_seconds,
        "time": time.time(),
    }
    for name in sorted({name for c in kept for name in c.reward_parts}):
        record[f"reward/{name}"] = float(np.mean([c.reward_parts.get(name, 0.0) for c in kept]))
    for phase in ("generate", "reward_wait", "old_logprobs", "reference", "update", "sync"):
        record[f"seconds/{phase}"] = seconds.get(phase, 0.0)
    if result is None:  # every advantage was zero: there was nothing to learn, and no step was made
        return record | {"loss": 0.0, "grad_norm": 0.0, "skipped": 0, "empty": 1}
    means = {MEAN_OF.get(name, name): total / count for name, (total, count) in result.sums.items() if count}
    return (
        record
        | means
        | result.maxima
        | result.experts
        | result.packing
        | {"grad_norm": result.grad_norm, "lr": result.learning_rate, "skipped": int(result.skipped), "empty": 0}
    )
