"""Private interfaces of trackers' libraries, checked against the versions in tests/torch/trackers/test_compat.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def swanlab_steps(run: Any) -> dict[str, int]:
    """Return the last step of each number that the server of an online SwanLab run had when the run was opened."""
    metrics = run._ctx.core._metrics
    return {key: int(metric.min_step) for key, metric in metrics._metrics.items() if metric.min_step >= 0}


@contextlib.contextmanager
def without_wandb_launch(run_class: Any) -> Iterator[None]:
    """Keep wandb from importing W&B Launch to look for inputs of a job that nothing in this process has given.

    In a rank, which has thousands of modules, that import takes a second of processor time: for each of its classes
    pydantic looks through all modules. Releases without ``Run._detect_and_apply_job_inputs`` are left as they are.
    """
    look = getattr(run_class, "_detect_and_apply_job_inputs", None)
    if look is None or "wandb.sdk.launch" in sys.modules:
        yield
        return
    run_class._detect_and_apply_job_inputs = lambda run: None
    try:
        yield
    finally:
        run_class._detect_and_apply_job_inputs = look
