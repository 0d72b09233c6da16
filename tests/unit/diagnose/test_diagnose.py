"""diagnose on run directories, made with the package's own writers (run directory, attempts, metrics).

The texts in their logs are those that CUDA, NCCL, vLLM, Megatron-Core and Slurm write, typed in: no GPU and no such
fault made them. Runs that really went wrong are in tests/run/test_diagnose.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader, paths
from gspo_hpc.diagnose import gather, patterns
from gspo_hpc.diagnose.registry import Symptom
from gspo_hpc.models import catalog
from gspo_hpc.runs.directory import Attempt, RunDir, open_run
from tests.unit.diagnose.test_symptoms import CASES, CONFIG, healthy

Make = Callable[..., RunDir]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that makes a run with so many healthy steps."""

    def run(steps: int = 12, name: str = "run", **sections: dict[str, Any]) -> RunDir:
        merged = {key: CONFIG.get(key, {}) | sections.get(key, {}) for key in CONFIG.keys() | sections.keys()}
        merged["run"] |= {"dir": str(tmp_path / "runs" / name)}
        (tmp_path / "runs").mkdir(exist_ok=True)
        made, _ = open_run(loader.from_dict(merged))
        for step in range(1, steps + 1):
            made.append_metrics(healthy(step))
        return made

    return run


def attempt(run: RunDir, reason: str | None = None, detail: str = "", logs: dict[int, str] | None = None) -> Attempt:
    """One more start of the run, with what its ranks wrote, and how it ended."""
    with run.lock():
        begun = run.new_attempt(loader.load(run.config))
        for rank, text in (logs or {}).items():
            begun.log_path(rank).write_text(text)
            os.utime(begun.log_path(rank), (1000 + rank, 1000 + rank))
        if reason is not None:
            begun.finish(reason, 0 if reason == "done" else 1, detail)
    return begun


def found(run: RunDir) -> dict[str, Symptom]:
    """What is found, by name."""
    return {symptom.name: symptom for symptom in gather.diagnose(run.path).symptoms}


def traceback(error: str, where: str = "gspo_hpc/policy/schedule.py") -> str:
    """A log with an error in it."""
    head = f'loading\nTraceback (most recent call last):\n  File "{where}", line 1, in f\n    g()\n'
    return f"{head}{error}\nerror: {error}\n"


MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.02 GiB is free."
)
DUPLICATE = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, invalid usage. Last error: Duplicate GPU "
    "detected : rank 1 and rank 0 both on CUDA device 4a000"
)
WATCHDOG = (
    "torch.distributed.DistBackendError: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=81, "
    "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800016 milliseconds before timing out."
)
SOCKET = (
    "torch.distributed.DistBackendError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details), "
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
)
HEADS = "ValueError: Total number of attention heads (14) must be divisible by tensor parallel size (4)."
ERRORS: list[tuple[str, str, str, str]] = [
    # error text, symptom, a setting, what to look at
    (MEMORY, "out_of_memory_in_update", "memory.recompute_granularity=full", "rank-0.log"),
    (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        "out_of_memory_in_generation",
        "rollout.engine.gpu_memory_utilization=0.7",
        "rank-0.log",
    ),
    (SOCKET, "nccl_error", "slurm.environment.NCCL_SOCKET_IFNAME=^lo,docker0", "logs RUN --errors"),
    (WATCHDOG, "nccl_error", "tracking.debug=true", "logs RUN --errors"),
    (HEADS, "tensor_parallel_mismatch", "rollout.tensor_parallel_size=2", "gspo-hpc plan"),
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "version_mismatch",
        "",
        "gspo-hpc doctor",
    ),
    ("ImportError: libcudart.so.13: cannot open shared object file", "version_mismatch", "", "slurm.modules"),
    (
        "ImportError: te.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE",
        "version_mismatch",
        "",
        "gspo-hpc doctor",
    ),
    (DUPLICATE, "mig_devices", "", "ask for whole GPUs"),
    ("OSError: [Errno 28] No space left on device", "disk_full", "checkpoint.keep=1", "free some space"),
    ("MemoryError: cannot allocate", "out_of_host_memory", "slurm.mem='0'", "OOM killer"),
    (
        "gspo_hpc.training.probe.ProbeMismatch: after the weight sync, engine and trainer disagree on the probe",
        "weight_sync_mismatch",
        "rollout.dtype=float32",
        "rollout.probe_max_gap",
    ),
    (
        "gspo_hpc.training.probe.ProbeMismatch: stale prefix cache: after the weight sync an engine took 64 tokens",
        "stale_prefix_cache",
        "rollout.engine.enable_prefix_caching=false",
        "vLLM says there why",
    ),
    (
        "ProbeMismatch: engine and trainer disagree on the probe: mean 1. Likely cause: only tokens that go to "
        "experts 3 and 7 of layer 2 differ: experts are swapped or have older weights",
        "swapped_experts",
        "",
        "weight_map.py",
    ),
    (
        "ProbeMismatch: after the weight sync an engine has other experts than the trainer: expert 3 of layer 2 has "
        "those of the trainer's expert 6",
        "swapped_experts",
        "",
        "weight_map.py",
    ),
    (
        "ProbeMismatch: engine and trainer disagree on the probe: mean 1. Likely cause: all tokens differ; expert 3 of "
        "layer 2 has those of none of the trainer's",
        "swapped_experts",
        "",
        "weight_map.py",
    ),
    (
        "ProbeMismatch: an engine computes with other constants than the trainer: wrong rotary embeddings: the engine "
        "computes as the trainer would with rope_theta 10000",
        "wrong_rope",
        "",
        "rope_parameters",
    ),
    (
        "ProbeMismatch: an engine computes with other constants than the trainer: norms with rms_norm_eps 1e-05 in the "
        "engine, 1e-06 here",
        "other_constants",
        "",
        "hf_overrides",
    ),
    (
        "ProbeMismatch: engine and trainer disagree on the probe: mean 1. Likely cause: the engine rounds its "
        "logits to 16 bits: they are multiples of 0.0625",
        "rounded_logits",
        "rollout.engine.hf_overrides.head_dtype=float32",
        "replaces head_dtype",
    ),
    (
        "gspo_hpc.training.probe.ProbeMismatch: an engine rounds its logits to 16 bits: they are multiples of 0.0625, "
        "although it is to compute them in float32. Change vLLM's version, or accept rounded logits with "
        "rollout.engine.hf_overrides.head_dtype=model",
        "unwanted_rounding",
        "rollout.engine.hf_overrides.head_dtype=model",
        "replaces head_dtype",
    ),
    (
        "gspo_hpc.training.loop.TooManySkippedSteps: the gradient was not finite for 6 steps in a row",
        "exploding_gradients",
        "optimizer.lr=1e-07",
        "metrics.jsonl",
    ),
    ("KeyError: 'surprise'", "unknown_failure", "tracking.debug=true", "logs RUN --errors"),
]


@pytest.mark.parametrize(("name", "severity", "change", "shown", "setting"), CASES)
def test_numbers_in_a_run_directory_are_known(
    make: Make, name: str, severity: str, change: Callable[[int], dict[str, Any]], shown: str, setting: str
) -> None:
    """Those of GPUs (use, memory) are made up: none has run."""
    run = make(0)
    for step in range(1, 41):
        run.append_metrics(healthy(step, **change(step)))
    attempt(run, "done")
    (symptom,) = found(run).values()
    assert (symptom.name, symptom.severity) == (name, severity)
    assert shown in " ".join(symptom.evidence) and (not setting or setting in symptom.settings)


@pytest.mark.parametrize(("error", "name", "setting", "look"), ERRORS)
def test_the_error_that_ended_a_run_is_known(make: Make, error: str, name: str, setting: str, look: str) -> None:
    run = make(rollout={"tensor_parallel_size": 4})
    attempt(run, "failed", f"rank 0 ended with exit code 1: {error}", {0: traceback(error), 1: "nothing\n"})
    symptoms = found(run)
    assert [s for s in symptoms if symptoms[s].severity == "problem"] == [name]
    symptom = symptoms[name]
    assert not setting or setting in symptom.settings, symptom.settings
    assert any(look in text for text in symptom.look), symptom.look
    assert all(" " in text for text in symptom.look), "the name of a file alone does not say what to do with it"


