"""Weights that follow targets: how far one step moves them, what leaves them, and that a checkpoint keeps every bit.

Would catch a weight that runs away from its target, one that a number that is none destroys, and one that a resumed
run begins anew.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_hpc.algorithms.objective import Objective
from gspo_hpc.algorithms.terms.adaptive import AdaptiveWeights
from gspo_hpc.policy.schedule import StepResult
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.checkpoint_state import CheckpointState
from gspo_hpc.training.progress import Progress

FIXED = Objective("token", 0.2, 0.2, "sequence", True, 0.01)
FOLLOWING = replace(FIXED, kl_target=0.1, entropy_target=0.5, entropy_coef=0.02)


@pytest.mark.parametrize(
    ("kl", "entropy", "beta", "coef"),
    [
        (0.1, 0.4, 0.01, 0.025),
        (0.11, 0.6, 0.01 * 1.01, 0.015),
        (9.0, 0.5, 0.01 * 1.02, 0.015),
        (0.0, 0.4, 0.01 * 0.98, 0.025),
        (math.nan, math.inf, 0.01, 0.02),
    ],
)
def test_a_step_moves_the_weights_towards_their_targets(kl: float, entropy: float, beta: float, coef: float) -> None:
    weights = AdaptiveWeights.first(FOLLOWING)
    assert weights is not None
    found = weights.after(FOLLOWING, {"reference_kl": (kl * 8, 8.0), "entropy": (entropy * 8, 8.0)})
    assert (found.kl_beta, found.entropy_coef) == pytest.approx((beta, coef))
    assert found.of(FOLLOWING) == replace(FOLLOWING, kl_beta=found.kl_beta, entropy_coef=found.entropy_coef)
    assert weights.after(FOLLOWING, {"reference_kl": (0.0, 0.0)}) == weights
    assert AdaptiveWeights(0.1, 0.0).after(FOLLOWING, {"entropy": (9.0, 1.0)}).entropy_coef == 0.0
    assert AdaptiveWeights(0.1, 1.0).after(FOLLOWING, {"entropy": (0.1, 1.0)}).entropy_coef == 1.0


def test_they_settle_where_the_target_is_met() -> None:
    """A policy whose divergence falls with the weight: 0.001 / weight."""
    weights = AdaptiveWeights(1e-3, 0.0)
    for _ in range(600):
        weights = weights.after(FOLLOWING, {"reference_kl": (0.001 / weights.kl_beta, 1.0)})
    assert weights.kl_beta == pytest.approx(0.01, rel=1e-3)


def test_a_resumed_run_goes_on_with_every_bit(tmp_path: Path) -> None:
    progress = Progress(weights=AdaptiveWeights.first(FOLLOWING))
    made = StepResult({"reference_kl": (0.31, 3.0), "entropy": (1.0, 3.0)}, {}, {}, 0.0, False, False, 0.0)
    progress.adapt(FOLLOWING, made)
    kept = progress.weights
    for nothing in (None, replace(made, skipped=True)):
        progress.adapt(FOLLOWING, nothing)
        assert progress.weights is kept
    progress.cursor = Cursor(step=1)
    progress.checkpoint_state({}).write(tmp_path)
    progress.checkpoint_state({}).write_groups(tmp_path, 0)
    assert CheckpointState.read(tmp_path).weights == kept and kept is not None
    assert progress.objective(FOLLOWING).kl_beta == kept.kl_beta


def test_fixed_weights_have_no_state(tmp_path: Path) -> None:
    progress = Progress(weights=AdaptiveWeights.first(FIXED))
    assert progress.weights is None and progress.objective(FIXED) is FIXED
    progress.checkpoint_state({}).write(tmp_path)
    assert "adaptive_weights.json" not in {path.name for path in tmp_path.iterdir()}
