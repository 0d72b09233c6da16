"""A reward function whose answers are random does not break the exact resume: what it said is in the journal.

It takes about a minute, for two starts of two runs. It would catch completions that are graded again after a
kill, or a resume within the second pass over a rollout (batch.num_iterations) that trains on other groups, or compares
them with log-probs of other weights: then rewards, gradients and losses of steps that had been logged would differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.run import harness

JUDGE = """
import random

async def judge(completions, *, prompt, fields):
    return [random.SystemRandom().random() for _ in completions]

def mood(completion, *, prompt, fields, group_completions, group_index):
    return random.SystemRandom().random() if group_completions[group_index] == completion else float("nan")
"""


def test_what_a_random_judge_said_survives_a_kill(tiny_config: Path, tmp_path: Path) -> None:
    """A rollout of four updates, each half of it twice; the kill comes after a save within the second time."""
    (tmp_path / "judge.py").write_text(JUDGE)
    functions = ",".join(f"{{function: '{tmp_path}/judge.py:{name}', retries: 2}}" for name in ("judge", "mood"))
    overrides = (
        harness.ONE_RANK,
        f"reward.functions=[{functions}]",
        "run.max_steps=6",
        "batch.steps_per_generation=2",
        "batch.num_iterations=2",
        "checkpoint.interval=3",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
    )
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *overrides)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 4, process, log)
    harness.kill(process)
    before = {record["step"]: record for record in harness.comparable(run_dir)}
    assert before[1]["failures"] == 0 and before[1]["reward_std"] > 0.1

    process = harness.start(command, log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    after = {record["step"]: record for record in harness.comparable(run_dir)}
    assert {step: after[step] for step in before} == before
    assert sorted(step for step in after if step > 0) == [1, 2, 3, 4, 5, 6]
    rollouts = [(after[step]["rollout"], after[step]["update"]) for step in range(1, 7)]
    assert rollouts == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    for first, again in ((1, 3), (2, 4)):  # the same completions, under weights that have moved
        assert after[first]["reward"] == after[again]["reward"] and after[again]["ratio_deviation_max"] > 0
    assert after[1]["ratio_deviation_max"] == 0 and after[1]["reward"] != after[2]["reward"] != after[5]["reward"]


SLOW_JUDGE = """
import json, random, time

def judge(completions, *, prompt, fields, file):
    time.sleep(0.4)
    scores = [random.SystemRandom().random() for _ in completions]
    with open(file, "a") as asked:
        asked.write(json.dumps([prompt, scores]) + "\\n")
    return scores
"""


def whole_groups(asked: Path) -> dict[str, list[float]]:
    """Return the judge's answers by prompt, without the trial before the run, which has groups of two."""
    lines = [json.loads(line) for line in asked.read_text().splitlines()]
    return {prompt: scores for prompt, scores in lines if len(scores) == 8}


def test_a_kill_within_a_rollout_asks_for_no_group_of_the_journal_again(tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(SLOW_JUDGE)
    asked = tmp_path / "asked"
    overrides = (
        harness.ONE_RANK,
        f"reward.functions=[{{function: '{tmp_path}/judge.py:judge', args: {{file: '{asked}'}}}}]",
        "reward.workers=1",
        "run.max_steps=2",
        "batch.steps_per_generation=2",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
    )
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *overrides)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.journal_lines(run_dir, 0) >= 2, process, log)
    harness.kill(process)
    kept = harness.journal_lines(run_dir, 0)
    first = whole_groups(asked)
    assert 2 <= kept < 8 and harness.last_step(run_dir) < 1  # of the 8 groups of the rollout

    asked.unlink()
    process = harness.start(command, log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    second = whole_groups(asked)
    assert len(second) == 8 - kept and len(first.keys() - second.keys()) == kept
    said = [score for scores in (first | second).values() for score in scores]
    means = [record["reward"] for record in harness.metrics(run_dir) if record["step"] > 0]
    assert len(said) == 64 and len(means) == 2 and fmean(means) == pytest.approx(fmean(said))
