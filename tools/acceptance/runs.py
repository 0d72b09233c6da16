"""Whole runs of the parts, through the command line: their config, and what is read from their folders."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from gspo_hpc.config.loader import from_dict
from gspo_hpc.system import processes
from gspo_hpc.system.environment import ENGINE
from tests.run import harness

from . import REPO, models
from .environment import Environment
from .rows import Recorder

UTILISATION = 0.8  # of the card, for the engine of a run
_UNDER_WAY = 0.3  # seconds after a rollout has begun, of the several that it takes
FINITE = ("loss", "grad_norm", "reward")  # of every record


def write_config(env: Environment, name: str, model: Path, *, eager: bool = False, **sections: Any) -> Path:
    """Write the config of a run of one rank; `eager`: without CUDA graphs, for an engine that starts soon.

    Rewards depend on the text alone, so equal runs get equal ones.
    """
    sizes = env.sizes
    base: dict[str, Any] = {
        "run": {"name": name, "max_steps": sizes.steps, "seed": 7},
        "cluster": {"platform": env.platform, "gpus_per_node": 1},
        "model": {"path": str(model), "dtype": sizes.dtype},
        "batch": {
            "global_batch_size": 8 * sizes.groups,
            "num_generations": 8,
            "steps_per_generation": 2,
            "micro_batch_tokens": sizes.micro_batch,
        },
        "data": {"train": str(models.prompts(env))},
        "rollout": {"max_prompt_length": 64, "max_response_length": sizes.run_length, "kv_cache_gb": 0.25},
        "reward": {"functions": [{"function": f"{REPO / 'tools' / 'bench' / 'graders.py'}:text_reward"}]},
        "optimizer": {"lr": 1e-5},
        "checkpoint": {"interval": 3, "keep": 10},
        "eval": {"before": False, "after": False},
        "tracking": {"wandb": "disabled"},
    }
    if env.cuda:
        base["rollout"]["engine"] = {"gpu_memory_utilization": UTILISATION, "enforce_eager": eager}
    for section, settings in (*sizes.extra.items(), *sections.items()):
        base[section] = base.get(section, {}) | settings
    from_dict(base)  # a mistake in here is told at once
    file = env.work / f"{name}.yaml"
    file.write_text(json.dumps(base))
    return file


class Run:
    """A run in a folder of the work folder; what an earlier one has left there is removed."""

    def __init__(self, env: Environment, name: str, config: Path, *overrides: str) -> None:
        self.folder = env.work / "runs" / name
        self.log = env.work / "logs" / f"run-{name}.log"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._command = harness.command(config, self.folder, *overrides)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **variables: str) -> subprocess.Popen[bytes]:
        """Start it, or go on with it; `variables` are added to its environment."""
        self.process = harness.start(self._command, self.log, **variables)
        return self.process

    def finish(self, seconds: float = 400.0) -> int:
        """Return its exit code."""
        assert self.process is not None
        code = harness.finish(self.process, self.log, seconds)
        print(f"{self.folder.name}: ended with {code}\n{self.log.read_text()[-1500:]}", flush=True)
        return code

    def wait_for_generation(self, rollout: int) -> None:
        """Return when a rollout is under way."""
        assert self.process is not None
        journal = self.folder / "rollouts" / f"{rollout:06d}"
        harness.wait_for(journal.exists, self.process, self.log)
        time.sleep(_UNDER_WAY)

    def last_line(self) -> str:
        """Return the last line of its output, where a command says why it failed."""
        lines = [line.strip() for line in self.log.read_text("utf-8", "replace").splitlines()]
        return next((line[:300] for line in reversed(lines) if line), "nothing")

    def records(self) -> list[dict[str, Any]]:
        """Return metrics.jsonl."""
        return harness.metrics(self.folder)

    def attempts(self) -> list[str]:
        """Return how the attempts ended."""
        files = sorted((self.folder / "attempts").glob("*/attempt.json"))
        return [str(json.loads(file.read_text()).get("reason")) for file in files]

    def checkpoints(self) -> list[int]:
        """Return the steps of whole checkpoints."""
        return sorted(int(file.parent.name) for file in (self.folder / "checkpoints").glob("[0-9]*/COMMITTED"))

    def discard(self) -> None:
        """Remove the checkpoints, which are large."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)

    def engine_cores(self) -> list[psutil.Process]:
        """Return the processes in which vLLM's core runs: on GPUs its own, on a CPU the engine's."""
        found = [psutil.Process(pid) for pid in processes.marked(harness.run_id(self.folder))]
        engines = [process for process in found if ENGINE in process.environ()]
        return [one for one in engines if "EngineCore" in " ".join(one.cmdline())] or engines


def judge(record: Recorder, what: str, run: Run, code: int, steps: int) -> None:
    """Record whether a run went through: its exit code, a record of every step, and finite values in them."""
    record.check(f"{what}: exit code", str(code), "0", code == 0)
    if code:
        record.figure(f"{what}: last line", run.last_line())
    records = run.records()
    found = [int(one["step"]) for one in records]
    record.check(f"{what}: steps recorded", f"{len(found)}", f"{steps}, each once", found == list(range(1, steps + 1)))
    values = [float(one[name]) for one in records for name in FINITE]
    good = bool(values) and all(math.isfinite(value) for value in values)
    record.check(f"{what}: {', '.join(FINITE)}", "finite" if good else "not finite", "finite", good)
    for name in ("probe_logprob_gap_max", "logprob_gap_mean", "logprob_gap_max"):
        if gaps := [float(one[name]) for one in records if one.get(name) is not None]:
            record.figure(f"{what}: {name}, largest of all steps", f"{max(gaps):.3g} nats")


def speed(record: Recorder, what: str, run: Run) -> None:
    """Record the seconds of a step by phase: means, since only the first update of a rollout waits for generation.

    The first rollout is left out: what is slow the first time is in it.
    """
    records = run.records()[2:]
    names = sorted({name for one in records for name in one if name == "seconds" or name.startswith("seconds/")})
    means = {name: sum(float(one.get(name, 0.0)) for one in records) / len(records) for name in names}
    told = ", ".join(f"{name.removeprefix('seconds/')} {value:.2f}" for name, value in means.items() if value)
    record.figure(f"{what}: seconds of a step, means by phase", told)


__all__ = ["Run", "harness", "judge", "speed", "write_config"]
