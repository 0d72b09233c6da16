"""The part of a checkpoint that is not the policy's: where the run stands, the rollout in use, the step's record."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gspo_hpc.data.records import Group
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.system.files import write_atomically

CURSOR, ROLLOUT, RECORD = "cursor.json", "rollout.jsonl", "record.json"  # files of a checkpoint

T = TypeVar("T")


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
        """Return the state of a committed checkpoint. Raises ValueError, with the file's name, for other content."""
        cursor = _parsed(checkpoint / CURSOR, lambda text: Cursor.from_dict(json.loads(text)))
        groups = _parsed(checkpoint / ROLLOUT, lambda text: [Group.from_json(line) for line in text.splitlines()])
        return cls(cursor, groups, _parsed(checkpoint / RECORD, json.loads))


def _parsed(path: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(path.read_text("utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
