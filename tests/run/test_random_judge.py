"""A reward function whose answers are random does not break the exact resume: what it said is in the journal.

It takes about 40 seconds, for two starts of a run. It would catch completions that are graded again after a kill: then
rewards, gradients and losses of steps that had been logged would differ.
"""

from __future__ import annotations

from pathlib import Path

from tests.run import harness

JUDGE = """
import random

async def judge(completions, *, prompt, fields):
    return [random.SystemRandom().random() for _ in completions]

def mood(completion, *, prompt, fields, group_completions, group_index):
    return random.SystemRandom().random() if group_completions[group_index] == completion else float("nan")
"""


def test_what_a_random_judge_said_survives_a_kill(tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    functions = ",".join(f"{{function: '{tmp_path}/judge.py:{name}', retries: 2}}" for name in ("judge", "mood"))
    overrides = (
        f"reward.functions=[{functions}]",
        "run.max_steps=3",
        "batch.steps_per_generation=2",
        "checkpoint.interval=100",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
    )
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *overrides)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 1, process, log)
    harness.kill(process)
    before = {record["step"]: record for record in harness.comparable(run_dir)}
    assert 1 in before and before[1]["failures"] == 0 and before[1]["reward_std"] > 0.1

    process = harness.start(command, log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    after = {record["step"]: record for record in harness.comparable(run_dir)}
    assert after[1]["reward"] == before[1]["reward"] and {step: after[step] for step in before} == before
    assert sorted(step for step in after if step > 0) == [1, 2, 3]
