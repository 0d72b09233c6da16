"""The memory of graders, which is limited in each process of the pool.

It takes about ten seconds, for pools of worker processes. It would catch a grader that eats the memory of its node, one
that pays for what calls before it have kept, and a limit that a grader escapes by starting processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.rewards import trial
from gspo_hpc.rewards.pool import RewardPool
from tests.unit.rewards.test_rewards import drain

GRADERS = """
import subprocess, sys

KEPT = []

def eats(completion, *, prompt, fields):
    return float(len(bytearray(fields["megabytes"] << 20)) > 0)

def forgives_itself(completion, *, prompt, fields):
    try:
        return eats(completion, prompt=prompt, fields=fields)
    except MemoryError:
        return 0.25

def leaks(completion, *, prompt, fields):
    KEPT.append(bytearray(100 << 20))
    return float(len(KEPT))

def in_a_child(completion, *, prompt, fields):
    code = "import sys; bytearray(int(sys.argv[1]) << 20)"
    return float(subprocess.run([sys.executable, "-c", code, str(fields["megabytes"])]).returncode)
"""


@pytest.fixture
def graders(tmp_path: Path) -> str:
    path = tmp_path / "graders.py"
    path.write_text(GRADERS)
    return str(path)


def test_a_grader_that_eats_memory_costs_its_sample_alone(graders: str) -> None:
    names = [f"{graders}:{name}" for name in ("eats", "forgives_itself", "in_a_child")]
    terms = tuple(RewardFunction(function=name) for name in (*names, "exact_match"))
    with RewardPool(Reward(functions=terms, workers=2, timeout=30.0, memory_gb=0.5)) as pool:
        for key, megabytes in enumerate((1, 2000, 1)):
            pool.submit(key, "a", 1, "", {"megabytes": megabytes, "answer": "a"})
        got = drain(pool)
    fine = dict(zip(names, (1.0, 1.0, 0.0), strict=True)) | {"exact_match": 1.0}
    assert got[0].parts == got[2].parts == fine
    assert got[1].parts == {names[1]: 0.25, names[2]: 1.0, "exact_match": 1.0}
    assert got[1].failure == f"{names[0]}: needed more memory than 0.5 GB (reward.memory_gb)"
    assert got[1].outcomes == {names[0]: "failed"} and got[1].value == 0.0


def test_a_call_does_not_pay_for_those_before_it(graders: str) -> None:
    name = f"{graders}:leaks"
    with RewardPool(Reward(functions=(RewardFunction(function=name),), workers=1, memory_gb=0.5)) as pool:
        for key in range(12):
            pool.submit(key, "", 0, "", {})
        got = drain(pool)
    assert all(result.failure is None for result in got.values())
    assert 1 < max(result.value for result in got.values()) < 6  # the process was replaced in time


def test_a_file_that_needs_more_memory_is_told_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "g.py"
    path.write_text("LARGE = bytearray(2 << 30)\ndef grade(completion, **rest): return 1.0\n")
    term = RewardFunction(function=f"{path}:grade")
    why = r"needed more memory than 0.5 GB \(reward.memory_gb\)"
    with pytest.raises(ValueError, match=why):
        RewardPool(Reward(functions=(term,), workers=1, memory_gb=0.5))
    (outcome,) = trial.run([term], "", {}, memory_gb=0.5)
    assert outcome.failure == "cannot be loaded: MemoryError" and outcome.not_here


def test_the_trial_before_a_run_is_limited_too(graders: str) -> None:
    term = RewardFunction(function=f"{graders}:eats")
    row = {"megabytes": 2000}
    (outcome,) = trial.run([term], "", row, memory_gb=0.5)
    assert outcome.failure == "needed more memory than it may use (reward.memory_gb)"
    assert trial.run([term], "", {"megabytes": 1}, memory_gb=0.5) == [trial.Outcome(None)]
