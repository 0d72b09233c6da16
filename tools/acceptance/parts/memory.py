"""Memory that runs out: for the engine at its start, and for the trainer in the middle of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import models, runs
from ..environment import Environment
from ..rows import Recorder

STEPS = 6
MESSAGE = "out_of_memory"  # how the names of the symptoms begin


def run(env: Environment, record: Recorder) -> None:
    """Take memory away from runs, and read how they say so."""
    config = runs.write_config(env, "memory", models.light(env), eager=True, run={"max_steps": STEPS, "seed": 7})
    _engine_without_memory(env, record, config)
    if env.cuda:
        _trainer_without_memory(record, runs.Run(env, "crowded", config))
    else:
        record.no_meaning("memory taken in the middle of a run")


def _engine_without_memory(env: Environment, record: Recorder, config: Path) -> None:
    """Too little memory for the engine's cache, at its start: on a GPU because another process has most of it."""
    overrides = () if env.cuda else ("rollout.kv_cache_gb=0.00001",)
    crowded = runs.Run(env, "no-cache", config, *overrides)
    with _hold(0.6) if env.cuda else contextlib.nullcontext():
        crowded.start()
        code = crowded.finish()
    _told(record, "no memory for the engine", crowded, code)


def _trainer_without_memory(record: Recorder, crowded: runs.Run) -> None:
    """Take whatever is free, again and again, once the run has made a step."""
    process = crowded.start()
    runs.harness.wait_for(lambda: runs.harness.last_step(crowded.folder) >= 1, process, crowded.log)
    held = []
    while process.poll() is None:
        free, _ = torch.cuda.mem_get_info()
        if free > 128 << 20:
            with contextlib.suppress(torch.OutOfMemoryError):
                held.append(torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda"))
        time.sleep(0.02)
    code = crowded.finish()
    held.clear()
    torch.cuda.empty_cache()
    _told(record, "memory taken in the middle of a run", crowded, code)


@contextlib.contextmanager
def _hold(share: float) -> Iterator[None]:
    """Hold this share of the card within the block."""
    _, total = torch.cuda.mem_get_info()
    held = torch.empty(int(share * total), dtype=torch.uint8, device="cuda")
    yield
    del held
    torch.cuda.empty_cache()


def _told(record: Recorder, what: str, run: runs.Run, code: int) -> None:
    """Record how the run ended, its last line, and what diagnose makes of it."""
    record.check(f"{what}: exit code", str(code), "1 or 2", code in (1, 2))
    record.figure(f"{what}: last line", run.last_line())
    _, symptoms = runs.harness.diagnose(run.folder)
    named = [name for name in symptoms if MESSAGE in name or "memory" in name]
    told = ", ".join(symptoms) or "nothing"
    record.check(f"{what}: diagnose", told, "names the memory", bool(named))
