"""Lets rank 1 fail in the first attempt, and its process groups never end. Python imports this at its start.

On gloo groups end at once; NCCL waits for kernels that the other ranks never join. Here the store of the job is asked
for what nobody ever tells.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, NoReturn


def poison(module: ModuleType) -> None:
    """Change the module of the job that trains."""

    def never() -> None:
        from gspo_hpc.policy.process_groups import store

        store().wait(["what nobody tells"], datetime.timedelta(hours=1))

    def fail(*arguments: object, **named: object) -> NoReturn:
        raise RuntimeError("the planted one")

    job: Any = module
    job.stop = never
    job.start_rollout_worker = fail


class Finder:
    """Finds the module as everybody does, and has it changed once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Called for every import."""
        if name != "gspo_hpc.training.jobs.train":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            poison(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
if rank == "1" and os.environ.get("GSPO_HPC_ATTEMPT") == "1" and "gspo_hpc.training.worker" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
