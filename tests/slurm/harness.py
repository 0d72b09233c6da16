"""A real Slurm of four nodes on this machine, and runs on it that meet with faults."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.launch.slurm import commands
from gspo_hpc.runs import commit
from gspo_hpc.system.files import write_atomically
from tests.run import harness

PROJECT = Path(__file__).parents[2]
SCRIPT = PROJECT / "slurm" / "local_cluster.sh"
STEPS = 8
GROUPS = 8  # of a rollout
NOTICE = 45  # seconds before which a time limit must be set: slurmctld looks for jobs to be warned every 30 s
# Two nodes with a rank and an engine each; rollouts of two updates, long enough to be interrupted.
OVERRIDES = (
    "cluster.nodes=2",
    "cluster.gpus_per_node=1",
    f"run.max_steps={STEPS}",
    "batch.global_batch_size=32",
    "batch.steps_per_generation=2",
    "batch.micro_batch_tokens=64",  # an update in many small pieces: long enough to be interrupted
    "checkpoint.interval=1",
    "checkpoint.keep=2",
    "eval.max_prompts=16",
    "eval.interval=null",
    "tracking.samples=64",
    "faults.heartbeat_timeout=15",
    "slurm.partition=low",
    "reward.functions=[{function: 'tests/slurm/graders.py:slow'}]",
    "reward.timeout=120",  # a machine of two cores that restarts everything may stand still for seconds
)


class Cluster:
    """What `slurm/local_cluster.sh up` has started."""

    def user_signal(self, on: bool) -> None:
        """Whether a preemption sends the signal of --signal at once, or SIGTERM only."""
        path = Path(os.environ["SLURM_CONF"])
        line = "SlurmctldParameters=preempt_send_user_signal\n"
        text = path.read_text().replace(line, "")
        write_atomically(path, line + text if on else text)  # jobs of other tests read it
        commands.run(["scontrol", "reconfigure"])

    def preempt(self, seconds: int = 1) -> None:
        """A job of higher priority takes all nodes for a moment."""
        command = ["sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null"]
        commands.run([*command, f"--wrap=sleep {seconds}"])

    def stop_controller(self) -> None:
        """kill -9 of slurmctld."""
        pid = int(Path(os.environ["SLURM_CONF"]).with_name("slurmctld.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.02)

    def start_controller(self) -> None:
        """It comes back, and knows what it knew."""
        self._start(["slurmctld", "-f", os.environ["SLURM_CONF"]])
        deadline = time.monotonic() + 30.0
        while b"UP" not in subprocess.run(["scontrol", "ping"], capture_output=True, check=False).stdout:
            assert time.monotonic() < deadline, "slurmctld does not answer"
            time.sleep(0.1)

    def lose(self, node: str) -> None:
        """kill -9 of a node's slurmd and of all that runs on it, of this Slurm and no other on the machine."""
        folder = str(Path(os.environ["SLURM_CONF"]).parent).encode()
        daemons, steps, work = set(), set(), set()
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                environment = (path / "environ").read_bytes()
                if folder not in environment:
                    continue
                if words[0].endswith(b"slurmd") and node.encode() in words:
                    daemons.add(int(path.name))
                elif f"SLURMD_NODENAME={node}".encode() in environment.split(b"\0"):
                    work.add(int(path.name))
                    steps |= {pid for pid in _ancestors(path) if _name(pid).startswith("slurmstepd")}
        assert daemons, f"{node} has no slurmd"
        for pid in (*daemons, *steps, *work):  # nobody is left that could tell the controller of what follows
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def revive(self, node: str) -> None:
        """Its slurmd again."""
        self._start(["slurmd", "-N", node, "-f", os.environ["SLURM_CONF"]])

    def _start(self, command: list[str]) -> None:
        mark = {"GSPO_HPC_SLURM_DIR": str(Path(os.environ["SLURM_CONF"]).parent)}  # by which `down` knows its own
        subprocess.run(command, env=os.environ | mark, check=True)


def _ancestors(path: Path) -> list[int]:
    """Of the process with this folder in /proc, but for the first of all."""
    found: list[int] = []
    while (parent := int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])) > 1:
        found.append(parent)
        path = Path(f"/proc/{parent}")
    return found


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


class State(NamedTuple):
    """Slurm's word for a job, and whether it runs or will run."""

    name: str
    active: bool


