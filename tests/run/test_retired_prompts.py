"""Runs whose solved prompts are retired (data.no_resampling_pass_rate), over several epochs, killed and resumed.

It costs six starts of one training rank with an engine, at most five minutes. It would catch a resumed run that asks
other prompts than the one left alone, a retired prompt that comes again, a record of decisions that a kill tears,
doubles or loses, and a run that goes on for ever, or ends without a word, when too few prompts are left.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run import harness

ROWS, PROMPTS = 22, 4  # of the data, and of a rollout
# Completions are marked by a number that stands for chance and follows from their text. All those of the first level
# are right; of the others so many are wrong.
GRADER = """
import hashlib
import time


def marked(completion, *, fields, **row):
    time.sleep(0.02)  # so that groups are finished one after the other, and a kill finds a rollout half done
    drawn = int.from_bytes(hashlib.sha256(completion.encode()).digest()[:2], "big") / 65536
    return float(drawn >= (0.0, 0.15, 0.35)[fields["level"]])
"""
OVERRIDES = (
    "data.no_resampling_pass_rate=0.9",
    "data.eval=null",
    "rollout.temperature=2",  # completions of a group differ, so it is not decided by one of them
    "batch.num_generations=4",
    "batch.global_batch_size=8",
    "batch.steps_per_generation=2",
    "optimizer.lr=3e-4",
    "checkpoint.interval=1",
    "eval.before=false",
    "eval.after=false",
    "eval.interval=null",
    "tracking.samples=64",
)
IN_TURNS = ("cluster.gpus_per_node=1", "run.max_steps=200")
AHEAD = (
    *("cluster.gpus_per_node=2", "rollout.mode=server", "rollout.engines_per_node=1", "rollout.max_staleness=1"),
    *("rollout.dynamic_sampling=true", "rollout.max_num_gen_batches=20", "run.max_steps=200", "checkpoint.interval=2"),
)


def retired(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "retired.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def asked(run_dir: Path) -> dict[int, list[int]]:
    """The rows that a run that was left alone trained on, by the step before which they were sampled."""
    found: dict[int, list[int]] = {}
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        found.setdefault(sample["step"], []).append(sample["answer"]["number"])
    return found


def shown(run_dir: Path) -> dict[tuple[int, int], set[str]]:
    """The completions of each step and row. A step that is made again after a kill has the same ones."""
    found: dict[tuple[int, int], set[str]] = {}
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        found.setdefault((sample["step"], sample["answer"]["number"]), set()).add(sample["completion"])
    return found


def sampled_from_what_a_checkpoint_leaves(run_dir: Path) -> bool:
    """Tell whether a rollout is being sampled while a checkpoint says which prompts are retired."""
    saved = [path for path in run_dir.glob("checkpoints/0*/retired.json") if (path.parent / "COMMITTED").exists()]
    newest = max((one["rollout"] for one in retired(run_dir)), default=0)
    return bool(saved) and 0 < harness.journal_lines(run_dir, newest + 1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", [IN_TURNS, AHEAD], ids=["in turns", "a rollout ahead, with dynamic sampling"])
def test_solved_prompts_do_not_come_again_and_a_killed_run_retires_the_same(
    tiny_folder: Path, tiny_config: Path, tmp_path: Path, where: tuple[str, ...]
) -> None:
    grader, data, log = tmp_path / "grader.py", tmp_path / "train.jsonl", tmp_path / "log"
    grader.write_text(GRADER)
    source = [json.loads(line) for line in (tiny_folder / "data" / "train.jsonl").read_text().splitlines()[:ROWS]]
    rows = [row | {"number": number, "level": number % 3} for number, row in enumerate(source)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = (f"data.train={data}", f"reward.functions=[{{function: '{grader}:marked'}}]")

    def start(run_dir: Path, end: Callable[[], bool] | None = None) -> None:
        process = harness.start(harness.command(tiny_config, run_dir, *OVERRIDES, *where, *own), log)
        if end is None:
            assert harness.finish(process, log) == 2, log.read_text()[-3000:]
        else:
            harness.wait_for(end, process, log)
            harness.kill(process)

    alone, killed = tmp_path / "alone", tmp_path / "killed"
    start(alone)
    known, records = retired(alone), harness.metrics(alone)
    text = " ".join(log.read_text().split())
    left = ROWS - len(known)
    assert left < PROMPTS and f"{len(known)} prompts are retired, and the {left} that are left are fewer" in text
    assert records[-1]["epoch"] >= 2 and records[-1]["step"] < 200, "too few epochs to show anything: another seed"
    assert f"of {ROWS} prompts are retired" in text, "the console says at the end of an epoch how many are left"
    assert len({one["row"] for one in known}) == len(known) and all(one["pass_rate"] >= 0.9 for one in known)
    assert {one["row"] for one in known if one["epoch"] == 0} >= {row["number"] for row in rows if row["level"] == 0}
    counts = {record["step"]: record["data/retired"] for record in records if record["update"] == 0}
    assert counts == {step: sum(one["step"] <= step for one in known) for step in counts}
    since = {one["row"]: one["step"] for one in known}
    for before, prompts in asked(alone).items():
        assert len(prompts) == PROMPTS
        assert where is AHEAD or max(Counter(prompts).values()) == 1, "a prompt comes twice in a rollout"
        assert all(before < since.get(row, 10**9) for row in prompts), f"after step {before}"

    start(killed, lambda: sampled_from_what_a_checkpoint_leaves(killed))
    start(killed)
    assert retired(killed) == known
    assert harness.comparable(killed) == harness.comparable(alone)
    assert shown(killed) == shown(alone)
    assert "from the beginning" not in log.read_text().rpartition("attempt 2,")[2][:40], "it resumed from no checkpoint"
    ours, theirs = (harness.export(run, tmp_path / f"{run.name}-weights") for run in (killed, alone))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in theirs)
