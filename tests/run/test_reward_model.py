"""A run whose rewards come from reward models on engines of its own, killed while they score, equals one left alone.

It takes four to five minutes, for five starts of a run with two engines. It would catch scores that reach
the wrong completions, groups that are sampled or scored again after a kill, a reward that lacks a part after a resume,
an engine whose death costs more than a restart, and rewards that depend on where the engines are: on the GPUs that
train, or set apart.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from gspo_hpc.system import processes
from tests.run import harness

ROOT = Path(__file__).resolve().parents[2]
# Where engines are: more overrides, and the rank that scores.
PLACES = {
    "colocate": ((harness.ONE_RANK,), 0),
    "apart": (("cluster.gpus_per_node=3", "rollout.mode=server", "rollout.engines_per_node=1"), 1),
}


def reward_model(out: Path) -> Path:
    """Return a model of sequences with random weights."""
    spec = importlib.util.spec_from_file_location("make_random_model", ROOT / "tools" / "make_random_model.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    made: Path = tool.make_random_model(out, "llama", classifies=True)
    return made


def scored_lines(run_dir: Path, rollout: int) -> int:
    """Groups of a rollout with all of their scores on disk."""
    files = (run_dir / "rollouts" / f"{rollout:06d}").glob("rank-*.scored")
    return sum(max(0, len(file.read_bytes().splitlines()) - 1) for file in files)


def engines(run_dir: Path) -> list[psutil.Process]:
    """The first processes of the run's engines, in the order in which they were started."""
    found = []
    for pid in processes.marked(harness.run_id(run_dir)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            one = psutil.Process(pid)
            found += [(one.create_time(), one)] if "gspo_hpc.engine.host" in one.cmdline() else []
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def settings(place: str, model: Path) -> tuple[str, ...]:
    """The overrides of a run whose reward model is in this place."""
    models = [{"name": "rm", "path": str(model), "kv_cache_gb": 0.03, "placement": place}]
    functions = [{"function": "number_match"}, {"function": "reward_model", "weight": 0.1}]
    own = (f"reward.models={json.dumps(models)}", f"reward.functions={json.dumps(functions)}")
    return (*harness.OVERRIDES, *PLACES[place][0], "run.max_steps=4", *own)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("scoring") / "model")


@pytest.fixture(scope="module")
def alone(tiny_config: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run left alone, whose reward model shares the GPU that trains."""
    folder = tmp_path_factory.mktemp("alone")
    run_dir, log = folder / "run", folder / "log"
    process = harness.start(harness.command(tiny_config, run_dir, *settings("colocate", model)), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    steps = [record for record in harness.metrics(run_dir) if record["step"] > 0]
    assert len({record["reward/reward_model"] for record in steps}) == 4
    assert all(record["failures"] == 0 for record in steps)
    return run_dir


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_while_it_scores_equals_one_left_alone(
    place: str, tiny_config: Path, model: Path, alone: Path, tmp_path: Path
) -> None:
    killed, log, note = tmp_path / "killed", tmp_path / "log", tmp_path / "planted"
    command = harness.command(tiny_config, killed, *settings(place, model))
    process = harness.start(command, log, **harness.planted("scored", note, rank=PLACES[place][1]))
    assert harness.finish(process, log) == 1 and note.exists(), log.read_text()[-3000:]
    assert (harness.journal_lines(killed, 0), scored_lines(killed, 0)) == (8, 1)  # all are sampled, and one is scored
    sampled = tmp_path / "sampled"  # stays when the folder goes
    sampled.hardlink_to(killed / "rollouts" / "000000" / "rank-0000.journal")
    before = sampled.read_bytes()

    process = harness.start(command, log)
    # The policy's engine is started last: when there are two, the first is ready, and has scored nothing yet.
    harness.wait_for(lambda: len(engines(killed)) == 2, process, log)
    os.kill(engines(killed)[0].pid, signal.SIGKILL)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert sampled.read_bytes() == before, "groups were sampled again"
    assert harness.metrics(killed)[-1]["engine_restarts"] == 1
    assert harness.comparable(killed) == harness.comparable(alone)
    first, second = (harness.export(one, tmp_path / f"{one.parent.name}-weights") for one in (alone, killed))
    assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
