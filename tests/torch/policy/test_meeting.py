"""How long ranks wait for one that starts late, on a node that fetches an image or imports from a slow disk."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gspo_hpc.policy import process_groups


class Late:
    """The connection of a rank to its watcher, before rank 0 has come."""

    host = "127.0.0.1"

    def __init__(self, rank: int) -> None:
        self.rank, self.waited = rank, 0.0

    def publish_store(self, port: int) -> None:
        """Nobody asks."""

    def wait_for_store(self, timeout: float) -> tuple[str, int]:
        """Rank 0 never comes."""
        self.waited = timeout
        raise TimeoutError


def test_who_waits_for_a_late_rank_waits_as_long_as_in_any_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself waits five minutes for the keys of a store, and a rank used to wait one minute for rank 0."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    limit = timedelta(minutes=30)
    assert process_groups._rendezvous(Late(0), limit)["store"].timeout == limit
    second = Late(1)
    with pytest.raises(TimeoutError):
        process_groups._rendezvous(second, limit)
    assert second.waited == limit.total_seconds()