@dataclass
class SlurmRun:
    """A run that was submitted."""

    config: Path
    run_dir: Path
    overrides: tuple[str, ...] = ()
    grader_seconds: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)  # of the ranks, through slurm.environment
    shell: dict[str, str] = field(default_factory=dict)  # of the shell in which the commands are given
    job_id: str = ""

    def submit(self) -> SlurmRun:
        """Hand it to Slurm through the command line."""
        variables = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
        variables |= {"GSPO_HPC_TEST_GRADER_SECONDS": str(self.grader_seconds), **self.variables}
        own = (f"run.dir={self.run_dir}", f"slurm.environment={json.dumps(variables)}")
        done = self.command("submit", str(self.config), *own, *OVERRIDES, *self.overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"job (\d+) submitted", done.stdout)
        assert found is not None, done.stdout
        self.job_id = found.group(1)
        return self

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """gspo-hpc ..."""
        words = [sys.executable, "-m", "gspo_hpc", *arguments]
        return subprocess.run(
            words, capture_output=True, text=True, env=harness.environment() | self.shell, timeout=120, cwd=PROJECT
        )

    def state(self) -> State:
        """What Slurm says of it."""
        job = commands.job(self.job_id)
        return State(job.state, job.active) if job is not None else State("GONE", False)

    def wait_for(self, what: str, condition: Callable[[], bool], timeout: float = 300.0) -> None:
        """Until the condition holds; the job must not end before."""
        deadline, asked = time.monotonic() + timeout, -math.inf
        while not condition():
            if time.monotonic() > asked + 2.0:  # seldom: what is waited for may be over in a tenth of a second
                asked, state = time.monotonic(), self.state()
                assert state.active, f"{what}: {state.name}\n{self.log()}"
                assert asked < deadline, f"{what}: waited {timeout} s ({state.name})\n{self.log()}"
            time.sleep(0.02)

    def wait_until_ended(self, state: str = "COMPLETED", timeout: float = 240.0) -> None:
        """Until the job is over, with this state."""
        deadline = time.monotonic() + timeout
        while (now := self.state()).active:
            assert time.monotonic() < deadline, f"waited {timeout} s ({now.name})\n{self.log()}"
            time.sleep(0.2)
        assert now.name == state, f"{now.name}\n{self.log()}"

    def log(self, last: int = 4000) -> str:
        """What the job said; the last characters of it, 0 for all."""
        texts = [path.read_text() for path in sorted(self.run_dir.glob("jobs/*/*_log.out"))]
        return "\n".join(texts)[-last:]

    def attempt_logs(self, last: int = 3000) -> str:
        """What srun and the ranks said in each attempt; the last characters of each."""
        logs = sorted(self.run_dir.glob("attempts/*/*.log"))
        return "\n".join(f"{path.relative_to(self.run_dir)}:\n{path.read_text()[-last:]}" for path in logs)

    def attempts(self) -> list[dict[str, Any]]:
        """attempt.json of each start."""
        return [json.loads(path.read_text()) for path in sorted(self.run_dir.glob("attempts/*/attempt.json"))]

    def last_step(self) -> int:
        """The newest logged step, -1 for none."""
        return harness.last_step(self.run_dir)

    def groups(self) -> int:
        """Finished groups in all journals that are there."""
        rollouts = self.run_dir / "rollouts"
        folders = list(rollouts.iterdir()) if rollouts.is_dir() else []
        return sum(harness.journal_lines(self.run_dir, int(path.name)) for path in folders)

    def workers(self) -> dict[int, int]:
        """Process ids of the ranks that run now, by rank."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                if path.name.isdigit() and b"gspo_hpc.training.worker" in words and str(self.run_dir).encode() in words:
                    variables = (path / "environ").read_bytes().split(b"\0")
                    rank = next(v for v in variables if v.startswith(b"SLURM_PROCID="))
                    if not words[0].endswith(b"srun"):
                        found[int(rank.split(b"=")[1])] = int(path.name)
            except (OSError, StopIteration):
                continue
        return found

    def processes(self, word: str) -> list[int]:
        """Process ids of this run's processes with this word on their command line, as a name or as a path's end."""
        return [pid for pid, text in processes_of(self.run_dir) if any(w.endswith(word) for w in text.split())]

    def supervisor(self) -> int:
        """Process id of the supervisor that runs now."""
        (found,) = self.processes("gspo_hpc.launch.slurm.supervisor")
        return found

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """A signal to one rank."""
        os.kill(self.workers()[rank], number)


def final_state(run: SlurmRun) -> dict[str, str]:
    """Hashes of all shards of the newest checkpoint: weights and optimizer, bit for bit."""
    newest = commit.list_committed(run.run_dir / "checkpoints")[-1]
    assert commit.verify(newest) == []
    files = json.loads((newest / commit.MANIFEST).read_text())["files"]
    shards = {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}
    assert shards, files
    return shards | {"checkpoint": newest.name}


def engine_cores(run: SlurmRun) -> list[int]:
    """Process ids of the engines."""
    return [pid for pid, text in processes_of(run.run_dir) if "gspo_hpc.engine.host" in text]


def processes_of(run_dir: Path) -> list[tuple[int, str]]:
    """Process id and command line of all processes that belong to a run."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and path.name != str(os.getpid()):
            try:
                words = (path / "cmdline").read_bytes()
                text = words + (path / "environ").read_bytes()
            except OSError:
                continue
            if str(run_dir).encode() in text:
                found.append((int(path.name), words.replace(b"\0", b" ").decode("utf-8", "replace")))
    return found
