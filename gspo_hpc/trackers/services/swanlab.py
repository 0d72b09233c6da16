"""SwanLab as a tracker: online, or offline into the folder swanlab/ of the run.

SwanLab keeps each number of a step by itself, so a kill may leave a part of one. Offline, earlier attempts' files say
which numbers are there; online, the server told SwanLab.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab
from swanlab.proto.swanlab.record.v1.record_pb2 import Record as Message
from swanlab.sdk.internal.pkg import console

from gspo_hpc.config.schema import Tracking
from gspo_hpc.system.exit_codes import DONE, REQUEUE
from gspo_hpc.system.files import plain
from gspo_hpc.trackers import compat
from gspo_hpc.trackers.protocol import Record, Sent, TrackedRun
from gspo_hpc.trackers.services import chunked_log

_STATE = {DONE: "success", REQUEUE: "aborted"}
_NOTHING_ELSE = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False)


class Swanlab:
    """A SwanLab run."""

    def __init__(self, tracking: Tracking, run: TrackedRun, online: bool) -> None:
        folder = run.path / "swanlab"
        here = {} if online else _local_steps(folder, run.id)
        console.c.quiet = True  # what it prints would stand between the rows of the console
        hook = sys.excepthook
        settings = swanlab.Settings(
            interactive=False,
            probe=swanlab.Settings.Probe(**_NOTHING_ELSE),  # the address of a git remote may hold a password
            terminal=swanlab.Settings.Terminal(proxy_type="none"),  # what is printed may be completions
        )
        self._run: Any = swanlab.init(
            mode="online" if online else "offline",
            project=tracking.project,
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(folder),
            config=plain(run.config),
            settings=settings,
        )
        sys.excepthook = hook  # a rank's own error is told by the rank
        self.sent = _sent(compat.swanlab_steps(self._run) if online else here)
        self.place = f"SwanLab: {self._run.url}" if online else f"SwanLab offline: {folder}"

    def log(self, records: Sequence[Record]) -> None:
        """Log the numbers of each record."""
        for record in records:
            self._run.log(dict(record.curves), step=record.step)

    def close(self, exit_code: int) -> None:
        """Finish the run, which writes what SwanLab still holds."""
        self._run.finish(state=_STATE.get(exit_code, "crashed"))


def _local_steps(folder: Path, run_id: str) -> dict[str, int]:
    """Return the last step of each number in the files that earlier attempts left."""
    last: dict[str, int] = {}
    for path in folder.glob(f"run-*/run-{run_id}.swanlab"):
        for raw in chunked_log.read(path):
            message = Message.FromString(raw)
            if message.WhichOneof("record_type") == "scalar":
                key, step = message.scalar.key, message.scalar.step
                last[key] = max(step, last.get(key, -1))
    return last


def _sent(steps: Mapping[str, int]) -> Sent:
    """Return the last step, and the numbers that it has: all before it are whole, because they are written in order."""
    last = max(steps.values(), default=-1)
    return Sent(last, frozenset(key for key, step in steps.items() if step == last))
