"""The channel between ranks and their watcher: over real sockets, with strangers on the line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from gspo_hpc.system.control import Client, Server
from gspo_hpc.system.environment import CONTROL, CONTROL_TOKEN
from gspo_hpc.system.progress import mark


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server("127.0.0.1", 2)
    yield one
    one.close()


def client(server: Server, rank: int = 0, **more: Callable[..., object]) -> Client:
    options: dict[str, Callable[..., object]] = {"on_stop": lambda reason: None, "signal_name": lambda: None} | more
    environment = server.environment()
    return Client(environment[CONTROL], environment[CONTROL_TOKEN], rank, 2, node=f"n{rank}", **options)


def until(server: Server, condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        server.poll(0.05)


def test_a_rank_is_known_by_node_and_process(server: Server) -> None:
    client(server, 1)
    until(server, lambda: 1 in server.ranks)
    state = server.ranks[1]
    assert (state.node, state.pid, state.outcome, state.lost) == ("n1", os.getpid(), None, False)


def test_marks_move_a_rank_and_beats_alone_do_not(server: Server) -> None:
    client(server)
    until(server, lambda: 0 in server.ranks)
    mark("update")
    until(server, lambda: server.ranks[0].phase == "update")
    moved, heard = server.ranks[0].moved_at, server.ranks[0].heard_at
    until(server, lambda: server.ranks[0].heard_at > heard)
    assert server.ranks[0].moved_at == moved
    mark("update")
    until(server, lambda: server.ranks[0].moved_at > moved)


def test_a_stop_reaches_all_ranks_also_one_that_comes_later(server: Server) -> None:
    stops: list[tuple[int, str]] = []
    first = client(server, 0, on_stop=lambda reason: stops.append((0, reason)))
    until(server, lambda: 0 in server.ranks)
    server.stop("preempted", 1234.5)
    second = client(server, 1, on_stop=lambda reason: stops.append((1, reason)))
    until(server, lambda: len(stops) == 2)
    assert sorted(stops) == [(0, "preempted"), (1, "preempted")]
    assert first.deadline == second.deadline == 1234.5


def test_a_signal_that_one_rank_got_is_told_at_once(server: Server) -> None:
    signals: list[str] = []
    client(server, 1, signal_name=lambda: signals[0] if signals else None)
    until(server, lambda: 1 in server.ranks)
    began = time.monotonic()
    signals.append("SIGUSR2")
    until(server, lambda: server.ranks[1].signal == "SIGUSR2")
    assert time.monotonic() - began < 5.0


def test_ranks_meet_where_rank_0_says(server: Server) -> None:
    first, second = client(server, 0), client(server, 1)
    with pytest.raises(TimeoutError, match="rank 0"):
        second.wait_for_store(0.2)
    first.publish_store(4321, "prefix")
    until(server, lambda: second._received.store is not None)
    assert second.wait_for_store(5.0) == ("127.0.0.1", 4321, "prefix")


def test_an_outcome_is_kept_and_a_killed_rank_is_lost(server: Server) -> None:
    one = client(server, 0)
    until(server, lambda: 0 in server.ranks)
    one.finish("failed", "ValueError: x")
    until(server, lambda: server.ranks[0].outcome == "failed")
    assert server.ranks[0].detail == "ValueError: x"
    code = (
        "import os, signal; from gspo_hpc.system.control import *; "
        "address, token = os.environ[CONTROL], os.environ[CONTROL_TOKEN]; "
        "Client(address, token, 1, 2, node='n', on_stop=print, signal_name=lambda: None); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | server.environment(), check=False)
    until(server, lambda: 1 in server.ranks and server.ranks[1].lost)
    assert server.ranks[1].outcome is None


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token": "guess", "rank": 0, "node": "x", "pid": 1, "step": ""}\n',
        b"[]\n",
        b"null\n",
        b'{"rank": 0}\n',
        b"[" * 3000 + b"]" * 3000 + b"\n",
        b'{"token": NaN, "rank": Infinity}\n',
        b"\xff" * 200_000,
    ],
)
def test_strangers_are_not_let_in_and_disturb_nobody(server: Server, said: bytes) -> None:
    known = client(server, 0)
    until(server, lambda: 0 in server.ranks)
    with socket.create_connection((server.host, server.port)) as stranger:
        stranger.settimeout(0.05)
        ended = False

        def dropped() -> bool:
            nonlocal said, ended
            try:
                if said:
                    said = said[stranger.send(said) :]
                ended = stranger.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                ended = True
            return ended

        until(server, dropped)
    known.finish("done")
    until(server, lambda: server.ranks[0].outcome == "done")
    assert list(server.ranks) == [0]


def test_a_rank_without_its_watcher_stops() -> None:
    server = Server("127.0.0.1", 1)
    stops: list[str] = []
    client(server, 0, on_stop=stops.append)
    until(server, lambda: 0 in server.ranks)
    server.close()
    deadline = time.monotonic() + 10.0
    while not stops:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert stops == ["the watching process is gone"]
