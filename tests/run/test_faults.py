"""Dying engines, a stop in the middle, graders that misbehave, malformed rows: recovered and told, and nothing lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from gspo_hpc.system import processes
from tests.run import harness

SHORT = ("eval.before=false", "eval.after=false", "eval.interval=null", "checkpoint.interval=100")


def engine_cores(run_dir: Path) -> list[psutil.Process]:
    """The processes of this run's engines: what has both the run's mark and an engine's."""
    found = [psutil.Process(pid) for pid in processes.marked(harness.run_id(run_dir))]
    return [process for process in found if "GSPO_HPC_ENGINE" in process.environ()]


def test_engines_die_and_a_stop_comes_and_nothing_changes(
    tiny_config: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """Two engines instead of one, one of them killed in generation, one in an update, then SIGTERM in generation."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *harness.OVERRIDES, "rollout.engines_per_node=2")
    process = harness.start(command, log)
    harness.wait_for((run_dir / "run.json").exists, process, log)
    harness.wait_for(lambda: len(engine_cores(run_dir)) == 2, process, log)
    first = engine_cores(run_dir)
    harness.wait_for((run_dir / "rollouts" / "000000").exists, process, log)
    first[0].suspend()  # with work in hand, however slow this test is to kill it
    harness.wait_for(lambda: 0 < harness.journal_lines(run_dir, 0), process, log)
    first[0].kill()
    harness.wait_for(lambda: harness.last_step(run_dir) >= 3, process, log)
    second = engine_cores(run_dir)
    assert len(second) == 2 and first[1] in second and first[0] not in second
    first[1].kill()
    harness.wait_for(lambda: 0 < harness.journal_lines(run_dir, 3), process, log)
    process.send_signal(signal.SIGTERM)
    assert harness.finish(process, log) == 75, log.read_text()[-3000:]
    assert not engine_cores(run_dir)

    stopped = harness.metrics(run_dir)
    assert [record["step"] for record in stopped] == list(range(stopped[-1]["step"] + 1))
    deaths = {record["step"]: record["engine_restarts"] for record in stopped if record["step"]}
    assert deaths[1] == 1, "the first engine was to die in the generation of the first rollout"
    assert deaths[3] == 1 and deaths[5] == 2
    assert log.read_text().count("an engine died and was restarted in place") == 2

    process = harness.start(command, log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    attempts = [json.loads(p.read_text()) for p in sorted((run_dir / "attempts").glob("*/attempt.json"))]
    assert [attempt["reason"] for attempt in attempts] == ["stopped", "done"]
    assert harness.comparable(run_dir) == harness.comparable(uninterrupted)
    assert harness.samples(run_dir) == harness.samples(uninterrupted)


def test_an_engine_that_keeps_dying_ends_the_attempt_with_a_reason(tiny_config: Path, tmp_path: Path) -> None:
    """After a rollout of which nothing was any good."""
    (tmp_path / "grader.py").write_text(STRICT)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    functions = f"reward.functions=[{{function: '{tmp_path}/grader.py:strict'}}]"
    overrides = (harness.ONE_RANK, "run.max_steps=80", "faults.max_engine_restarts=0", functions, *SHORT)
    process = harness.start(harness.command(tiny_config, run_dir, *overrides), log)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 4, process, log)
    for core in engine_cores(run_dir):
        core.kill()
    assert harness.finish(process, log) == 1, log.read_text()[-3000:]
    assert "died 1 times (faults.max_engine_restarts 0)" in log.read_text()
    assert not engine_cores(run_dir)
    code, found = harness.diagnose(run_dir)
    assert code == 1 and found["reward_always_zero"]["severity"] == found["engine_restarts"]["severity"] == "problem"
    assert found["reward_always_zero"]["evidence"][0].startswith("the reward of every completion was 0, steps 1 to ")
    assert "faults.max_engine_restarts=3" in found["engine_restarts"]["settings"]


STRICT = '''
def strict(completion, *, prompt, fields):
    """Nothing is good enough."""
    return 0.0
'''
GRADER = '''
import itertools
import time

calls = itertools.count()


def moody(completion, *, prompt, fields):
    """Raises, says nothing of use, or grades, in turns; and hangs now and then."""
    call = next(calls)
    if call % 20 == 11:
        time.sleep(3600)
    if call % 5 == 0:
        raise RuntimeError("cannot read this")
    if call % 5 == 1:
        return float("nan")
    if call % 5 == 2:
        return "very good"
    return float(call % 2)
'''


def test_bad_graders_cost_their_samples_and_only_needed_passes_are_made(tiny_config: Path, tmp_path: Path) -> None:
    """On-policy, one update a rollout, no KL: no pass but the probe's and the update's, whatever graders do."""
    grader = tmp_path / "grader.py"
    grader.write_text(GRADER)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    functions = f"reward.functions=[{{function: '{grader}:moody'}}]"
    steps = ("run.max_steps=3", "batch.steps_per_generation=1")
    overrides = (harness.ONE_RANK, *steps, functions, "reward.timeout=0.5", *SHORT)
    process = harness.start(harness.command(tiny_config, run_dir, *overrides), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    records = harness.metrics(run_dir)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert 0 < record["failures"] == record["excluded"] < 32
        assert record["passes/update"] == 1 and record["passes/probe"] == 1
        assert record["passes/old_logprobs"] == record["passes/reference"] == 0
        assert record["seconds/old_logprobs"] == record["seconds/reference"] == 0.0
        assert record["ratio_deviation_max"] == 0.0 and 0.0 < record["reward"] < 1.0
    said = log.read_text()
    for why in ("raised RuntimeError: cannot read this", "returned nan", "returned str, not a number"):
        assert re.search(rf"a reward function failed for \d+ completions: {grader}:moody: {why}", said), said[-3000:]


def test_old_logprobs_only_for_later_updates(uninterrupted: Path) -> None:
    """Two updates a rollout: the second needs old log-probs, in one pass; the first needs none."""
    records = [record for record in harness.metrics(uninterrupted) if record["step"]]
    first = [1, 0] * (harness.STEPS // 2)
    assert [record["passes/old_logprobs"] for record in records] == first
    first[0] = 0  # the evaluation before the first step has already synchronised, and made the probe's pass
    assert [record["passes/probe"] for record in records] == first
    assert all(record["passes/update"] == 1 - record["empty"] for record in records)


SIZES = {"update": 2, "old_logprobs": 4, "reference": 8}  # completions of a micro-batch


def test_a_reference_costs_one_pass_and_pulls_and_each_pass_has_its_own_size(tiny_config: Path, tmp_path: Path) -> None:
    """Would see a pass that runs with another's micro-batches, which is how such runs die of memory (no cost)."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    names = ("micro_batch_size", "logprob_micro_batch_size", "reference_micro_batch_size")
    sizes = [f"batch.{name}={size}" for name, size in zip(names, SIZES.values(), strict=True)]
    updates = ("run.max_steps=4", "batch.steps_per_generation=2", "batch.micro_batch_tokens=null", *sizes)
    overrides = (harness.ONE_RANK, *updates, "algorithm.kl_beta=0.1", *SHORT)
    process = harness.start(harness.command(tiny_config, run_dir, *overrides, "optimizer.lr_warmup_steps=0"), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    records = harness.metrics(run_dir)
    for kind in ("old_logprobs", "reference"):
        assert [record[f"passes/{kind}"] for record in records] == [1, 0, 1, 0]
    assert records[0]["reference_kl"] < 1e-8, "the policy starts as its reference"
    assert all(record["reference_kl"] > 1e-6 for record in records[1:])
    assert all((record["seconds/reference"] > 0) == (record["update"] == 0) for record in records)
    for record in records:
        for kind, size in SIZES.items():
            if record[f"passes/{kind}"]:
                assert record[f"passes/{kind}/most_completions"] == size, (kind, record)


BUDGETS = {"update": 64, "old_logprobs": 128, "reference": 256}  # tokens of a micro-batch


def test_each_pass_has_its_own_budget_of_tokens(tiny_config: Path, tmp_path: Path) -> None:
    """Each fills its micro-batches beyond the next smaller budget, and not beyond its own. A quarter of a minute."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    names = ("micro_batch_tokens", "logprob_micro_batch_tokens", "reference_micro_batch_tokens")
    budgets = [f"batch.{name}={budget}" for name, budget in zip(names, BUDGETS.values(), strict=True)]
    steps = ("run.max_steps=2", "batch.steps_per_generation=2")
    overrides = (harness.ONE_RANK, *steps, "algorithm.kl_beta=0.1", *budgets, *SHORT)
    process = harness.start(harness.command(tiny_config, run_dir, *overrides), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    record = harness.metrics(run_dir)[0]
    smaller = 0
    for kind, budget in BUDGETS.items():
        assert smaller < record[f"passes/{kind}/most_tokens"] <= budget, (kind, record)
        smaller = budget


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ('{"prompt": "What is 1 + 1?", "answer": 2', "not JSON|JSON"),
        ('{"question": "What is 1 + 1?", "answer": 2}', "prompt"),
        ('["What is 1 + 1?", 2]', "object"),
    ],
)
def test_a_malformed_row_is_told_by_file_and_line_before_anything_starts(
    tiny_config: Path, tmp_path: Path, row: str, fault: str
) -> None:
    data = tmp_path / "rows.jsonl"
    good = '{"prompt": "What is 2 + 1?", "answer": 3}\n'
    data.write_text(good + row + "\n" + 20 * good)  # enough for a rollout, which is counted first
    command = harness.command(tiny_config, tmp_path / "run", f"data.train={data}")
    done = subprocess.run(command, capture_output=True, text=True, env=harness.environment() | dict(os.environ))
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(rf"rows\.jsonl:2.*({fault})", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


FAULTY = """
import pathlib

SERVICE = pathlib.Path(__file__).with_name("service")


def faulty(completion, *, prompt, fields):
    if not SERVICE.exists():
        raise ConnectionError("no service")
    return len(completion)
"""


def test_a_first_rollout_without_any_reward_stops_the_run(tiny_config: Path, tmp_path: Path) -> None:
    """Two ranks end with the failure in a line. Later the same command grades all again. Half a minute."""
    grader, run_dir, log = tmp_path / "grader.py", tmp_path / "run", tmp_path / "log"
    grader.write_text(FAULTY)
    functions = f"reward.functions=[{{function: '{grader}:faulty'}}]"
    command = harness.command(tiny_config, run_dir, "run.max_steps=1", functions, *SHORT)
    assert harness.finish(harness.start(command, log), log) == 2
    said, quoted = log.read_text(), f"got a reward: {grader}:faulty: raised ConnectionError: no service"
    assert re.search(rf"no completion of the first rollout \(\d+\) {quoted}", said), said[-3000:]
    assert "Traceback" not in said and harness.metrics(run_dir) == []
    (tmp_path / "service").touch()
    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    assert [record["failures"] for record in harness.metrics(run_dir)] == [0]
