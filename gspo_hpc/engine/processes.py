"""The processes of a vLLM engine, as their owner handles them: start, find, watch and kill them.

Only :mod:`gspo_hpc.engine.client` uses this module.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from gspo_hpc.system.environment import ENGINE, ENGINE_OWNER, importing
from gspo_hpc.system.files import open_log
from gspo_hpc.system.text import tail

START_SECONDS = 1800.0  # time limit of a start: processes, imports, and weights from a slow file system
_EXCERPT = 2**18  # bytes of the log: a traceback of every process of an engine, and more
# Variables of the trainer's own process group, queues and recorder. vLLM makes its own group and overlaps nothing.
_NOT_FOR_CHILDREN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_GLOO_LAZY_INIT",
    "VLLM_CPU_KVCACHE_SPACE",  # would override what is given by argument
)


class Processes:
    """The processes that one start of an engine made."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self._first: subprocess.Popen[bytes] | None = None
        self._members: list[psutil.Process] = []
        self._output: tuple[Path, int] | None = None  # the file they write to, and where their part begins

    def start(self, command: Sequence[str], values: Mapping[str, str], log_path: Path | None, *keep: int) -> None:
        """Start the first process with these variables, our mark, the descriptors to `keep`, and its output in a file.

        It gets a process group of its own: a signal that preempts or interrupts this process's group must not reach it.
        """
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}
        environment |= {**importing(), **values, ENGINE: self._token, ENGINE_OWNER: str(os.getpid())}
        with contextlib.ExitStack() as stack:
            log = None
            if log_path is not None:
                log = open_log(Path(log_path))
                stack.callback(os.close, log)
            self._output = _file_behind(2 if log is None else log)
            self._first = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=keep,
                process_group=0,
            )
        self._members = [psutil.Process(self._first.pid)]

    def excerpt(self) -> str:
        """Return the end of their log (this process may write to it too); an empty text where it is no file."""
        if self._output is None:
            return ""
        path, begin = self._output
        with contextlib.suppress(OSError):
            return tail(path, _EXCERPT, begin)
        return ""

    def find(self) -> None:
        """Find the core and the workers beside the first process, once the engine is up.

        Other processes that these have started, to compile something or to ask the system, may end at any time.
        """
        commands: dict[int, list[str]] = {}
        parents: dict[int, int] = {}
        marked = self._marked()
        for process in marked:
            with contextlib.suppress(psutil.Error):
                commands[process.pid], parents[process.pid] = process.cmdline(), process.ppid()

        def belongs(pid: int) -> bool:
            command = commands.get(pid, [])
            # A fork looks like its parent until it executes something else.
            return any(map(_is_engine, command)) and commands.get(parents[pid]) != command

        assert self._first is not None, "not started"
        first = self._first.pid
        self._members[1:] = [process for process in marked if process.pid != first and belongs(process.pid)]

    def pids(self) -> list[int]:
        """Return the process ids that are alive: of the first process, of the core and the workers."""
        return [process.pid for process in self._members if _alive(process)]

    def gone(self) -> int | None:
        """Return the id of one of them, the first process too, that has ended; None if all are alive."""
        return next((process.pid for process in self._members if not _alive(process)), None)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until all of them have ended by themselves."""
        psutil.wait_procs(self._members, timeout=seconds)

    def wait_first(self, seconds: float) -> int | None:
        """Wait at most `seconds` for the end of the first process, and return its id; None where it goes on."""
        if self._first is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._first.wait(seconds)
            return self._first.pid
        return None

    def kill(self) -> None:
        """Send SIGKILL to all of them, and wait until they are gone."""
        # Also those without a mark: a process that has only begun has none yet, one that is dying has lost it, and a
        # GPU gets its memory back at the very end.
        every = {*self._members, *self._marked()}
        for process in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(every, timeout=10)
        if self._first is not None:
            self._first.poll()  # leave no zombie

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            # Gone, a zombie, or another user's: not one of ours, or nothing to be done about.
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(ENGINE) == self._token:
                    found.append(process)
        return found


def _is_engine(word: str) -> bool:
    """Return True for a word of the command line of a core or a worker, before or after vLLM has set its title."""
    return word.startswith("VLLM::") or "multiprocessing.spawn" in word


def _file_behind(descriptor: int) -> tuple[Path, int] | None:
    """Return the regular file behind `descriptor` and its size in bytes; None for a terminal or a pipe."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")), status.st_size


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
