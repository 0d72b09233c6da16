"""Runs with dynamic sampling: killed in a second round, drawn in other portions, and without any signal.

It takes three to four minutes: five starts of one rank with an engine. It would catch a resumed run that asks other
prompts or trains on other groups than the one left alone, groups that are sampled again although the journal has
them, prompts whose use depends on how many were in flight, and a run that goes on for ever or ends silently where
nothing can be learnt.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.run import harness

STEPS, PROMPTS = 4, 8
OVERRIDES = (
    "cluster.gpus_per_node=1",
    "run.seed=4",  # whose second round has several prompts
    f"run.max_steps={STEPS}",
    "batch.steps_per_generation=2",
    "optimizer.lr=3e-4",
    "checkpoint.interval=1",
    "eval.before=false",
    "eval.after=false",
    "eval.interval=null",
    "tracking.samples=64",
    "rollout.dynamic_sampling=true",
    "rollout.max_num_gen_batches=5",
)
SLOW = """
import time

from gspo_hpc.rewards.builtin import number_match


def slow(completion, **row):
    time.sleep(0.05)  # so that groups are finished one after the other, and a kill finds a round half done
    return number_match(completion, **row)
"""
OF_ROUNDS = "rollout/"  # metrics of how prompts were drawn


def without_rounds(run_dir: Path) -> list[dict[str, object]]:
    return [
        {key: value for key, value in record.items() if not key.startswith(OF_ROUNDS)}
        for record in harness.comparable(run_dir)
    ]


def cursor(run_dir: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((run_dir / "checkpoints" / f"{STEPS:06d}" / "cursor.json").read_text())
    return found


@pytest.mark.timeout(900)
def test_a_run_killed_in_a_second_round_or_drawn_in_other_portions_equals_the_one_left_alone(
    tiny_config: Path, tmp_path: Path
) -> None:
    alone, log, rewards = tmp_path / "alone", tmp_path / "log", tmp_path / "rewards.py"
    rewards.write_text(SLOW)
    overrides = (*OVERRIDES, f"reward.functions=[{{function: {rewards}:slow}}]")
    process = harness.start(harness.command(tiny_config, alone, *overrides), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    records = harness.metrics(alone)
    assert [record["zero_variance_groups"] for record in records] == [0] * STEPS
    first = records[0]
    assert first["rollout/rounds"] >= 2 and first["rollout/no_signal_fraction"] > 0, "choose another seed"
    assert first["rollout/prompts_drawn"] >= first["rollout/prompts_used"] > PROMPTS
    assert first["rollout/filled_groups"] == 0 < first["rollout/extra_tokens"]
    used = sum(record.get("rollout/prompts_used", 0) for record in records)
    assert cursor(alone)["offset"] == used, "the order of the data counts prompts that were used up"

    run_dir = tmp_path / "killed"
    command = harness.command(tiny_config, run_dir, *overrides)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.journal_lines(run_dir, 0) > PROMPTS, process, log)
    harness.kill(process)
    assert PROMPTS < harness.journal_lines(run_dir, 0) < first["rollout/prompts_drawn"], "not in the second round"
    process = harness.start(command, log)
    lines = list[int]()  # of the journal, which is deleted once a checkpoint needs it no longer

    def second_step() -> bool:
        lines.append(harness.journal_lines(run_dir, 0))
        return harness.last_step(run_dir) >= 2

    harness.wait_for(second_step, process, log)
    harness.kill(process)
    assert max(lines) == first["rollout/prompts_drawn"], "what the journal had was sampled again"
    assert harness.comparable(run_dir)[:2] == harness.comparable(alone)[:2]
    # What is drawn beyond what is used up may change: it decides how fast a rollout is, and nothing else.
    process = harness.start([*command, "rollout.oversampling_factor=2.5"], log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert without_rounds(run_dir) == without_rounds(alone)
    assert harness.metrics(run_dir)[2]["rollout/prompts_drawn"] >= 20
    assert cursor(run_dir) == cursor(alone)
    assert harness.samples(run_dir) == harness.samples(alone)
    ours, theirs = (harness.export(run, tmp_path / f"{run.name}-weights") for run in (run_dir, alone))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.timeout(300)
def test_a_run_without_any_signal_ends_after_the_bound_and_says_why(tiny_config: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def nothing(completion, **row):\n    return 0.0\n")
    run_dir, log = tmp_path / "starved", tmp_path / "log"
    reward = f"reward.functions=[{{function: {rewards}:nothing}}]"
    process = harness.start(harness.command(tiny_config, run_dir, *OVERRIDES, reward), log)
    assert harness.finish(process, log) == 2, log.read_text()[-3000:]
    assert harness.journal_lines(run_dir, 0) == 5 * PROMPTS
    text = " ".join(log.read_text().split())
    assert "rollout.dynamic_sampling: rollout 0, after step 0, drew 40 prompts (5 x 8" in text
    assert "rollout.dynamic_sampling=false" in text
    attempts = sorted((run_dir / "attempts").glob("*/attempt.json"))
    assert len(attempts) == 1, "the same would happen again"