def test_memory_at_the_start_and_after_steps(make: Make) -> None:
    """Before its first step a run does not fit; later a micro-batch does not."""
    run = make(0, parallel={"pipeline_model_parallel_size": 4})
    attempt(run, "failed", "rank 0: OutOfMemoryError", {0: traceback(MEMORY)})
    symptom = found(run)["out_of_memory_at_start"]
    assert "of a pipeline stage" in symptom.cause and "memory.recompute_granularity=full" in symptom.settings
    assert "before its first step" in symptom.evidence[0]
    run = make(12, name="later")
    attempt(run, "failed", "rank 0: OutOfMemoryError", {0: traceback(MEMORY)})
    symptom = found(run)["out_of_memory_in_update"]
    assert "after step 12" in symptom.evidence[0] and "batch.micro_batch_tokens=4096" in symptom.settings


def test_the_cause_is_named_and_not_what_follows_from_it(make: Make) -> None:
    """The other ranks' NCCL errors come of the one that had no memory."""
    run = make()
    logs = {rank: traceback(SOCKET) for rank in range(4)} | {2: traceback(MEMORY)}
    attempt(run, "failed", f"rank 2 on n1: {MEMORY}", logs)
    assert "out_of_memory_in_update" in found(run) and "nccl_error" not in found(run)


@pytest.mark.parametrize(("given", "less"), [(None, "0.7"), (0.6, "0.4"), ("much", "0.7")])
def test_an_engine_takes_less_than_it_was_given_or_than_its_default(make: Make, given: object, less: str) -> None:
    run = make(rollout={"engine": {"gpu_memory_utilization": given}})
    error = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
    attempt(run, "failed", error, {0: traceback(error)})
    settings = found(run)["out_of_memory_in_generation"].settings
    assert f"rollout.engine.gpu_memory_utilization={less}" in settings


def test_mig_devices_by_their_name(make: Make) -> None:
    run = make()
    attempt(run, "done", logs={0: "device: NVIDIA A100-SXM4-80GB MIG 3g.40gb\n", 1: "device: NVIDIA A100-SXM4-80GB\n"})
    symptom = found(run)["mig_devices"]
    assert "MIG 3g.40gb" in symptom.evidence[0] and symptom.severity == "warning"
    whole = make(name="whole")
    attempt(whole, "done", logs={0: "device: NVIDIA A100-SXM4-80GB\n"})
    assert found(whole) == {}


def test_the_oom_killer_and_a_kill_that_nobody_explains(make: Make) -> None:
    run = make(rollout={"sleep_level": 1})
    begun = attempt(run, "failed", "rank 1 on n2 was killed (Killed), by hand, for want of memory, or with its node")
    assert found(run)["killed_rank"].severity == "problem"
    said = "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.\n"
    (begun.path / "srun.log").write_text(said)
    assert "oom_kill" in found(run)["out_of_host_memory"].evidence[0] and "killed_rank" not in found(run)
    assert "rollout.sleep_level=2" in found(run)["out_of_host_memory"].settings, "engines keep their weights there"
    dropped = make(name="dropped")
    attempt(dropped, "failed", "rank 1 on n2 was killed (Killed), by hand, for want of memory, or with its node")
    assert "rollout.sleep_level=2" not in found(dropped)["killed_rank"].settings, "it is the default"


@pytest.mark.parametrize(
    "detail", ["rank 1 was killed by SIGBUS", "rank 1 on n2 crashed (Segmentation fault (core dumped))"]
)
def test_a_crash_is_no_want_of_memory(make: Make, detail: str) -> None:
    run = make()
    attempt(run, "failed", detail)
    symptoms = found(run)
    assert symptoms.keys() == {"crashed_rank"} and detail in symptoms["crashed_rank"].evidence[0]


