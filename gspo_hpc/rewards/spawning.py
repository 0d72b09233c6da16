"""The start of the processes of reward functions: new interpreters, which do not import from the current folder.

That may be a run directory or a data set of somebody else, with a pickle.py in it. A process that multiprocessing
spawns inherits -P; the command gspo-hpc itself has none, so what it spawns gets the variable that means the same. The
variable stands in this process's environment only while one is started, or whatever else a user's code starts from
here would have it too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

_VARIABLE = "PYTHONSAFEPATH"
_OURS = "gspo-hpc"  # its text, of which any switches it on, where it was not set before
_starting = threading.Lock()  # for processes of a pool are started by threads


def context() -> SpawnContext:
    """Return multiprocessing's context for such processes; its resource tracker runs then, if it did not before."""
    with _variable_set():
        resource_tracker.ensure_running()
    return _Context()


def begun() -> None:
    """Take out the variable in a process that was started so: what its graders start is as it would be without it."""
    if os.environ.get(_VARIABLE) == _OURS:
        del os.environ[_VARIABLE]


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        with _variable_set():
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]


class _Context(SpawnContext):
    Process = _Process  # type: ignore[assignment]


@contextlib.contextmanager
def _variable_set() -> Iterator[None]:
    with _starting:  # first: another thread's variable is not inherited, and is taken out when that one has started
        if sys.flags.safe_path or _VARIABLE in os.environ:  # inherited
            yield
            return
        os.environ[_VARIABLE] = _OURS
        try:
            yield
        finally:
            os.environ.pop(_VARIABLE, None)
