"""What follows from a config. No cost. It would catch a limit between engine and trainer that lets bad weights pass."""

from __future__ import annotations

import pytest

from gspo_hpc.config.derived import GapLimits, gap_limits
from gspo_hpc.config.loader import from_dict


@pytest.mark.parametrize(
    ("model", "rollout", "limits"),
    [
        ("float32", {}, GapLimits(1e-3, 1e-4, weighted=False)),
        ("bfloat16", {}, GapLimits(0.25, 0.05, weighted=True)),
        ("bfloat16", {"dtype": "float32"}, GapLimits(0.25, 0.05, weighted=True)),
        ("float32", {"dtype": "bfloat16"}, GapLimits(0.25, 0.05, weighted=True)),
        ("bfloat16", {"probe_max_gap": 0.5, "probe_mean_gap": 0.1}, GapLimits(0.5, 0.1, weighted=True)),
    ],
)
def test_the_gap_that_is_allowed_follows_from_the_precision_of_both(
    model: str, rollout: dict[str, object], limits: GapLimits
) -> None:
    """A limit ten times as large would let other weights pass."""
    assert gap_limits(from_dict({"model": {"dtype": model}, "rollout": rollout})) == limits
