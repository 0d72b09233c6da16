"""The private names of SwanLab that trackers.compat relies on. Takes milliseconds."""

from __future__ import annotations

from tests.sources import missing, require_checked

SWANLAB = ("0.10.3",)
SDK = "swanlab/sdk/internal"
NAMES = {
    f"{SDK}/run/__init__.py: Run.__init__": ("self", "ctx"),  # keeps it as _ctx, whose core has the metrics
    f"{SDK}/core_python/metrics/__init__.py: RunMetrics.new": ("cls", "data"),  # in _metrics, by key
    f"{SDK}/core_python/metrics/__init__.py: RunMetrics.define_scalar": ("self",),  # min_step: the last one there
}


def test_names_of_swanlab() -> None:
    root = require_checked(["swanlab"], SWANLAB, "gspo_hpc/trackers/compat.py", NAMES)
    assert missing(root, NAMES) == []
