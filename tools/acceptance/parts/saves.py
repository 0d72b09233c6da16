"""Measure how long a save keeps the loop waiting: written in the background beside an update, and waited for."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from gspo_hpc.algorithms import objective as algorithms
from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.runs import commit
from gspo_hpc.system.files import Entry
from gspo_hpc.training import update as updates

from .. import measure, models
from ..environment import Environment
from ..rows import Recorder
from ..trainers import completions, config, make_policy

TURNS = 3  # pairs of saves that are measured, after one that is not
SHARE = 0.05  # of the time of a save that is waited for


def run(env: Environment, record: Recorder) -> None:
    """Save one state twice, the second time beside an update, which must not reach what is saved."""
    model = models.light(env)
    settings = config(env, model)
    policy = make_policy(model, settings)
    groups = completions(env, policy, env.sizes.groups)
    objective = algorithms.resolve(settings.algorithm)
    waiting, background = Saver(policy, background=False), Saver(policy)
    folder = env.work / "saves"
    shutil.rmtree(folder, ignore_errors=True)

    def update() -> float:
        measure.synchronize(env)
        began = time.perf_counter()
        updates.step(policy, groups, objective, settings)
        measure.synchronize(env)
        return time.perf_counter() - began

    update()  # the first one makes Adam's moments
    usual = min(update() for _ in range(TURNS))
    waited, stalled, size, other = [], [], 0, 0
    for turn in range(TURNS + 1):
        measure.synchronize(env)
        waited.append(_save(waiting, folder, 2 * turn + 1))
        seconds = _save(background, folder, 2 * turn + 2)
        # What an update waits for the copy, or loses to it, counts as well.
        stalled.append(seconds + max(0.0, update() - usual))
        background.wait()
        alone, beside = map(_data, commit.list_committed(folder)[-2:])
        assert alone, "a checkpoint without weights"
        size = sum(map(len, beside.values()))
        other += sum(beside.get(name) != content for name, content in alone.items()) + abs(len(alone) - len(beside))
        commit.retain(folder, 1)
    shutil.rmtree(folder)
    for kind, values in (("waited for", waited[1:]), ("in the background", stalled[1:])):
        told = f"{statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"
        record.figure(f"{size / 1e9:.2f} GB, {kind}: the loop stands still", told)
    share = statistics.median(stalled[1:]) / statistics.median(waited[1:])
    record.at_most("stall in the background, as a share of a save that is waited for", share, SHARE, gpu_only=True)
    record.at_most(f"{TURNS + 1} saves beside an update: files that differ from those of the save before", other, 0)


def _save(saver: Saver, folder: Path, step: int) -> float:
    """Return the seconds that the loop waits for a save."""
    commit.begin(folder, step)
    staging = commit.staging_path(folder, step)

    def seal(known: Mapping[str, Entry]) -> None:
        commit.commit(staging, step, known=known)

    began = time.perf_counter()
    saver.save(staging, seal)
    return time.perf_counter() - began


def _data(checkpoint: Path) -> dict[str, bytes]:
    """Return the files of weights and optimizer of a checkpoint."""
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files if path.suffix == ".distcp"}
