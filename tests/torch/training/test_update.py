"""The number that a global batch is divided by: what `step` hands on to Megatron's optimizer step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gspo_hpc.algorithms import objective
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.policy.schedule import StepResult
from gspo_hpc.training import update


def completion(length: int, **more: Any) -> Completion:
    tokens = np.arange(length, dtype=np.int32)
    return Completion(tokens, np.full(length, -1.0, np.float32), "", "stop", 0, **more)


GROUPS = Exchange().gather_table(
    Group(
        slot,
        Prompt(slot, np.arange(4, dtype=np.int32), "", {}),
        (
            completion(3, advantage=1.0),
            completion(5, advantage=-1.0),
            completion(7, advantage=0.0),  # not computed, and it counts
            completion(11, excluded=True),  # does not count
        ),
    )
    for slot in range(2)
)


@pytest.mark.parametrize(("aggregation", "denominator"), [("token", 2 * (3 + 5 + 7)), ("sequence", 2 * 3)])
def test_the_mean_is_over_the_tokens_or_the_sequences_that_count(
    aggregation: Any, denominator: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The denominator counts the whole global batch, also completions without a gradient, but not excluded ones."""
    algorithm = {"name": "grpo", "aggregation": aggregation}
    config = from_dict({"algorithm": algorithm, "batch": {"micro_batch_tokens": 96}})
    policy: Any = SimpleNamespace(
        ranks=SimpleNamespace(dp_size=1, dp_rank=0, pp_size=1, device=torch.device("cpu"), exchange=Exchange()),
        chunks=[None],
        config=config,
    )
    handed: list[float] = []

    def train_step(policy: Any, batches: Any, objective: Any, denominator: float, *more: Any, **rest: Any) -> Any:
        handed.append(denominator)
        return StepResult({}, {}, {}, 0.0, False, False, 0.0)

    monkeypatch.setattr(update, "train_step", train_step)
    chosen = replace(objective.resolve(config.algorithm), kl_beta=0.0)
    assert chosen.aggregation == aggregation
    assert update.step(policy, GROUPS, chosen, config) is not None
    assert handed == [float(denominator)]
