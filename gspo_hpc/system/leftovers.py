"""Find and remove what a killed process leaves on its node: semaphores, shared memory, temporary files.

Linux only. A process that is killed together with multiprocessing's resource tracker unlinks nothing, and the names
that Python and vLLM choose are random. Here they begin with a tag of the run and the attempt, so that the next start on
the node, or the guard of this one, removes what is left and touches nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing import process, shared_memory
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_LONGEST = 50  # characters of the folder for temporary files: vLLM's sockets in it have paths of 107 at most


def claim(mark: str) -> None:
    """Give this process's semaphores and shared memory names that begin with the tag of a mark (processes.py)."""
    process.current_process()._config["semprefix"] = f"/{_tag(mark)}-"  # type: ignore[attr-defined]  # inherited by children
    shared_memory._SHM_NAME_PREFIX = f"/{_tag(mark)}"  # type: ignore[attr-defined]


@contextlib.contextmanager
def temporary_folder(mark: str) -> Iterator[None]:
    """Make a folder for all temporary files of this process and its children; remove it at the end."""
    before = tempfile.gettempdir()
    if len(before) > _LONGEST:
        yield
        return
    path = tempfile.mkdtemp(prefix=f"{_tag(mark)}-")
    # A cache that a later start may use again stays where it was.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(before) / f"torchinductor_{os.getuid()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = path
    try:
        yield
    finally:
        os.environ["TMPDIR"] = tempfile.tempdir = before
        shutil.rmtree(path, ignore_errors=True)


def sweep(run_id: str, attempts: Iterable[int]) -> None:
    """Remove what the processes of these attempts, which must be over, left on this node."""
    tags = {_tag(f"{run_id}:{attempt}") for attempt in attempts}
    for folder in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name.removeprefix("sem.")[:9] not in tags:
                continue
            with contextlib.suppress(OSError):  # another process has removed it
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def _tag(mark: str) -> str:
    """Return nine characters; the name of a shared memory has no room for more."""
    return f"g{hashlib.sha256(mark.encode()).hexdigest()[:8]}"
