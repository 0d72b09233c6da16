"""Lets ranks read from files of a test how much memory is in use. Python imports this at its start, on PYTHONPATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if "gspo_hpc.training.worker" in sys.orig_argv:
    from gspo_hpc.system import host_memory

    host_memory.ROOT = Path(os.environ["GSPO_HPC_TEST_ROOT"])
