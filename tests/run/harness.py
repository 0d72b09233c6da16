"""Whole runs through the command line: real ranks, a real engine, real W&B, on the tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

from gspo_hpc.system import leftovers
from gspo_hpc.system import processes as orphans

# What may differ between equal runs: time, what is made again after a death, a sync's probe included, and which
# completion of a group comes first and finds nothing in the prefix cache.
RESTARTED = ("attempt", "engine_restarts", "passes")
TIMING = ("seconds", "tokens_per_s", "tflops", "communication", "time", *RESTARTED, "cached")

Found = dict[str, dict[str, Any]]  # symptoms by name

STEPS = 8
OVERRIDES = (
    f"run.max_steps={STEPS}",
    "batch.steps_per_generation=2",
    "optimizer.lr=3e-4",  # so few steps must leave the clip range too
    "checkpoint.interval=1",
    "checkpoint.keep=2",
    "eval.max_prompts=16",
    "eval.interval=null",
    "tracking.samples=64",
)
ONE_RANK = "cluster.gpus_per_node=1"  # where nothing hangs on the second: a run costs half as much
RECORDED = ("tracking.record_interval=1", "tracking.record_groups=3")  # samples of every step, token by token
PLANTED = Path(__file__).parent / "planted"


def command(config: Path, run_dir: Path, *overrides: str) -> list[str]:
    """`gspo-hpc train` for a run directory."""
    return [sys.executable, "-m", "gspo_hpc", "train", str(config), f"run.dir={run_dir}", *overrides]


def start(arguments: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """The command in a session of its own, output to a file. `variables`: more of its environment."""
    own = environment() | variables
    return subprocess.Popen(arguments, stdout=log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True, env=own)


def planted(what: str, note: Path, rank: int = 1, *more: int) -> dict[str, str]:
    """Variables with which ranks have this planted (tests/run/planted); a fault makes the file `note`."""
    assert (PLANTED / "sitecustomize.py").exists()
    found_first = os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    names = {"PYTHONPATH": found_first, "GSPO_HPC_TEST_PLANTED": what, "GSPO_HPC_TEST_PLANTED_NOTE": str(note)}
    return names | {"GSPO_HPC_TEST_PLANTED_RANK": ",".join(map(str, (rank, *more)))}


def environment() -> dict[str, str]:
    """Two ranks and an engine share two cores."""
    return os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def finish(process: subprocess.Popen[bytes], log: Path, timeout: float = 300.0) -> int:
    """The exit code."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(f"still running after {timeout} s:\n{log.read_text()[-3000:]}") from None


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and, through PR_SET_PDEATHSIG, to everything below it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout: float = 240) -> None:
    """Until the condition holds. The process must not end before."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, f"ended early with {process.returncode}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"waited {timeout} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.02)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, without a last line that is being written."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {key: value for key, value in record.items() if not any(part in key for part in TIMING)}
        for record in metrics(run_dir)
    ]


def export(run_dir: Path, out: Path) -> dict[str, np.ndarray]:
    """The final weights, through `gspo-hpc export`."""
    arguments = [sys.executable, "-m", "gspo_hpc", "export", str(run_dir), "--out", str(out)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return load_file(out / "model.safetensors")


def diagnose(run_dir: Path) -> tuple[int, Found]:
    """Exit code of `gspo-hpc diagnose RUN --json`, and the symptoms by name."""
    line = [sys.executable, "-m", "gspo_hpc", "diagnose", str(run_dir), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, {symptom["name"]: symptom for symptom in json.loads(done.stdout)["symptoms"]}


def run_id(run_dir: Path) -> str:
    """By which its processes are known."""
    return str(json.loads((run_dir / "run.json").read_text())["run_id"])


def worker(run_dir: Path, rank: int) -> psutil.Process:
    """The process of a training rank."""
    processes = [psutil.Process(pid) for pid in orphans.marked(run_id(run_dir))]
    return next(
        one
        for one in processes
        if "gspo_hpc.training.worker" in one.cmdline()
        and one.environ().get("RANK") == str(rank)
        and one.ppid() != os.getpid()
    )


def journal_lines(run_dir: Path, rollout: int) -> int:
    """Finished groups of a rollout on disk, without the header."""
    files = (run_dir / "rollouts" / f"{rollout:06d}").glob("rank-*.journal")
    return sum(max(0, len(file.read_bytes().splitlines()) - 1) for file in files)


def last_step(run_dir: Path) -> int:
    """The newest logged step, -1 for none."""
    return max((int(record["step"]) for record in metrics(run_dir)), default=-1)


def samples(run_dir: Path) -> dict[tuple[Any, ...], str]:
    """Completions by step, phase and prompt; a step made again after a kill says the same again."""
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    found: dict[tuple[Any, ...], str] = {}
    for row in rows:
        key = (row["step"], row["phase"], row["prompt"])
        assert found.setdefault(key, row["completion"]) == row["completion"], key
    return found


def left_on_node(run_dir: Path) -> list[str]:
    """Files in shared memory and temporary folders by the names that the run's attempts give them."""
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    tags = [leftovers._tag(f"{run_id}:{path.name.lstrip('0')}") for path in (run_dir / "attempts").iterdir()]
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [str(path) for folder in folders for path in folder.iterdir() if any(tag in path.name for tag in tags)]
