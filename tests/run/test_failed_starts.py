"""diagnose on starts that failed, each for another cause; and on an engine that drifts away from its trainer."""

from __future__ import annotations

import importlib.metadata
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from gspo_hpc.diagnose.gather import diagnose
from gspo_hpc.system import processes
from tests.run import harness
from tests.run.harness import Found

GRADER = '''
import random


def noise(completion, *, prompt, fields):
    """Anything."""
    return random.random()
'''
UNASKED = """
import sys
from gspo_hpc.config import loader
from gspo_hpc.launch import local
sys.exit(local.train(loader.load(sys.argv[1], sys.argv[2:])))
"""
NEVER = ("eval.before=false", "eval.after=false", "eval.interval=null", "checkpoint.interval=1000")


def rebuilt(package: str, folder: Path) -> Path:
    """A folder for PYTHONPATH with a local build of an installed package: its code, under a version of its own."""
    installed = importlib.metadata.distribution(package)
    home = Path(str(installed.locate_file(package)))
    about = folder / f"{package}-{installed.version}+local.dist-info"
    about.mkdir(parents=True)
    (folder / package).symlink_to(home)
    text = str(installed.read_text("METADATA"))
    (about / "METADATA").write_text(
        text.replace(f"Version: {installed.version}", f"Version: {installed.version}+local")
    )
    return folder


@pytest.fixture(scope="module")
def failed(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one rank that was started four times: its engine was to have more memory than the
    machine has, then less than one block of its cache takes; then its rank crashed; then its engine was not near enough
    to the trainer, and before that somebody had installed a build of their own of a package."""
    folder = tmp_path_factory.mktemp("failed")
    run_dir, log = folder / "run", folder / "log"
    words = ("cluster.gpus_per_node=1", "rollout.probe_max_gap=1e-12", "rollout.kv_cache_gb=0.25", *NEVER)
    one = harness.command(tiny_config, run_dir, *words)
    refused, much = folder / "refused", "rollout.kv_cache_gb=100000"
    assert harness.finish(harness.start([*one, much], refused), refused) == 2 and not run_dir.exists()
    assert "error: memory: " in refused.read_text()
    # As on a node of Slurm, whose memory nobody looks at before.
    unasked = [sys.executable, "-c", UNASKED, *one[4:]]
    for command in ([*unasked, much], [*one, "rollout.kv_cache_gb=0.00001"]):
        assert harness.finish(harness.start(command, log), log) == 1, log.read_text()[-3000:]
    process = harness.start(one, log)
    third = run_dir / "attempts" / "0003" / "rank-0.log"
    harness.wait_for(lambda: third.exists() and "starting the vLLM engine" in log.read_text()[-40:], process, log)
    harness.worker(run_dir, 0).send_signal(signal.SIGSEGV)
    assert harness.finish(process, log) == 1, log.read_text()[-3000:]
    other = rebuilt("wandb", folder / "packages")
    assert harness.finish(harness.start(one, log, PYTHONPATH=str(other)), log) == 1, log.read_text()[-3000:]
    said = log.read_text()
    assert "vLLM did not start: ValueError: Available memory on node" in said, said  # and not that there was an error
    assert "vLLM did not start: ValueError: No available memory for the cache blocks" in said, said
    return run_dir


def test_each_start_has_its_cause(failed: Path) -> None:
    code, found = harness.diagnose(failed)
    assert code == 1
    expected = {
        "out_of_host_memory": ("warning", "attempt 1: ", "rollout.kv_cache_gb=0.125"),
        "out_of_memory_in_generation": (
            "warning",
            "attempt 2 ended before its first step: ",
            "rollout.kv_cache_gb=0.5",
        ),
        "crashed_rank": ("warning", "attempt 3: ", "tracking.debug=true"),
        "weight_sync_mismatch": ("problem", "attempt 4: ", "rollout.dtype=float32"),
        "crash_loop": ("problem", "4 attempts: 4 failed", ""),
        "versions_changed": ("note", "attempts 3 and 4: wandb ", ""),
    }
    assert found.keys() == expected.keys()
    for name, (severity, evidence, setting) in expected.items():
        assert found[name]["severity"] == severity and found[name]["evidence"][0].startswith(evidence), found[name]
        assert not setting or setting in found[name]["settings"], found[name]
    assert "4 failures in a row without a step between them" in found["crash_loop"]["evidence"]


def test_what_only_vllm_refuses(tiny_config: Path, tmp_path: Path) -> None:
    """Heads that do not divide, by a setting of which the plan knows nothing."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    engine = "rollout.engine={hf_overrides: {num_attention_heads: 3, num_key_value_heads: 3}}"
    command = harness.command(tiny_config, run_dir, "rollout.tensor_parallel_size=2", engine, *NEVER)
    assert harness.finish(harness.start(command, log), log) == 2, log.read_text()[-3000:]
    code, found = harness.diagnose(run_dir)
    assert code == 1 and found.keys() == {"refused", "tensor_parallel_mismatch"}
    assert "trainer TP 1, rollout TP 2" in found["tensor_parallel_mismatch"]["evidence"]
    assert found["tensor_parallel_mismatch"]["settings"] == ["rollout.tensor_parallel_size=1"]
    assert re.search(r"heads \(3\) must be divisible by tensor parallel size \(2\)\.$", found["refused"]["evidence"][0])


def test_a_package_that_is_in_the_way(tiny_config: Path, tmp_path: Path) -> None:
    """Something else by the name of megatron on PYTHONPATH, as a checkout leaves it there."""
    (tmp_path / "packages" / "megatron").mkdir(parents=True)
    (tmp_path / "packages" / "megatron" / "__init__.py").touch()
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, "cluster.gpus_per_node=1", *NEVER)
    process = harness.start(command, log, PYTHONPATH=str(tmp_path / "packages"))
    assert harness.finish(process, log) != 0
    code, found = harness.diagnose(run_dir)
    assert code == 1 and found["version_mismatch"]["severity"] == "problem", found
    assert "No module named 'megatron.core'" in found["version_mismatch"]["evidence"][0]


