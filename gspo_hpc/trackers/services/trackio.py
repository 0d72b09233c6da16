"""Trackio as a tracker: its database on this machine, which `trackio show` and `trackio sync` read.

Records go straight into the database: trackio's own run holds them back for a while, where a kill would lose them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from gspo_hpc.system.files import plain
from gspo_hpc.system.terminal import program
from gspo_hpc.trackers.protocol import Record, Sent, TrackedRun


class Trackio:
    """A run of a project. All records of a call are one transaction, and each has an id that is taken once."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        SQLiteStorage.validate_project_name(project)
        self._project, self._run = project, run
        last = SQLiteStorage.get_last_step(project, run=run.name, run_id=run.id)
        self.sent = Sent(-1 if last is None else int(last))
        self.place = f"Trackio: {program('trackio')} show --project {shlex.quote(project)}"

    def log(self, records: Sequence[Record]) -> None:
        """Add a row for each record."""
        SQLiteStorage.bulk_log(
            self._project,
            self._run.name,
            [record.curves for record in records],
            steps=[record.step for record in records],
            timestamps=[datetime.fromtimestamp(record.time, UTC).isoformat() for record in records],
            config=plain(self._run.config),
            log_ids=[f"{self._run.id}-{record.step}" for record in records],
            run_id=self._run.id,
        )

    def close(self, exit_code: int) -> None:
        """Do nothing: every record is in the database."""
