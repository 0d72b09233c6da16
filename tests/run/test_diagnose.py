"""diagnose on runs that really went wrong: what is wrong was done to them here, and is found by its name, with numbers.

What only a GPU shows (its use, its memory, NCCL, MIG) is in tests/unit/test_diagnose.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_hpc import orphans
from tests.run import harness
from tests.run.test_faults import engine_cores

LENGTH = '''
def longer(completion, *, prompt, fields, response_length):
    """What is longer is better."""
    return response_length / 100
'''
CONSTANT = '''
import itertools
import time

calls = itertools.count()


def slow(completion, *, prompt, fields):
    """The same for everything, after a while; now and then it has had enough."""
    time.sleep(0.4)
    if next(calls) % 16 == 7:
        raise RuntimeError("tired")
    return 1.0
'''
Found = dict[str, dict[str, Any]]


def diagnose(run_dir: Path) -> tuple[int, Found]:
    """Exit code of `gspo-hpc diagnose RUN --json`, and the symptoms by name."""
    line = [sys.executable, "-m", "gspo_hpc.cli", "diagnose", str(run_dir), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, {symptom["name"]: symptom for symptom in json.loads(done.stdout)["symptoms"]}


@contextmanager
def throttled(process: psutil.Process) -> Iterator[None]:
    """A process that stands still for three quarters of the time, as on a slow device."""
    done = threading.Event()

    def throttle() -> None:
        while not done.is_set() and process.is_running():
            for number, seconds in ((signal.SIGSTOP, 0.06), (signal.SIGCONT, 0.02)):
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    return
                time.sleep(seconds)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def worker(run_dir: Path, rank: int) -> psutil.Process:
    """The process of a training rank."""
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    processes = [psutil.Process(pid) for pid in orphans.marked(run_id)]
    return next(
        one
        for one in processes
        if "gspo_hpc.worker" in one.cmdline() and one.environ().get("RANK") == str(rank) and one.ppid() != os.getpid()
    )


@pytest.fixture(scope="module")
def strained(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A run that pays for length with far too large steps, saves after each of them and waits for it, packs two
    completions a step for two ranks, of which one is slow, and is killed in the end."""
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
        "rollout.probe_max_gap=100",
        "rollout.probe_mean_gap=100",
        "checkpoint.interval=1",
        "checkpoint.async_save=false",
        "eval.before=false",
        "eval.interval=null",
    )
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 8, process, log)
    slow = worker(run_dir, 1)
    with throttled(slow):
        harness.wait_for(lambda: harness.last_step(run_dir) >= 48, process, log)
    slow.kill()
    assert harness.finish(process, log) == 1, log.read_text()[-3000:]
    code, found = diagnose(run_dir)
    assert code == 1
    return found


@pytest.fixture(scope="module")
def wasted(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A run whose grader is slow, fails now and then and says the same to everything; completions end at random, one of
    two engines is slow, and the other is killed."""
    folder = tmp_path_factory.mktemp("wasted")
    run_dir, log = folder / "run", folder / "log"
    (folder / "grader.py").write_text(CONSTANT)
    command = harness.command(
        tiny_config,
        run_dir,
        f"reward.functions=[{{function: '{folder}/grader.py:slow'}}]",
        "run.max_steps=6",
        "batch.global_batch_size=64",
        "batch.steps_per_generation=1",
        "rollout.engines_per_node=2",
        "rollout.temperature=4.0",
        "rollout.max_response_length=256",
        "checkpoint.interval=100",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
    )
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 1, process, log)
    slow, other = engine_cores(run_dir)
    with throttled(slow):
        harness.wait_for(lambda: harness.last_step(run_dir) >= 5, process, log)
    other.kill()
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    code, found = diagnose(run_dir)
    assert code == 1
    return found


def test_a_run_that_was_left_alone_has_nothing_to_be_mended(uninterrupted: Path) -> None:
    code, found = diagnose(uninterrupted)
    assert code == 0
    assert not [one for one in found.values() if one["severity"] != "note"], found


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("length_explosion", "optimizer.lr=0.002"),
        ("truncation", "rollout.max_response_length=128"),
        ("growing_gap", "optimizer.lr=0.002"),
        ("exploding_gradients", "optimizer.lr=0.002"),
        ("slow_checkpoints", "checkpoint.async_save=true"),
        ("unbalanced_packing", "batch.global_batch_size=8"),
        ("stragglers", "tracking.profile_steps"),
        ("killed_rank", "checkpoint.async_save"),
        ("restarts", ""),
    ],
)
def test_a_strained_run(strained: Found, name: str, setting: str) -> None:
    assert name in strained, strained
    assert strained[name]["evidence"] and strained[name]["cause"]
    assert not setting or any(text.startswith(setting) for text in strained[name]["settings"]), strained[name]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("zero_variance_groups", "batch.num_generations"),
        ("reward_saturation", ""),
        ("grader_failures", "reward.timeout"),
        ("slow_rewards", "reward.workers=8"),
        ("generation_tail", "rollout.max_response_length=128"),
        ("unbalanced_engines", "rollout.engines_per_node=1"),
        ("engine_restarts", ""),
        ("inert_clipping", "batch.steps_per_generation"),
    ],
)
def test_a_wasted_run(wasted: Found, name: str, setting: str) -> None:
    assert name in wasted, wasted
    assert wasted[name]["evidence"] and wasted[name]["cause"]
    assert not setting or any(text.startswith(setting) for text in wasted[name]["settings"]), wasted[name]
