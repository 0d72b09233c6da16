"""Ways to start a program, one for each rung: the command, and what the process does before it runs it.

Standard library only: the supervisor has no packages. What a program may read is the same on every rung: the system's
libraries and programs, the folders of its Python, and those that a setting names.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gspo_hpc.sandbox import kernel, seccomp
from gspo_hpc.sandbox.outcomes import Limits

PROGRAM = "main.py"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/alternatives")
# Not /dev/zero: mapped, it is memory that processes share and that counts for none (seccomp.py).
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_OPTIONS = ("-P", "-s", "-B")  # of Python: nothing of the folder or of the user is imported, and no bytecode written
INSIDE = "/sandbox"  # the program's own folder, where it has a root of its own
_MOST_TASKS = 256  # that a bomb may start before it is ended, where the kernel counts those of a user
FILTER, TEXT, STATUS = 3, 4, 5  # file descriptors that bubblewrap inherits
# Processes and threads that are not the program's.
OVERHEAD = {"bubblewrap": 2, "landlock": 0, "apptainer": 64}


@dataclass(frozen=True)
class Job:
    """A program and how it is to be run. Plain values: it travels as JSON."""

    kind: str
    program: str
    stdin: str
    limits: Limits
    python: str  # the interpreter that runs it; with apptainer, that of the image
    temporary: str  # where its own folder is made
    command: str = ""  # bubblewrap's or apptainer's
    readable: tuple[str, ...] = ()  # folders of the interpreter and of libraries
    image: str = ""  # apptainer's
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, folder: str) -> dict[str, str]:
        """Return the whole environment of the program, whose own folder this is."""
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        fixed = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        # With an arena for each thread, malloc would reserve many times the memory that is used.
        return {**fixed, **dict.fromkeys(threads, "1"), "MALLOC_ARENA_MAX": "1", **self.variables}


def prepare(job: Job, folder: str | None, tasks: int) -> tuple[list[str], dict[str, str]]:
    """Confine this process, as far as the command does not do it; return the command and its environment.

    `folder` is the program's own, except with bubblewrap, and `tasks` the number of those on the machine. Raises
    OSError or ValueError where anything cannot be confined.
    """
    limits = job.limits
    if job.kind != "apptainer":
        kernel.limit(
            memory=limits.memory_bytes,
            cpu_seconds=int(limits.cpu_seconds) + 2,  # what all processes use together is watched
            file_bytes=limits.file_bytes,
            tasks=tasks + _MOST_TASKS,
        )
    if job.kind == "bubblewrap":
        return list(_bubblewrap(job)), {}
    assert folder is not None
    os.chdir(folder)
    if job.kind == "apptainer":
        return list(_apptainer(job, folder)), {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder}
    filtered = seccomp.program(os.uname().machine, os.getpid())
    kernel.drop_privileges()
    kernel.only_these_files((*SYSTEM, *_FILES, *job.readable), _DEVICES, folder)
    kernel.only_these_calls(filtered)
    return [job.python, *_OPTIONS, PROGRAM], job.environment(folder)


def _bubblewrap(job: Job) -> Iterator[str]:
    yield from (job.command, "--unshare-all", "--unshare-user", "--new-session", "--die-with-parent")
    yield from ("--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv")
    for name, value in job.environment(INSIDE).items():
        yield from ("--setenv", name, value)
    for path in SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in (*_FILES, *job.readable):
        yield from ("--ro-bind-try", path, path)
    yield from ("--size", "4096", "--tmpfs", "/dev")
    for path in _DEVICES:
        yield from ("--dev-bind-try", path, path)
    yield from ("--remount-ro", "/dev")
    yield from ("--size", str(job.limits.disk_bytes), "--tmpfs", INSIDE, "--file", str(TEXT), f"{INSIDE}/{PROGRAM}")
    yield from ("--remount-ro", "/", "--chdir", INSIDE)
    yield from ("--seccomp", str(FILTER), "--json-status-fd", str(STATUS), "--")
    yield from (job.python, *_OPTIONS, PROGRAM)


# Runs inside the image, whose Python may be older: it limits itself and loads the filter, before the program.
_STUB = """
import base64, ctypes, os, resource, sys
filtered = base64.b64decode(sys.argv[1])
for name, value in zip(("AS", "CPU", "FSIZE", "CORE"), map(int, sys.argv[2:6])):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(len(filtered) // 8, filtered)), 0, 0):
    sys.exit("sandbox: the kernel refuses the filter of system calls: " + os.strerror(ctypes.get_errno()))
os.execv(sys.executable, [sys.executable, "-s", "-B", sys.argv[6]])
"""


def _apptainer(job: Job, folder: str) -> Iterator[str]:
    limits = job.limits
    yield from (job.command, "--silent", "exec", "--containall", "--cleanenv", "--no-home", "--no-privs")
    yield from ("--net", "--network", "none", "--bind", f"{folder}:{INSIDE}", "--pwd", INSIDE)
    for name, value in job.environment(INSIDE).items():
        yield from ("--env", f"{name}={value}")
    filtered = base64.b64encode(seccomp.program(os.uname().machine, None)).decode()
    yield from (job.image, job.python, "-I", "-c", _STUB, filtered)
    yield from map(str, (limits.memory_bytes, int(limits.cpu_seconds) + 2, limits.file_bytes, 1, PROGRAM))
