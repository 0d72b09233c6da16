"""The part of a checkpoint that is not the policy's: where the run stands, the rollout in use, the step's record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.data.records import Group
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.runs.directory import write_atomically

CURSOR, ROLLOUT, RECORD = "cursor.json", "rollout.jsonl", "record.json"  # files of a checkpoint


@dataclass(frozen=True)
class CheckpointState:
    """The state that a resumed attempt needs besides weights, optimizer and schedule."""

    cursor: Cursor
    groups: Sequence[Group]  # of the rollout that is not used up
    record: dict[str, Any] | None  # of the checkpoint's step, which is not logged yet when it is saved

    def write(self, staging: Path) -> None:
        """Write the three files into a checkpoint that is not committed yet."""
        write_atomically(staging / CURSOR, json.dumps(self.cursor.to_dict(), indent=1))
        write_atomically(staging / ROLLOUT, "".join(group.to_json() + "\n" for group in self.groups))
        write_atomically(staging / RECORD, json.dumps(self.record))

    @classmethod
    def read(cls, checkpoint: Path) -> CheckpointState:
        """Return the state of a committed checkpoint."""
        cursor = Cursor.from_dict(json.loads((checkpoint / CURSOR).read_text("utf-8")))
        lines = (checkpoint / ROLLOUT).read_text("utf-8").splitlines()
        record = json.loads((checkpoint / RECORD).read_text("utf-8"))
        return cls(cursor, [Group.from_json(line) for line in lines], record)
