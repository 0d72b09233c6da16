"""The sandbox of a config: it finds out what confines programs here, and runs them there and nowhere else."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from gspo_hpc.config.schema import Sandbox as Settings
from gspo_hpc.sandbox import kernel
from gspo_hpc.sandbox.jails import SYSTEM, Job
from gspo_hpc.sandbox.outcomes import KINDS, Kind, Limits, Outcome, SandboxError
from gspo_hpc.system import environment
from gspo_hpc.system.text import GIB, MIB

_GRACE = 30.0  # seconds that a supervisor may take beyond the program's own, before it is given up
_TRIAL_SECONDS = 20.0

# What a rung must refuse before it is used. It gets a file of another folder, and a port that somebody listens on.
_TRIAL = """
import os, socket, sys

word, secret, port = sys.stdin.read().split("\\n")
allowed = []


def attempt(what, call):
    try:
        call()
    except OSError:
        return
    allowed.append(what)


attempt("reads files of others", lambda: open(secret).read())
attempt("writes to files of others", lambda: open(secret, "r+"))
attempt("writes beside files of others", lambda: open(secret + ".new", "x"))
attempt("connects to this machine", lambda: socket.create_connection(("127.0.0.1", int(port)), 2.0))
attempt("sees other processes", lambda: os.listdir(f"/proc/{os.getppid()}/fd"))
with open("own", "w") as file:
    file.write(word)
