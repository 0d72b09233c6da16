"""Numbers beside its weights by which a model computes, as engine and trainer say them to be held against each other.

Log-probs of a few tokens may hide a wrong one: a small random model hardly looks where its keys stand. So these are
compared by value: the inverse frequencies of rotary embeddings, the scale of attention, and the like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from gspo_hpc.data.records import Floats
from gspo_hpc.models.parts import Rope

_MOST_POSITIONS = 1 << 15  # behind it float32 no longer knows the angles of the fastest turn


@dataclass(frozen=True)
class Constants:
    """The trainer's constants."""

    rope: Rope
    max_position_embeddings: int
    inverse_frequencies: tuple[float, ...]  # of rotary embeddings, in radians per token; half as many as a head rotates
    head_dim: int
    attention_scale: float  # that products of queries and keys are multiplied by
    norm_eps: float

    def values(self) -> dict[str, Any]:
        """Return them as plain values."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Constants:
        """Return what :meth:`values` gave."""
        rope, frequencies = Rope(**values["rope"]), tuple(values["inverse_frequencies"])
        return cls(**{**values, "rope": rope, "inverse_frequencies": frequencies})


def some_rows(table: torch.Tensor) -> tuple[int, bytes, float]:
    """Return rows 1, 2, 4, 8, ... of a table of rotary embeddings [positions, size]: how many, and as float32.

    The third number is the step of the table's type at 1.
    """
    last = min(len(table) - 1, _MOST_POSITIONS)
    places = [1 << power for power in range(max(last, 0).bit_length())]
    rows = table[torch.tensor(places, dtype=torch.long, device=table.device)]
    return len(places), rows.float().cpu().numpy().tobytes(), torch.finfo(table.dtype).eps


@dataclass(frozen=True)
class Turns:
    """The rotary embeddings that a table holds."""

    inverse_frequencies: Floats  # [size / 2], in radians per token
    magnitude: float  # that queries and keys are multiplied by
    is_regular: bool  # False for a table that does not hold cosines and sines of angles
    last_position: int  # at which angles were read
    error: float  # of an angle, at most, by the table's type

    def are(self, inverse_frequencies: Floats) -> bool:
        """Return True if these inverse frequencies [size / 2] give the same angles up to the last position."""
        ours, theirs = inverse_frequencies.astype(np.float64), self.inverse_frequencies.astype(np.float64)
        if ours.shape != theirs.shape:
            return False
        allowed = self.error + 2.0**-18 * self.last_position * np.maximum(ours, theirs)
        return bool((np.abs(ours - theirs) * self.last_position <= allowed).all())


def turns_of(rows: tuple[int, bytes, float]) -> Turns | None:
    """Return what :func:`some_rows` took from a table of cosines, then sines; None for a table without rows."""
    count, values, step = rows
    if count == 0:
        return None
    table = np.frombuffer(values, np.float32).astype(np.float64).reshape(count, 2, -1)
    lengths, angles = np.hypot(table[:, 0], table[:, 1]), np.arctan2(table[:, 1], table[:, 0])
    magnitude, error = float(lengths.mean()), 4.0 * max(step, 2.0**-20)
    regular = bool(np.isfinite(table).all()) and bool((np.abs(lengths - magnitude) <= error * magnitude).all())
    inverse = angles[0]
    for place, angle in enumerate(angles[1:], 1):  # twice as far, so half a turn more or less is known
        position = 1 << place
        inverse = (angle + 2 * np.pi * np.round((position * inverse - angle) / (2 * np.pi))) / position
    return Turns(inverse.astype(np.float32), magnitude, regular, 1 << (count - 1), error)
