"""How long a rank waits in a collective of a group: for ever, in effect, where somebody else watches it.

It costs nothing. Catches a time limit of half an hour in server mode, where ranks wait for a whole rollout, and under a
supervisor, where a load may take longer.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.engine.processes import START_SECONDS
from gspo_hpc.policy.process_groups import UNWATCHED_MINUTES, WATCHED_MINUTES
from gspo_hpc.training.jobs import train

SERVER = {"rollout": {"mode": "server", "engines_per_node": 1}, "cluster": {"gpus_per_node": 2}}


class Started(Exception):
    """The groups of this rank would be made now."""


@pytest.mark.parametrize(
    ("raw", "rank", "watched", "minutes"),
    [
        ({}, 0, False, UNWATCHED_MINUTES),
        ({}, 0, True, WATCHED_MINUTES),
        (SERVER, 0, False, WATCHED_MINUTES),
        (SERVER, 1, False, WATCHED_MINUTES),
        (SERVER, 1, True, WATCHED_MINUTES),
    ],
)
def test_a_rank_that_is_watched_or_waits_for_rollouts_has_no_short_limit(
    raw: dict[str, Any], rank: int, watched: bool, minutes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []

    def begin(config: Any, patience: float, control: Any) -> None:
        found.append(patience)
        raise Started

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(train.loader, "load", lambda *path, **options: from_dict(raw))
    monkeypatch.setattr(train, "CollectiveTime", lambda platform: None)
    monkeypatch.setattr(train, "start", begin)
    monkeypatch.setattr(train, "start_generating", begin)
    nothing: Any = None
    attempt: Any = type("Attempt", (), {"config": None})
    control: Any = object() if watched else None
    with pytest.raises(Started):
        train.train(nothing, attempt, nothing, nothing, control, nothing)
    assert found == [minutes] and WATCHED_MINUTES > 24 * 60 > UNWATCHED_MINUTES > START_SECONDS / 60 + 10
