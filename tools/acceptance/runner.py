"""Run parts one after the other, each in a process with a time limit, and report after every row.

A part that hangs, dies or misses a bound leaves the others running. All processes that a part has started end with
it: they carry a token in their env, by which they are found. ``python -m tools.acceptance.runner TOKEN`` is the
guard, which ends them if this process is killed: it waits for the end of its standard input.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import REPO
from .environment import Environment
from .registry import Part, missing
from .rows import FAIL, SKIPPED, Row, read, verdict

TOKEN = "GSPO_HPC_ACCEPTANCE"  # in the environment of every process of a part
WAITING, RUNNING = "not run", "running"
_POLL_SECONDS = 0.2
_LEAST_SECONDS = 20.0  # of the time that is left, to start another part


@dataclass(frozen=True)
class Result:
    """A part with its rows so far."""

    part: Part
    verdict: str = WAITING
    reason: str = ""  # of a failure or a skip, one line
    seconds: float = 0.0
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Runner:
    """Run parts in turn. `report` is called with all results after every change."""

    env: Environment
    gpus: int
    report: Callable[[Sequence[Result]], None]
    scale: float = 1.0  # of the time limits
    seconds: float = float("inf")  # for all parts together
    began: float = field(default_factory=time.monotonic)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def run(self, parts: Sequence[Part]) -> list[Result]:
        """Run the parts in turn, and return their results."""
        guard = subprocess.Popen(
            [sys.executable, "-m", "tools.acceptance.runner", self.token],
            cwd=REPO,
            stdin=subprocess.PIPE,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )
        try:
            return self._run_all(parts)
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait()

    def _run_all(self, parts: Sequence[Part]) -> list[Result]:
        results = [Result(part) for part in parts]
        for index, part in enumerate(parts):

            def note(result: Result, index: int = index) -> None:
                if result != results[index]:
                    results[index] = result
                    self.report(results)

            left = self.seconds - (time.monotonic() - self.began)
            if why := self._unmet(part):
                note(Result(part, SKIPPED, why))
            elif left < _LEAST_SECONDS:
                note(Result(part, WAITING, f"only {max(0.0, left):.0f} s were left"))
            else:
                note(self._run(part, min(part.seconds * self.scale, left), note))
        return results

    def _unmet(self, part: Part) -> str:
        """Return why the part cannot be run here, or an empty string."""
        if self.env.cuda and self.gpus < part.gpus:
            return f"it needs {part.gpus} GPUs, and there is {self.gpus}"
        absent = missing(part.packages)
        return f"not installed: {', '.join(absent)}" if absent else ""

    def _run(self, part: Part, limit: float, note: Callable[[Result], None]) -> Result:
        folder = self.env.work / "logs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        results, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
        results.unlink(missing_ok=True)
        began = time.monotonic()
        running = Result(part, RUNNING)
        note(running)
        process = self._start(part, limit, results, log)
        try:
            while process.poll() is None and time.monotonic() - began < limit:
                time.sleep(_POLL_SECONDS)
                note(replace(running, rows=tuple(read(results))))
            hung = process.poll() is None
        finally:
            end(self.token)
            process.wait()
        rows = read(results)
        reason = ""
        if hung:
            reason = f"it ran past its limit of {limit:.0f} s"
        elif process.returncode:
            reason = f"it ended with {_code(process.returncode)}: {_last_line(log)}"
        found = FAIL if reason else verdict(rows)
        return Result(part, found, reason, time.monotonic() - began, tuple(rows))

    def _start(self, part: Part, limit: float, results: Path, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tools.acceptance.child", part.import_path]
        command += [
            "--platform",
            self.env.platform,
            "--work",
            str(self.env.work),
            "--results",
            str(results),
        ]
        command += ["--seconds", f"{limit:.1f}", "--runner", str(os.getpid())]
        # Without SPT_NOENV, setproctitle, which vLLM uses, overwrites the environment that /proc shows.
        own = {TOKEN: self.token, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as stream:
            return subprocess.Popen(
                command,
                cwd=REPO,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def end(token: str, seconds: float = 20.0) -> None:
    """Kill all processes of a part, and wait until they are gone."""
    deadline = time.monotonic() + seconds
    while (left := _processes(token)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes(token: str) -> list[int]:
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):  # it is gone, or belongs to another user
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
    return found


def _code(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "no output")[:300]


def failed(results: Sequence[Result]) -> bool:
    """Return True if a part failed."""
    return any(result.verdict == FAIL for result in results)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1])
