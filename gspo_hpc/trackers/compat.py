"""Private interfaces of trackers' libraries, checked against the versions in tests/torch/trackers/test_compat.py."""

from __future__ import annotations

from typing import Any


def swanlab_steps(run: Any) -> dict[str, int]:
    """Return the last step of each number that the server of an online SwanLab run had when the run was opened."""
    metrics = run._ctx.core._metrics
    return {key: int(metric.min_step) for key, metric in metrics._metrics.items() if metric.min_step >= 0}