def test_lost_nodes_are_named_and_left_out(make: Make) -> None:
    run = make(slurm={"exclude": "n9"})
    attempt(run, "failed", "rank 1 on n2 has gone and its step has not")
    (run.path / "jobs" / "0001").mkdir(parents=True)
    said = "gspo-hpc: no answer from n2, n3: the job goes back to the queue, without them\n"
    (run.path / "jobs" / "0001" / "7_0_log.out").write_text(said)
    assert found(run)["lost_node"].settings == ("slurm.exclude=n9,n2,n3",)


def test_a_hanging_rank_with_its_stacks(make: Make) -> None:
    run = make()
    begun = attempt(run, "failed", "rank 1 on n2 hangs in 'update' for 900 s (faults.hang_timeout)")
    begun.stacks_path(0).write_text("Fatal Python error: Aborted\n")
    begun.stacks_path(1).write_text("Fatal Python error: Aborted\n  all_reduce\n")
    symptom = found(run)["hanging_rank"]
    assert "rank 1 on n2 hangs in 'update'" in symptom.evidence[0]
    assert "attempts/0001/rank-1.stacks" in symptom.look[0] and "faults.hang_timeout=1800" in symptom.settings


def test_an_engine_that_died(make: Make) -> None:
    run = make(0)
    for step in range(1, 9):
        run.append_metrics(healthy(step, engine_restarts=int(step > 4)))
    attempt(run, "done", logs={0: "engine died (no answer for 300 s); restart 1 of at most 3\n"})
    symptom = found(run)["engine_restarts"]
    assert symptom.severity == "warning" and "logged at step 5" in symptom.evidence[0]
    assert "1 x no answer for 300 s" in symptom.evidence[1] and "faults.engine_timeout=600" in symptom.settings


def test_a_full_disk_that_only_the_job_could_report(make: Make) -> None:
    """Logs of ranks and records of attempts are on the disk that is full."""
    run = make()
    attempt(run, "failed", "rank 0 on n1 was killed", {0: ""})
    (run.path / "jobs" / "0001").mkdir(parents=True)
    text = "gspo-hpc: error: attempt.json: cannot be written: the disk is full or over its quota; free some space\n"
    (run.path / "jobs" / "0001" / "7_0_log.out").write_text(text)
    symptom = found(run)["disk_full"]
    assert symptom.severity == "problem" and "the disk is full" in symptom.evidence[0]
    assert "checkpoint.keep=1" in symptom.settings
    attempt(run, "done")
    assert found(run)["disk_full"].severity == "warning"


def test_a_crash_loop(make: Make) -> None:
    run = make()
    for _ in range(3):
        attempt(run, "failed", "rank 0 on n1: KeyError: 'x'", {0: traceback("KeyError: 'x'")})
    (run.path / "jobs" / "0001").mkdir(parents=True)
    text = "gspo-hpc: gives up: 3 failures without progress since step 12 (faults.max_restarts 2); the last: KeyError\n"
    (run.path / "jobs" / "0001" / "7_0_log.out").write_text(text)
    symptom = found(run)["crash_loop"]
    assert symptom.severity == "problem" and "3 failures in a row" in " ".join(symptom.evidence)
    assert "gives up: 3 failures" in symptom.evidence[-1]


def test_a_config_that_was_refused(make: Make) -> None:
    """What the supervisor says when a job is submitted with other settings."""
    run = make()
    attempt(run, "preempted")
    (run.path / "jobs" / "0002").mkdir(parents=True)
    text = f"gspo-hpc: error: {run.path} was started with another config:\n  optimizer.lr: 1e-06 -> 0.5\nThese keys\n"
    (run.path / "jobs" / "0002" / "8_0_log.out").write_text(text)
    symptom = found(run)["refused"]
    assert symptom.severity == "problem" and "optimizer.lr: 1e-06 -> 0.5" in symptom.evidence[0]


def test_a_first_rollout_without_a_reward(make: Make) -> None:
    run = make()
    text = "reward.functions: no completion of the first rollout (64) got a reward: own.py:f: KeyError: 'x' (64)"
    attempt(run, "refused", text)
    symptom = found(run)["refused"]
    assert "KeyError: 'x'" in symptom.evidence[0] and "failed for every completion" in symptom.cause
    assert "gspo-hpc try CONFIG" in symptom.look[0]
    source = (paths.PACKAGE / "training" / "sampling" / "base.py").read_text()
    assert f'"reward.functions: {patterns.UNGRADED} (' in source.replace('f"', '"'), "these are the loop's own words"