print(word, *allowed, sep="\\n")
"""


class Sandbox:
    """The sandbox that settings describe. What confines programs is found out at the first use, and kept."""

    def __init__(self, settings: Settings | None = None) -> None:
        """Take the settings; nothing is started."""
        self.settings = settings or Settings()

    @property
    def kind(self) -> Kind:
        """The rung that programs run on. Raises SandboxError where none can be used, with the reasons."""
        return chosen(self.settings)

    def require(self) -> None:
        """Raise SandboxError, with the reasons, where no program can be run."""
        chosen(self.settings)

    def run(self, program: str, stdin: str = "", *, seconds: float | None = None) -> Outcome:
        """Run a program of Python; return what it did.

        `seconds` shortens the time that the settings give it. Raises SandboxError where it could not be run, or not to
        its end, for a reason of the sandbox's.
        """
        limits = _limits(self.settings)
        if seconds is not None:
            limits = replace(limits, seconds=min(limits.seconds, seconds))
        return _run_on(self.kind, self.settings, program, stdin, limits)


def chosen(settings: Settings) -> Kind:
    """Return the first rung that works here, or the one that the settings name. Raises SandboxError with reasons."""
    wanted = KINDS if settings.kind == "auto" else (settings.kind,)
    found = dict(zip(wanted, tried(settings, wanted), strict=False))
    for kind, why in found.items():
        if not why:
            return kind  # type: ignore[return-value]
    reasons = "; ".join(f"{kind}: {why}" for kind, why in found.items())
    raise SandboxError(f"no sandbox can be used here, so no program is run ({reasons})")


def tried(settings: Settings, kinds: Iterable[str] = KINDS) -> Iterator[str]:
    """Yield for each of these rungs why it cannot be used on this machine; an empty text where it can."""
    for kind in kinds:
        yield obstacle(kind, settings)


@cache
def obstacle(kind: str, settings: Settings) -> str:
    """Return why a rung cannot be used on this machine, by a trial of it; an empty text where it can.

    A service need only run the trial: what it must refuse lies on this machine.
    """
    try:
        with _bait() as (stdin, word):
            limits = replace(_limits(Settings()), seconds=_TRIAL_SECONDS, cpu_seconds=_TRIAL_SECONDS)
            done = _run_on(kind, settings, _TRIAL, stdin, limits)
    except (SandboxError, OSError) as error:
        return str(error)
    told = done.stdout.split("\n")
    if not done.ended_well or told[0] != word:
        last = done.stderr.strip().rpartition("\n")[2]
        return f"a program cannot be run in it: {last or done.limit or f'exit status {done.status}'}"
    allowed = told[1:-1] if kind != "http" else []
    return f"a program in it {', '.join(allowed)}" if allowed else ""


@contextlib.contextmanager
def _bait() -> Iterator[tuple[str, str]]:
    """Make what a program must not reach; yield the standard input of the trial, and the word in it."""
    word = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="gspo-trial-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        yield f"{word}\n{secret}\n{server.getsockname()[1]}", word


def _limits(settings: Settings) -> Limits:
    return Limits(
        seconds=settings.seconds,
        cpu_seconds=settings.cpu_seconds,
        memory_bytes=int(settings.memory_gb * GIB),
        processes=settings.processes,
        file_bytes=int(settings.file_mb * MIB),
        disk_bytes=int(settings.disk_mb * MIB),
        output_bytes=int(settings.output_kb * 1024),
    )


def _run_on(kind: str, settings: Settings, program: str, stdin: str, limits: Limits) -> Outcome:
    """Run a program on a rung, which need not have been tried. Raises SandboxError."""
    # What a model writes may hold halves of characters, which no file takes.
    program, stdin = (text.encode("utf-8", "replace").decode() for text in (program, stdin))
    if kind == "http":
        if settings.url is None:
            raise SandboxError("sandbox.url is not set")
        from gspo_hpc.sandbox import service  # only here: most runs need no client of HTTP

        return service.run(settings.url, program, stdin, limits)
    return _supervised(_job(kind, settings, program, stdin, limits))


def _job(kind: str, settings: Settings, program: str, stdin: str, limits: Limits) -> Job:
    """Return the job for the supervisor. Raises SandboxError where the rung is not there."""
    if kind == "apptainer":
        command = shutil.which("apptainer") or shutil.which("singularity")
        if command is None:
            raise SandboxError("there is no apptainer on PATH")
        if settings.image is None:
            raise SandboxError("sandbox.image is not set")
        image = os.path.abspath(settings.image)
        if not os.path.exists(image):
            raise SandboxError(f"there is no image {image}")
        python = settings.python or "python3"
        return Job(kind, program, stdin, limits, python, tempfile.gettempdir(), command, image=image)
    command = shutil.which("bwrap") or ""
    if kind == "bubblewrap" and not command:
        raise SandboxError("there is no bwrap on PATH")
    if kind == "landlock" and not kernel.landlock_version():
        raise SandboxError("the kernel has no Landlock (Linux 5.13 or newer, with lsm=landlock)")
    python = settings.python or sys.executable
    # Libraries of modules and of Python itself may lie in any folder, which sandbox.readable names.
    libraries = os.environ.get("LD_LIBRARY_PATH")
    variables = {"LD_LIBRARY_PATH": libraries} if libraries else {}
    readable = (*_folders_of(python), *settings.readable)
    if wide := [path for path in (*SYSTEM, *readable) if _is_too_wide(path)]:
        raise SandboxError(f"programs would read {wide[0]}, which holds the home or the current folder")
    temporary = tempfile.gettempdir()
    return Job(kind, program, stdin, limits, python, temporary, command, readable, variables=variables)


@cache
def _folders_of(python: str) -> tuple[str, ...]:
    """Return the folders that an interpreter and its packages lie in. Raises SandboxError where it does not start."""
    if python == sys.executable:
        found = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    else:
        line = "import sys; print(sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, sep='\\n')"
        try:
            done = subprocess.run([python, "-P", "-s", "-c", line], capture_output=True, text=True, timeout=60.0)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"sandbox.python {python} does not start: {error}") from None
        found = done.stdout.split("\n")[:4]
        if done.returncode or len(found) < 4:
            raise SandboxError(f"sandbox.python {python} does not start: {done.stderr.strip()[-200:]}")
    return tuple(dict.fromkeys(path for one in found for path in (one, os.path.realpath(one))))


def _is_too_wide(path: str) -> bool:
    """Tell whether a folder holds the home or the current folder, and so perhaps secrets and the run."""
    kept = {os.path.realpath(one) for one in (os.path.expanduser("~"), os.getcwd())}
    return any(os.path.commonpath([os.path.realpath(path), one]) == os.path.realpath(path) for one in kept)


def _supervised(job: Job) -> Outcome:
    """Have a supervisor run a job; return what the program did. Raises SandboxError."""
    names = ("PATH", "LD_LIBRARY_PATH")  # and nothing else: the environment may hold secrets
    variables = {name: os.environ[name] for name in names if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-P", "-S", "-m", "gspo_hpc.sandbox.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**variables, "PYTHONPATH": str(environment.import_root())},
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    deadline = time.monotonic() + job.limits.seconds + _GRACE
    told = b""
    try:
        process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        process.stdin.flush()  # and it stays open: at its end the supervisor gives up
        while time.monotonic() < deadline:
            if select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (more := os.read(process.stdout.fileno(), 1 << 20)):
                    break
                told += more
    except BrokenPipeError:
        pass
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        process.kill()
        process.wait()
        said = process.stderr.read() if process.returncode else b""
        process.stdout.close()
        process.stderr.close()
    try:
        answer = json.loads(told)
    except ValueError:
        last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise SandboxError(
            f"the supervisor of a program gave no answer (exit status {process.returncode}) {last}"
        ) from None
    if "error" in answer:
        raise SandboxError(answer["error"])
    return Outcome(**answer)
