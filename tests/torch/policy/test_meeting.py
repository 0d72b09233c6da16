"""How long ranks wait for one that starts late, on a node that fetches an image or imports from a slow disk."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from gspo_hpc.policy import process_groups


class Late:
    """The connection of a rank to its watcher, before rank 0 has come."""

    host = "127.0.0.1"

    def __init__(self, rank: int) -> None:
        self.rank, self.waited = rank, 0.0

    def publish_store(self, port: int, secret: str) -> None:
        """Keep what the others would get."""
        self.published = port, secret

    def wait_for_store(self, timeout: float) -> tuple[str, int, str]:
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


class Met(Late):
    """The connection of a rank that comes after rank 0."""

    def __init__(self, rank: int, first: Late) -> None:
        super().__init__(rank)
        self._first = first

    def wait_for_store(self, timeout: float) -> tuple[str, int, str]:
        """Rank 0 has come."""
        return self.host, *self._first.published


def test_a_process_of_another_job_that_finds_the_store_meets_no_key_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports are used again, and every job of torch has the same names of keys."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    limit = timedelta(seconds=20)
    first = Late(0)
    ours = process_groups._rendezvous(first, limit)["store"]
    second = process_groups._rendezvous(Met(1, first), limit)["store"]
    port, secret = first.published
    stranger = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
    stranger.set("notices/1", "stop")
    assert not ours.check(["notices/1"])
    ours.set("notices/1", "go on")
    assert second.get("notices/1") == b"go on" and stranger.get("notices/1") == b"stop"
    others = Late(0)
    process_groups._rendezvous(others, limit)
    assert len(secret) == 32 and others.published[1] != secret


def test_rank_0_of_a_launcher_listens_at_the_socket_that_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is taken already: to listen there once more is an error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, descriptor = server.getsockname()[1], os.dup(server.fileno())
        os.set_inheritable(descriptor, True)
        places = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in {**places, "GSPO_HPC_STORE": str(descriptor)}.items():
            monkeypatch.setenv(name, value)
        limit = timedelta(seconds=20)
        first = process_groups._rendezvous(None, limit)["store"]
    assert "GSPO_HPC_STORE" not in os.environ and not os.get_inheritable(descriptor)
    monkeypatch.setenv("RANK", "1")
    second = process_groups._rendezvous(None, limit)["store"]
    first.set("place", "0")
    assert second.get("place") == b"0"