@pytest.fixture(scope="module")
def drifting(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """Symptoms of a run whose engine computes in bfloat16 what its trainer computes in float32, while the policy leaves
    the few answers that it was sure of: while all its processes stood still (to be sure of which takes minutes: the
    clock of the one who looks is put forward), and when it was done."""
    folder = tmp_path_factory.mktemp("drifting")
    run_dir, log = folder / "run", folder / "log"
    (folder / "grader.py").write_text(GRADER)
    command = harness.command(
        tiny_config,
        run_dir,
        harness.ONE_RANK,
        f"reward.functions=[{{function: '{folder}/grader.py:noise'}}]",
        "run.max_steps=48",
        "optimizer.lr=0.01",
        "optimizer.lr_warmup_steps=100",
        "batch.global_batch_size=8",
        "batch.num_generations=4",
        "rollout.dtype=bfloat16",
        "rollout.probe_max_gap=1000",
        "rollout.probe_mean_gap=1000",
        *NEVER,
    )
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 8, process, log)
    run_id = harness.run_id(run_dir)
    stopped = [psutil.Process(process.pid), *(psutil.Process(pid) for pid in processes.marked(run_id))]
    for one in stopped:
        one.suspend()
    now = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 400.0)
        still = {symptom.name: symptom.to_json() for symptom in diagnose(run_dir).symptoms}
    for one in stopped:
        one.resume()
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    return still, harness.diagnose(run_dir)[1]


def test_a_run_that_stands_still(drifting: tuple[Found, Found]) -> None:
    still, done = drifting
    assert still["no_progress"]["severity"] == "warning" and "no step for 40" in still["no_progress"]["evidence"][0]
    assert "no_progress" not in done


def test_an_engine_that_drifts_away(drifting: tuple[Found, Found]) -> None:
    symptom = drifting[1]["train_inference_mismatch"]
    assert symptom["severity"] == "problem" and symptom["evidence"][0].startswith("logprob_gap_mean went from")
    assert "rollout.dtype=float32" in symptom["settings"] and "optimizer.lr=0.001" in symptom["settings"]
