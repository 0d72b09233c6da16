"""The processes of a vLLM engine, as their owner handles them: start, find, watch, kill, and call into them.

Only :mod:`gspo_hpc.engine.engine` uses this module.
"""

from __future__ import annotations

import contextlib
import multiprocessing.resource_tracker
import os
import queue
import secrets
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from gspo_hpc.system.environment import ENGINE, ENGINE_OWNER
from gspo_hpc.system.text import tail

START_SECONDS = 1800.0  # time limit of a start: processes, imports, and weights from a slow file system
_EXCERPT = 2**18  # bytes of the log: a traceback of every process of an engine, and more
# Variables that the launcher set for the trainer's own process group. vLLM makes its own group.
_NOT_FOR_CHILDREN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "VLLM_CPU_KVCACHE_SPACE",  # would override what is given by argument
)


class Processes:
    """The processes that one start of an engine made."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self._members: list[psutil.Process] = []
        self._output: tuple[Path, int] | None = None  # the file they write to, and where their part begins

    @contextlib.contextmanager
    def starting(self, values: Mapping[str, str], log_path: Path | None) -> Iterator[None]:
        """Have the block start its child processes with these variables, our mark, and their output in `log_path`."""
        multiprocessing.resource_tracker.ensure_running()  # before the mark is set: it is this process's own
        before = dict(os.environ)
        kept: list[int] = []
        try:
            for name in _NOT_FOR_CHILDREN:
                os.environ.pop(name, None)
            os.environ.update(values, **{ENGINE: self._token, ENGINE_OWNER: str(os.getpid())})
            if log_path is not None:
                sys.stdout.flush()
                sys.stderr.flush()
                kept = [os.dup(1), os.dup(2)]
                log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
            self._output = _file_behind(2)
            yield
        finally:
            if kept:
                sys.stdout.flush()
                sys.stderr.flush()
                for target, saved in zip((1, 2), kept, strict=True):
                    os.dup2(saved, target)
                    os.close(saved)
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)

    def excerpt(self) -> str:
        """Return the end of their log (this process may write to it too); an empty text where it is no file."""
        if self._output is None:
            return ""
        path, begin = self._output
        with contextlib.suppress(OSError):
            return tail(path, _EXCERPT, begin)
        return ""

    def find(self) -> None:
        """Find the core and the workers, once the engine is up.

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

        self._members = [process for process in marked if belongs(process.pid)]

    def pids(self) -> list[int]:
        """Return the process ids of the core and the workers that are alive."""
        return [process.pid for process in self._members if _alive(process)]

    def gone(self) -> int | None:
        """Return the id of a process that :meth:`find` found and that has ended since; None if all are alive."""
        return next((process.pid for process in self._members if not _alive(process)), None)

    def terminate(self, seconds: float) -> None:
        """Send SIGTERM to all of them, and wait at most `seconds` for their end."""
        for process in self._members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(self._members, timeout=seconds)

    def kill(self) -> None:
        """Send SIGKILL to all of them, and wait until they are gone."""
        marked = self._marked()
        for process in marked:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(marked, timeout=10)

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            # Gone, a zombie, or another user's: not one of ours, or nothing to be done about.
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(ENGINE) == self._token:
                    found.append(process)
        return found


class Caller:
    """One thread that makes all calls into vLLM, so that a call that never returns can be left behind.

    The thread has to live as long as the engine: the engine's processes die with the thread that started them.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `function` in the thread, after all earlier calls, and return its future."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """End the thread after the calls that are queued, without waiting for it."""
        self._calls.put(None)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, function, args = entry
            try:
                future.set_result(function(*args))
            except BaseException as error:  # raised where the future is waited for
                future.set_exception(error)
            del entry, future, function, args  # an idle thread must not keep the engine's objects


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