def test_packages_that_changed_between_attempts(make: Make) -> None:
    run = make()
    for number in (1, 2):
        begun = attempt(run, "preempted" if number == 1 else "done")
        record = json.loads((begun.path / "attempt.json").read_text())
        record["versions"]["torch"] = f"2.{number}"
        (begun.path / "attempt.json").write_text(json.dumps(record))
    assert found(run)["versions_changed"].evidence == ("attempts 1 and 2: torch 2.1 -> 2.2",)


def test_a_run_that_was_killed_with_its_launcher(make: Make) -> None:
    run = make()
    attempt(run)
    symptoms = found(run)
    assert symptoms["killed"].severity == "problem" and "never recorded why" in symptoms["killed"].evidence[0]


def test_a_run_that_is_well(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make()
    attempt(run, "done", logs={0: "nothing\n"})
    assert main(["diagnose", str(run.path)]) == 0
    page = capsys.readouterr().out
    assert "nothing found (done, step 12 of 100, 1 attempt)" in page and "device_use" in page
    assert "0.90  above 0.8: met" in page and "0.15  below 0.3: met" in page


def test_a_young_run_says_that_it_is_young(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(make(2).path)]) == 0
    assert "2 steps: too few to judge learning" in capsys.readouterr().out


def test_page_json_and_exit_code(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(parallel={"tensor_model_parallel_size": 2})
    attempt(run, "failed", f"rank 0: {MEMORY}", {0: traceback(MEMORY)})
    assert main(["diagnose", str(run.path)]) == 1
    page = capsys.readouterr().out
    assert page.splitlines()[0].endswith("1 problem (failed, step 12 of 100, 1 attempt)")
    assert "memory.recompute_granularity=full or " in " ".join(page.split())
    below = page.splitlines()[1:]  # the first has the path, which is as long as it is
    assert max(map(len, below)) <= 120 and "\033" not in page
    assert main(["diagnose", "--json", str(run.path)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == str(run.path) and told["state"] == "failed" and (told["step"], told["max_steps"]) == (12, 100)
    assert told["problems"] == 1 and told["attempts"] == 1
    assert set(told["symptoms"][0]) == {
        "name",
        "severity",
        "evidence",
        "cause",
        "settings",
        "look",
        "resumable",
        "new_run",
    }
    assert told["targets"]["device_use"] == {"measured": 0.9, "target": 0.8, "met": True, "lacking": None}
    assert [one["severity"] for one in told["symptoms"]] == sorted(one["severity"] for one in told["symptoms"])


def test_no_line_is_longer_than_a_terminal(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = make(parallel={"tensor_model_parallel_size": 2})
    attempt(run, "failed", f"rank 0: {MEMORY}", {0: traceback(MEMORY)})
    assert main(["diagnose", str(run.path)]) == 1
    assert max(map(len, capsys.readouterr().out.splitlines()[1:])) <= 80


def test_a_warning_is_no_problem(make: Make) -> None:
    run = make(0)
    for step in range(1, 9):
        run.append_metrics(healthy(step, truncated_fraction=0.2))
    attempt(run, "done")
    assert [s.severity for s in found(run).values()] == ["warning"]
    assert main(["diagnose", str(run.path)]) == 0


def test_what_is_no_run_is_refused_with_the_nearest(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(name="tiny")
    for wrong, hint in (
        (run.path.parent / "tinny", f"nearest: {run.path}"),
        (run.path.parent, f"it contains the runs {run.path}"),
        (run.path / "attempts", f"nearest: {run.path}"),
        (run.path / "run.json", f"nearest: {run.path}"),
    ):
        assert main(["diagnose", str(wrong)]) == 2
        error = capsys.readouterr().err
        assert hint in error and len(error.splitlines()) <= 2, error
    assert main(["diagnose", str(run.path), "--jsno"]) == 2
    assert "nearest: --json" in capsys.readouterr().err


def test_a_config_of_another_version_is_read_as_far_as_it_goes(make: Make) -> None:
    run = make(0, cluster={"platform": "cpu"})
    for step in range(1, 9):
        run.append_metrics(healthy(step, communication_over_computation=2.0))
    attempt(run, "done")
    for path in run.path.rglob("config.yaml"):
        path.write_text(path.read_text().replace("cluster:\n", "cluster:\n  colour: blue\n") + "kitchen: {sink: 1}\n")
    assert found(run)["communication"].severity == "note", "it is on a CPU, which the config says"


@pytest.mark.parametrize("gone", ["run.json", "config.yaml", "metrics.jsonl", "attempts", "attempts/0001/rank-0.log"])
def test_anything_may_be_missing_or_torn(make: Make, gone: str) -> None:
    run = make()
    attempt(run, "failed", MEMORY, {0: traceback(MEMORY)})
    path = run.path / gone
    if path.is_dir():
        for part in path.rglob("*.json"):
            part.write_text('{"attempt":')
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert isinstance(found(run), dict)
    if path.is_file():
        path.unlink()
        assert isinstance(found(run), dict)


def test_torch_is_not_imported(make: Make) -> None:
    run = make()
    attempt(run, "failed", MEMORY, {0: traceback(MEMORY)})
    code = (
        "import sys; from gspo_hpc.cli.main import main; main(sys.argv[1:]);"
        "print([n for n in ('torch', 'vllm', 'megatron', 'wandb', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "diagnose", str(run.path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


NOISE = bytes(range(255, 0, -1)) * 4  # with line breaks in it, as anything random has


def finished(make: Make, name: str = "run") -> RunDir:
    """Done, with two attempts, of which the first was preempted."""
    run = make(name=name)
    attempt(run, "preempted")
    attempt(run, "done", logs={0: "nothing\n"})
    run.append_samples({"step": step, "phase": "train", "prompt": "a"} for step in (1, 2))
    assert "damaged_records" not in found(run)
    return run


def test_a_run_whose_records_are_noise_is_no_healthy_one(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(make)
    for path in (*run.path.rglob("*.json"), *run.path.rglob("*.jsonl")):
        path.write_bytes(NOISE)
    assert main(["diagnose", str(run.path)]) == 1
    page = capsys.readouterr().out
    assert "(unknown, step 0 of 100, 2 attempts)" in page.splitlines()[0]
    symptom = found(run)["damaged_records"]
    assert symptom.severity == "problem"
    named = " ".join(symptom.evidence)
    for name in ("run.json", "attempts/0001/attempt.json", "attempts/0002/attempt.json", "metrics.jsonl", "samples"):
        assert name in named, name


@pytest.mark.parametrize(
    ("name", "content", "severity"),
    [
        ("metrics.jsonl", None, "problem"),
        ("metrics.jsonl", b"", "problem"),
        ("metrics.jsonl", NOISE, "problem"),
        ("metrics.jsonl", b'{"step": "seven", "reward": 1.0}\n', "problem"),
        ("attempts/0002/attempt.json", b'{"attempt": 2, "sta', "problem"),
        ("attempts/0002/attempt.json", b"", "problem"),
        ("attempts/0002/attempt.json", b"[2]", "problem"),
        ("attempts/0001/attempt.json", b'{"attempt": 1, "sta', "warning"),
        ("run.json", b"{", "warning"),
        ("samples.jsonl", NOISE, "warning"),
        ("config.yaml", NOISE, "warning"),
    ],
)
def test_each_damaged_record_is_named(make: Make, name: str, content: bytes | None, severity: str) -> None:
    run = finished(make)
    if content is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_bytes(content)
    symptom = found(run)["damaged_records"]
    assert symptom.severity == severity and all(name in text for text in symptom.evidence), symptom.evidence
    diagnosis = gather.diagnose(run.path)
    assert len(diagnosis.evidence.attempts) == 2, "an attempt whose record is torn was made all the same"
    assert diagnosis.evidence.state == ("unknown" if "0002" in name else "done")


def test_lines_that_are_lost_are_counted(make: Make) -> None:
    run = finished(make)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join([lines[0], NOISE[:9] + b"\n", *lines[2:]]))
    symptom = found(run)["damaged_records"]
    assert symptom.severity == "warning" and symptom.evidence == ("metrics.jsonl line 2 is not a record",)
    run.metrics.write_bytes(b"".join(lines[:4]))
    with run.lock():
        run.new_attempt(loader.load(run.config)).finish("preempted", 1, reached=(9, 0))
    symptom = found(run)["damaged_records"]
    assert symptom.severity == "problem"
    assert symptom.evidence == ("metrics.jsonl has no record after step 4; the run reached 9",)


def test_what_a_kill_and_a_first_step_leave_is_no_damage(make: Make) -> None:
    """A torn last line; no records yet; a start that was killed before it wrote anything; a save before its record."""
    killed = make()
    attempt(killed)
    killed.metrics.write_bytes(killed.metrics.read_bytes()[:-20])
    killed.append_samples([{"step": 1, "phase": "train", "prompt": "a"}])
    killed.samples.write_bytes(killed.samples.read_bytes() + b'{"step": 2, "pha')
    assert found(killed).keys() == {"killed"}
    young = make(0, name="young")
    assert found(young) == {}
    (young.attempts / "0001").mkdir()
    (young.checkpoints / "000001").mkdir()
    (young.checkpoints / "000001" / "COMMITTED").write_text("x")
    assert found(young).keys() == {"killed"}
    (young.checkpoints / "000001").rename(young.checkpoints / "000005")
    assert "there is a checkpoint of step 5" in found(young)["damaged_records"].evidence[0]


@pytest.mark.parametrize("model", ["Qwen3-8B", "models/of-nobody"])
def test_the_variance_of_gradients_is_a_target(model: str, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run, known = make(model={"path": model}), model == "Qwen3-8B"
    main(["diagnose", "--json", str(run.path)])
    told = json.loads(capsys.readouterr().out)["targets"]["gradient_variance"]
    assert told["target"] == 1e-4 and (told["met"], told["measured"] is not None) == (known or None, known)
    if known:
        norms = sorted(record["grad_norm"] for record in run.read_metrics())
        assert norms[0] ** 2 <= told["measured"] * 8_190_735_360 <= norms[-1] ** 2
    else:
        assert "model.path models/of-nobody is not found from here" in told["lacking"]


def test_a_target_that_lacks_the_model_says_so(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path of a model is from where the run was started."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / "small").mkdir(parents=True)
    elsewhere.mkdir()
    (home / "small" / "config.json").write_text(json.dumps(catalog.content("Qwen3-8B")))
    run = make(model={"path": "small"})
    monkeypatch.chdir(home)
    main(["diagnose", str(run.path)])
    here = " ".join(capsys.readouterr().out.split())
    assert "gradient_variance" in here and "below 0.0001" in here and "not measured" not in here
    monkeypatch.chdir(elsewhere)
    main(["diagnose", str(run.path)])
    away = " ".join(capsys.readouterr().out.split())
    assert "gradient_variance not measured: model.path small is not found from here" in away
    assert "in the folder in which the run was started" in away
    (elsewhere / "small").mkdir()
    (elsewhere / "small" / "config.json").write_text("{}")
    main(["diagnose", str(run.path)])
    assert "small/config.json does not give the sizes" in " ".join(capsys.readouterr().out.split())
    young = make(2, name="young", model={"path": "nowhere"})
    main(["diagnose", str(young.path)])
    assert "not measured" not in capsys.readouterr().out, "too few steps to judge anything"


def test_failures_of_reward_functions_come_from_the_console_or_from_samples(make: Make) -> None:
    made = finished(make)
    made.append_samples([{"step": 1, "phase": "train", "prompt": "p", "failure": "exact: ValueError: sampled"}] * 2)
    assert gather.gather(made.path)[0].reward_failures == {"exact: ValueError: sampled": 1}
    console = made.attempt(1).console
    line = "a reward function failed for {} completion{}: exact: KeyError: 'answer'\n"
    console.write_text("row\n" + line.format(3, "s") + "row\n" + line.format(1, ""))
    assert gather.gather(made.path)[0].reward_failures == {"exact: KeyError: 'answer'": 4}
