"""Puts a NaN into the gradient of rank 1 in its third step. Python imports this at its start, found on PYTHONPATH."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


def poison(pipeline: ModuleType) -> None:
    """Let the third backward pass of this rank give one parameter a gradient that is no number."""
    original, calls = pipeline.train_step, 0

    def train_step(policy: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            parameter = policy.chunks[-1].decoder.final_layernorm.weight
            handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * float("nan"))[1])
        return original(policy, *arguments, **named)

    pipeline.train_step = train_step


class Finder:
    """Finds gspo_hpc.policy.schedule as everybody does, and has it changed once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Called for every import."""
        if name != "gspo_hpc.policy.schedule":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        loader, load = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = load  # type: ignore[method-assign]  # the modules of an archive share their loader
            load(module)
            poison(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("SLURM_PROCID") == "1" and "gspo_hpc.training.worker" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
