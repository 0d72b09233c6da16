"""Runs whose rollouts end before all groups are finished: killed, resumed, and repeated from their journals.

It takes two minutes: nine starts of two ranks with engines. Which groups are finished first is the clock's choice, so
two runs differ; but what is in the journals decides everything. It would catch a group that is lost or trained on
twice, tokens under log-probs of other weights than those that sampled them, a resumed run that samples what was
sampled, and an update that is not the same when it is made again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_hpc.data.records import Group
from tests.run import harness

STEPS, PROMPTS, ROLLOUTS = 6, 8, 3
OVERRIDES = (
    f"run.max_steps={STEPS}",
    "batch.steps_per_generation=2",
    "optimizer.lr=1e-4",
    "rollout.max_response_length=24",
    "checkpoint.interval=2",
    "checkpoint.keep=9",
    "eval.before=false",
    "eval.after=false",
    "eval.interval=null",
    "rollout.oversampling_factor=1.75",
    "rollout.engine={max_num_seqs: 12}",  # so that groups are finished one after the other, and some are not
    "rollout.temperature=1.3",
    "reward.workers=1",
)
SERVER = ("cluster.gpus_per_node=3", "rollout.mode=server", "rollout.engines_per_node=1", "rollout.max_staleness=1")


def journal(run_dir: Path, rollout: int, kind: str = "journal") -> dict[str, list[str]]:
    """Lines of a rollout's files, without their headers."""
    files = sorted((run_dir / "rollouts" / f"{rollout:06d}").glob(f"*.{kind}"))
    return {path.name: path.read_text().splitlines()[1:] for path in files}


def groups(run_dir: Path, rollout: int) -> list[Group]:
    return [Group.from_json(line[9:]) for lines in journal(run_dir, rollout).values() for line in lines]


def carried(run_dir: Path, step: int) -> list[Any]:
    path = run_dir / "checkpoints" / f"{step:06d}" / "carried.json"
    return json.loads(path.read_text()) if path.exists() else []


def killed_and_resumed(config: Path, run_dir: Path, log: Path, *overrides: str, **variables: str) -> list[str]:
    """The command of a run that was killed in the middle of its second rollout and went on to its end.

    `variables`: more of its environment.
    """
    command = harness.command(config, run_dir, *overrides)
    process = harness.start(command, log, **variables)
    harness.wait_for(lambda: sum(map(len, journal(run_dir, 1).values())) > 2, process, log)
    harness.kill(process)
    before = journal(run_dir, 1)
    process = harness.start(command, log, **variables)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    for name, lines in before.items():
        whole = [line for line in lines if line in journal(run_dir, 1)[name]]
        assert len(whole) >= len(lines) - 1, "a group that was finished is sampled again"
    return command


def check_repeated(run_dir: Path, command: list[str], log: Path, tmp_path: Path) -> None:
    """A run that is put back to its first checkpoint ends with the same weights, and samples nothing."""
    again = tmp_path / f"{run_dir.name}-again"
    shutil.copytree(run_dir, again, symlinks=True)
    for step in (4, 6):
        shutil.rmtree(again / "checkpoints" / f"{step:06d}")
    expected = [journal(again, number) for number in range(1, ROLLOUTS)]
    process = harness.start([part.replace(str(run_dir), str(again)) for part in command], log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert [journal(again, number) for number in range(1, ROLLOUTS)] == expected, "it sampled what was sampled"
    assert harness.comparable(again) == harness.comparable(run_dir)
    assert carried(again, STEPS) == carried(run_dir, STEPS)
    ours, theirs = (harness.export(run, tmp_path / f"{run.name}-weights") for run in (again, run_dir))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", [(), SERVER], ids=["colocate", "server"])
def test_a_run_that_continues_what_is_unfinished_is_decided_by_its_journals(
    mode: tuple[str, ...], tiny_config: Path, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    overrides = (*OVERRIDES, *mode, "rollout.unfinished=continue")
    command = killed_and_resumed(tiny_config, run_dir, log, *overrides)
    firsts = [record for record in harness.metrics(run_dir) if record["update"] == 0]
    assert len(firsts) == ROLLOUTS and any(record["rollout/unfinished_groups"] for record in firsts)
    older = [record for record in firsts if record["rollout/older_token_fraction"] > 0]
    assert older, "nothing was continued: give engines less room"
    # Steps of the oldest token: a rollout of updates for each continuation, of which there may be one.
    assert max(record["rollout/token_staleness_max"] for record in firsts) == 2
    # A prompt is drawn once: it is trained on, carried to the end, or has no signal that anybody asked for.
    drawn = json.loads((run_dir / "checkpoints" / f"{STEPS:06d}" / "cursor.json").read_text())["offset"]
    assert drawn == ROLLOUTS * PROMPTS + len(carried(run_dir, STEPS)) or mode
    continued = 0
    for number in range(1, ROLLOUTS):
        for group in groups(run_dir, number):
            for one in group.completions:
                continued += len(one.pieces) > 1
                assert sum(count for _, count in one.pieces) == len(one.tokens) == len(one.logprobs)
                assert [version for version, _ in one.pieces] == sorted({version for version, _ in one.pieces})
    assert continued, "no completion was sampled by two weights: give engines less room"
    check_repeated(run_dir, command, log, tmp_path)


@pytest.mark.timeout(600)
def test_a_run_that_drops_what_is_unfinished_is_decided_by_its_journals(tiny_config: Path, tmp_path: Path) -> None:
    """Together with dynamic sampling: a rollout ends with enough groups that have signal."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("run.max_steps=4", "rollout.unfinished=drop", "rollout.dynamic_sampling=true", "optimizer.lr=1e-5")
    command = harness.command(tiny_config, run_dir, *OVERRIDES, *more)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 3, process, log)
    harness.kill(process)
    assert harness.last_step(run_dir) == 3 and sum(map(len, journal(run_dir, 1).values())) >= PROMPTS
    again = tmp_path / "again"
    shutil.copytree(run_dir, again, symlinks=True)
    for folder in (run_dir, again):  # from the second step on, by what the journals have
        process = harness.start([part.replace(str(run_dir), str(folder)) for part in command], log)
        assert harness.finish(process, log) == 0, log.read_text()[-3000:]
        records = harness.metrics(folder)
        assert [record["zero_variance_groups"] for record in records] == [0] * 4
        assert any(record.get("rollout/unfinished_groups") for record in records)
        assert not carried(folder, 4) and not journal(folder, 1, "unfinished")
        assert all(not one.pieces for group in groups(folder, 1) for one in group.completions)
    assert harness.comparable(again) == harness.comparable(run_dir)
    ours, theirs = (harness.export(run, tmp_path / f"{run.name}-weights") for run in (again, run_dir))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in theirs)
