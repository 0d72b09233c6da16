"""Where a run stands: one small record, saved with every checkpoint.

Floor 1. `update` counts the optimizer steps already made with rollout number `rollout`. While it is 0 the rollout does
not exist yet and `position` is where its prompts begin; otherwise `position` is where the next rollout's begin.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Cursor:
    """What comes next."""

    step: int = 0  # optimizer steps done
    rollout: int = 0
    update: int = 0
    epoch: int = 0  # of the prompt stream
    offset: int = 0  # prompts of that epoch already taken
    skipped_in_a_row: int = 0  # steps whose gradient was not finite
    completion_tokens: int = 0  # sampled and trained on so far

    def stepped(self, updates_per_rollout: int, *, epoch: int, offset: int, skipped: bool, tokens: int) -> Cursor:
        """After one optimizer step; `epoch` and `offset` are where the next rollout's prompts begin."""
        last = self.update + 1 == updates_per_rollout
        return replace(
            self,
            step=self.step + 1,
            rollout=self.rollout + int(last),
            update=0 if last else self.update + 1,
            epoch=epoch,
            offset=offset,
            skipped_in_a_row=self.skipped_in_a_row + 1 if skipped else 0,
            completion_tokens=self.completion_tokens + tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Cursor:
        """The cursor that :meth:`to_dict` gave."""
        return cls(**{key: int(value) for key, value in raw.items()})
