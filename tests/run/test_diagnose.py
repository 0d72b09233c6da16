"""diagnose on runs that really went wrong: what is wrong was done to them here, and is found by its name, with numbers.

Starts that fail are in test_failed_starts.py, a model that is to blame in test_mixture.py, nodes and disks in
tests/slurm. What only a GPU shows (its use, its memory, NCCL, MIG) is in tests/unit/diagnose.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gspo_hpc.diagnose.evidence import VERY_SLOW
from tests.run import harness
from tests.run.harness import Found
from tests.run.test_faults import engine_cores

LENGTH = '''
def longer(completion, *, prompt, fields, response_length):
    """What is longer is better."""
    return response_length / 100
'''
NOISE = '''
import itertools
import random
import time

calls = itertools.count(1)


def slow(completion, *, prompt, fields):
    """Noise, after a while, that grows with every call; at every fifth it has had enough."""
    began = time.monotonic()
    sum(range(200_000))
    # 0.2 s; where other load slows ranks and engines, as much longer, and never as long as a grader may take.
    time.sleep(min(80 * (time.monotonic() - began), 20.0))
    call = next(calls)
    if call % 5 == 2:
        raise RuntimeError("tired")
    return random.random() * 1.1**call
'''


# Python runs it when rank 1 and the processes of its engine start. What it adds is in proportion to the work, so that
# other load changes nothing.
SLOW_RANK = """
import importlib.abc
import importlib.util
import os
import sys
import time

def slowed(function, times):
    def slowly(*arguments, **options):
        began = time.monotonic()
        result = function(*arguments, **options)
        time.sleep(times * (time.monotonic() - began))
        return result

    return slowly

