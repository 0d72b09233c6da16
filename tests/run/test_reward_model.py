"""A run whose rewards come from reward models on engines of its own, killed while they score, equals one left alone.

It takes three to four minutes, for three starts of a run with two engines. It would catch scores that reach
the wrong completions, groups that are sampled or scored again after a kill, a reward that lacks a part after a resume,
and an engine whose death costs more than a restart.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import numpy as np
import psutil

from gspo_hpc.system import processes
from tests.run import harness

ROOT = Path(__file__).resolve().parents[2]


def reward_model(out: Path) -> Path:
    """Return a model of sequences that takes seconds for a rollout, so that a kill finds it at work."""
    spec = importlib.util.spec_from_file_location("make_random_model", ROOT / "tools" / "make_random_model.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    sizes = {"hidden": 512, "layers": 8, "heads": 8, "head_dim": 64, "intermediate": 1024, "std": 0.05}
    made: Path = tool.make_random_model(out, "llama", classifies=True, **sizes)
    return made


def scored_lines(run_dir: Path, rollout: int) -> int:
    """Groups of a rollout with all of their scores on disk."""
    files = (run_dir / "rollouts" / f"{rollout:06d}").glob("rank-*.scored")
    return sum(max(0, len(file.read_bytes().splitlines()) - 1) for file in files)


def engines(run_dir: Path) -> list[psutil.Process]:
    """The first processes of the run's engines, in the order in which they were started."""
    found = [psutil.Process(pid) for pid in processes.marked(harness.run_id(run_dir))]
    return sorted((one for one in found if "gspo_hpc.engine.host" in one.cmdline()), key=lambda one: one.create_time())


def test_a_run_killed_while_it_scores_equals_one_left_alone(tiny_config: Path, tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "model")
    models = [{"name": "rm", "path": str(folder), "kv_cache_gb": 0.03}]
    functions = [{"function": "number_match"}, {"function": "reward_model", "weight": 0.1}]
    overrides = (
        *harness.OVERRIDES,
        harness.ONE_RANK,
        "run.max_steps=4",
        f"reward.models={json.dumps(models)}",
        f"reward.functions={json.dumps(functions)}",
    )
    alone, log = tmp_path / "alone", tmp_path / "log"
    process = harness.start(harness.command(tiny_config, alone, *overrides), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    steps = [record for record in harness.metrics(alone) if record["step"] > 0]
    assert len({record["reward/reward_model"] for record in steps}) == 4
    assert all(record["failures"] == 0 for record in steps)

    killed = tmp_path / "killed"
    command = harness.command(tiny_config, killed, *overrides)
    process = harness.start(command, log)
    harness.wait_for(lambda: scored_lines(killed, 0) >= 1, process, log)
    harness.kill(process)
    assert harness.journal_lines(killed, 0) == 8 > scored_lines(killed, 0)  # all are sampled, and some are scored

    process = harness.start(command, log)
    harness.wait_for(lambda: scored_lines(killed, 1) >= 1, process, log)
    os.kill(engines(killed)[0].pid, signal.SIGKILL)  # the policy's engine is started last
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert harness.metrics(killed)[-1]["engine_restarts"] == 1
    assert harness.comparable(killed) == harness.comparable(alone)
    first, second = (harness.export(one, tmp_path / f"{one.name}-weights") for one in (alone, killed))
    assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
