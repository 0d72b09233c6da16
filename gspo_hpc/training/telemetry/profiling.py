"""A step under torch's profiler: one trace a rank, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def trace_path(folder: Path, step: int, rank: int) -> Path:
    """Return the path of the trace of a step."""
    return folder / f"step-{step:06d}-rank-{rank}.json.gz"


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Trace the operations of this process, not of its engine, within this block into `path`, for its owner only."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = os.umask(0o077)
    try:
        profiler.export_chrome_trace(str(path))
    finally:
        os.umask(before)