class SlowEngine(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.v1.engine.core":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.EngineCore.step = slowed(module.EngineCore.step, 6)

        spec.loader.exec_module = exec_module
        return spec

if os.environ.get("RANK") == "1":
    import torch

    torch.autograd.backward = slowed(torch.autograd.backward, 30)
    os.environ["SLOW"] = "1"  # for its engine
elif "SLOW" in os.environ:
    sys.meta_path.insert(0, SlowEngine())
"""


def saturated(run_dir: Path) -> bool:
    """Return whether all completions of the newest 40 steps are as long as they may be. How soon depends on the CPU."""
    newest = harness.last_step(run_dir)
    shares = {record["step"]: record.get("truncated_fraction", 1.0) for record in harness.metrics(run_dir)}
    return newest >= 48 and all(shares[step] == 1.0 for step in range(newest - 39, newest + 1))


@pytest.fixture(scope="module")
def strained(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A run that pays for length, with far too large steps: soon all completions are as long as they may be, and earn
    the same. It saves after every step and waits for it; a rank is killed, and the next start with its launcher."""
    folder = tmp_path_factory.mktemp("strained")
    run_dir, log = folder / "run", folder / "log"
    (folder / "grader.py").write_text(LENGTH)
    command = harness.command(
        tiny_config,
        run_dir,
        f"reward.functions=[{{function: '{folder}/grader.py:longer'}}]",
        "run.max_steps=1000",
        "optimizer.lr=0.02",
        "optimizer.lr_warmup_steps=0",
        "batch.global_batch_size=4",
        "batch.num_generations=2",
        "batch.steps_per_generation=8",
        "rollout.max_response_length=64",
        "checkpoint.interval=1",
        "checkpoint.async_save=false",
        "eval.before=false",
        "eval.interval=null",
    )
    process = harness.start(command, log)
    harness.wait_for(lambda: saturated(run_dir), process, log)
    harness.worker(run_dir, 1).kill()
    assert harness.finish(process, log) == 1, log.read_text()[-3000:]
    process = harness.start(command, log)
    harness.wait_for((run_dir / "attempts" / "0002" / "attempt.json").exists, process, log)
    harness.kill(process)
    code, found = harness.diagnose(run_dir)
    assert code == 1
    return found


@pytest.fixture(scope="module")
def wasted(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A run whose grader is slow, fails for every fifth completion and says anything, ever more of it. One rank is
    slow, and with it the engine that it leads; an engine is killed."""
    folder = tmp_path_factory.mktemp("wasted")
    run_dir, log = folder / "run", folder / "log"
    (folder / "grader.py").write_text(NOISE)
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(SLOW_RANK)
    command = harness.command(
        tiny_config,
        run_dir,
        f"reward.functions=[{{function: '{folder}/grader.py:slow'}}]",
        "reward.timeout=120",
        "run.max_steps=80",
        "optimizer.lr=1e-9",
        "algorithm.normalize_advantage=false",
        "batch.micro_batch_tokens=null",
        "batch.micro_batch_size=1",
        "batch.global_batch_size=6",
        "batch.num_generations=3",
        "batch.steps_per_generation=16",
        "rollout.engines_per_node=2",
        "rollout.temperature=2.0",
        "rollout.max_response_length=448",
        "checkpoint.interval=100",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
    )
    found_first = os.pathsep.join([str(folder / "slow"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = harness.start(command, log, PYTHONPATH=found_first)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 1, process, log)
    slow, cores = harness.worker(run_dir, 1), engine_cores(run_dir)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 49, process, log)
    next(core for core in cores if slow not in core.parents()).kill()
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    return harness.diagnose(run_dir)[1]


def test_a_run_that_was_left_alone_has_nothing_to_be_mended(uninterrupted: Path) -> None:
    code, found = harness.diagnose(uninterrupted)
    assert code == 0, found
    # It saves after every step of a fraction of a second, which on a busy machine is a tenth of its time.
    assert {name for name, one in found.items() if one["severity"] != "note"} <= {"slow_checkpoints"}, found


@pytest.mark.parametrize(
    ("name", "severity", "setting"),
    [
        ("length_explosion", "warning", "optimizer.lr=0.002"),
        ("truncation", "problem", "rollout.max_response_length=128"),
        ("zero_variance_groups", "problem", "batch.num_generations=4"),
        ("reward_saturation", "problem", ""),
        ("slow_checkpoints", "", "checkpoint.async_save=true"),  # as severe as the disk is slow
        ("killed_rank", "warning", "reward.workers=1"),  # of the start before
        ("killed", "problem", ""),
        ("restarts", "problem", ""),
    ],
)
def test_a_strained_run(strained: Found, name: str, severity: str, setting: str) -> None:
    (evidence, *_) = strained[name]["evidence"]
    if not severity:
        (share,) = re.findall(r"(\d+) % of the time", evidence)
        exact = strained[name]["severity"] if int(share) == 100 * VERY_SLOW else ""  # it is rounded in the text
        severity = exact or ("problem" if int(share) > 100 * VERY_SLOW else "warning")
    assert strained[name]["severity"] == severity, strained[name]
    assert not setting or setting in strained[name]["settings"], strained[name]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("exploding_gradients", "optimizer.lr=1e-10"),
        ("clipping_never_active", "optimizer.lr=3e-09"),
        ("reward_function_failures", ""),
        ("slow_rewards", "reward.workers=8"),
        ("unbalanced_engines", "rollout.engines_per_node=1"),
        ("stragglers", "tracking.profile_steps=[82]"),
        ("engine_restarts", ""),
    ],
)
def test_a_wasted_run(wasted: Found, name: str, setting: str) -> None:
    assert name in wasted, wasted.keys()
    assert wasted[name]["evidence"] and wasted[name]["severity"] != "note"
    assert not setting or setting in wasted[name]["settings"], wasted[name]


def test_evidence_has_the_numbers(strained: Found, wasted: Found) -> None:
    assert "100 % of the completions were cut off at 64 tokens" in strained["truncation"]["evidence"][0]
    assert "rank 1 was killed by SIGKILL" in strained["killed_rank"]["evidence"][0]
    assert wasted["stragglers"]["evidence"][0].startswith("rank 1 (node 0 of the job) computed longest")
    failures = wasted["reward_function_failures"]  # the grader raises, and more time for it would change nothing
    assert "RuntimeError: tired" in failures["evidence"][1] and failures["settings"] == []
    assert "1 restart in place" in wasted["engine_restarts"]["evidence"][0]
    assert any(text.startswith("1 x ") for text in wasted["engine_restarts"]["evidence"])
