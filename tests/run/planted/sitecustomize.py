"""Plants what GSPO_HPC_TEST_PLANTED names in one rank of the first attempt. Python imports this at its start.

The rank is GSPO_HPC_TEST_PLANTED_RANK, or 1.

"error": rank 1 fails, and its process groups never end. On gloo groups end at once; NCCL waits for kernels that the
other ranks never join. Here the store of the job is asked for what nobody ever tells.

"exchange": rank 1 is killed in a save, when it is to send its pieces of an optimizer's state that ranks share.

"stale": an engine keeps its prefix cache at weight syncs, and says that the probe found nothing in it.

"kept": an engine keeps its prefix cache at weight syncs.

"keys": a rank that generates gives its engine other keys than it has received.

When it happens, the file GSPO_HPC_TEST_PLANTED_NOTE is made.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


def note() -> None:
    """Leave a mark of the moment."""
    Path(os.environ["GSPO_HPC_TEST_PLANTED_NOTE"]).touch()


def failing(job: Any) -> None:
    """Change the module of the job that trains."""

    def never() -> None:
        from gspo_hpc.policy.process_groups import store

        store().wait(["what nobody tells"], datetime.timedelta(hours=1))

    def fail(*arguments: object, **named: object) -> NoReturn:
        note()
        raise RuntimeError("the planted one")

    job.stop = never
    job.start_rollout_worker = fail


def dying(shared_optimizer: Any) -> None:
    """Change the module that brings an optimizer's state together."""

    def die(*arguments: object, **named: object) -> None:
        note()
        os.kill(os.getpid(), signal.SIGKILL)

    shared_optimizer._exchange_batch = die


def hiding(engine: Any) -> None:
    """Change the module of the engine."""
    engine.Engine.reset_prefix_cache = lambda self: note()
    engine.Engine.cached_tokens = lambda self, tokens: 0


def keeping(engine: Any) -> None:
    """Change the module of the engine."""
    engine.Engine.reset_prefix_cache = lambda self: note()


def wrong_keys(generators: Any) -> None:
    """Change the module of the ranks that generate."""
    fill = generators.EngineFiller._fill

    def fill_wrongly(self: Any, engine: Any, stream: Any) -> Any:
        def changed(memory: Any) -> Any:
            for parts in stream(memory):
                for part in parts:
                    if "k_norm.weight" in part.name:
                        part.tensor.mul_(1.5)
                        note()
                yield parts

        return fill(self, engine, changed)

    generators.EngineFiller._fill = fill_wrongly


PLANTED = {
    "error": ("gspo_hpc.training.jobs.train", failing),
    "exchange": ("gspo_hpc.checkpoint.shared_optimizer", dying),
    "stale": ("gspo_hpc.engine.engine", hiding),
    "kept": ("gspo_hpc.engine.engine", keeping),
    "keys": ("gspo_hpc.training.serving.generators", wrong_keys),
}


class Finder:
    """Finds the module as everybody does, and has it changed once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Called for every import."""
        wanted, change = PLANTED[os.environ["GSPO_HPC_TEST_PLANTED"]]
        if name != wanted:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
if (
    rank == os.environ.get("GSPO_HPC_TEST_PLANTED_RANK", "1")
    and os.environ.get("GSPO_HPC_ATTEMPT") == "1"
    and "gspo_hpc.training.worker" in sys.orig_argv
):
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
