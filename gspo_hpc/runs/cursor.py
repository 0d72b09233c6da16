"""The cursor: a small record of how far a run has got, saved with every checkpoint.

`update` counts the optimizer steps already made with rollout number `rollout`. While it is 0, that rollout does not
exist yet, and `epoch` and `offset` are where its prompts begin; otherwise they are where the next rollout's begin.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Cursor:
    """The position of a run between two optimizer steps."""

    step: int = 0  # optimizer steps done
    rollout: int = 0
    update: int = 0
    epoch: int = 0  # of the prompt stream
    offset: int = 0  # prompts of that epoch already taken
    skipped_in_a_row: int = 0  # steps whose gradient was not finite
    completion_tokens: int = 0  # sampled and trained on so far

    def stepped(self, updates_per_rollout: int, *, epoch: int, offset: int, skipped: bool, tokens: int) -> Cursor:
        """Return the cursor after one more step; `epoch` and `offset` are where the next rollout's prompts begin."""
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
        """Return the cursor as plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Cursor:
        """Return the cursor that :meth:`to_dict` wrote."""
        return cls(**{key: int(value) for key, value in raw.items()})
