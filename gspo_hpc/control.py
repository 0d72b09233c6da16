"""How the ranks of an attempt and the process that watches them talk: JSON lines over TCP.

Floor 1. Every rank says who it is, beats while it lives, tells where it is, what signal it got and how it ended; the
watcher tells all of them where to meet and when to stop. A beat carries the number of :func:`mark` calls, which the
main thread makes wherever it gets on with its work: a rank that hangs in a collective still beats, and marks no more.

The listener takes only connections that begin with the token that the watcher gave its ranks in their environment.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ADDRESS, TOKEN = "GSPO_HPC_CONTROL", "GSPO_HPC_CONTROL_TOKEN"  # environment of a rank that is watched
_LINE = 65536  # bytes of a message at most
_BEATS_PER_SECOND = 500.0  # that a watcher is given to read, however many ranks there are

_marks = 0
_phase = "started"


def mark(phase: str) -> None:
    """The main thread has got on: to be called at least once in every piece of work that may take long."""
    global _marks, _phase
    _marks += 1
    _phase = phase


@dataclass
class RankState:
    """What is known of a rank. Times are the watcher's monotonic clock."""

    rank: int
    node: str
    pid: int
    step: str  # Slurm's JOB.STEP, or empty
    heard_at: float
    moved_at: float  # when its marks last grew
    phase: str = "started"
    marks: int = 0
    signal: str | None = None  # the stop signal it got
    outcome: str | None = None  # "done", "stopped", "refused", "failed"
    ended_at: float = 0.0  # when it told its outcome or was lost
    detail: str = ""
    lost: bool = False  # its connection ended before it had told an outcome
    save_seconds: float = 0.0  # what its last checkpoint took


class Server:
    """The watcher's side. One thread: call :meth:`poll` often."""

    def __init__(self, host: str, world_size: int) -> None:
        self._listener = socket.create_server((host, 0), backlog=min(world_size, 4096))
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self._token = secrets.token_hex(16)
        self.world_size = world_size
        self.ranks: dict[int, RankState] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._peers: dict[socket.socket, _Peer] = {}
        self._to_all: dict[str, dict[str, Any]] = {}  # by kind: what a rank that comes later must hear too

    def environment(self) -> dict[str, str]:
        """What a rank needs to find and to be let in by this server."""
        return {ADDRESS: f"{self.host}:{self.port}", TOKEN: self._token}

    def stop(self, reason: str, deadline: float | None) -> None:
        """Ask all ranks to stop; `deadline` (seconds since the epoch): when they will be killed, if that is known."""
        self._broadcast({"stop": reason, "deadline": deadline})

    def poll(self, timeout: float) -> None:
        """Hear what has come, waiting at most `timeout` seconds for the first of it."""
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def close(self) -> None:
        """End all connections."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.buffer += data
        *lines, peer.buffer = peer.buffer.split(b"\n")
        try:
            if len(peer.buffer) > _LINE:
                raise ValueError("a line without end")
            for line in lines:
                self._hear(peer, json.loads(line))
        except (ValueError, KeyError, TypeError):  # not one of ours
            data = b""
        if not data:
            self._drop(peer)

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if peer.rank is None:
            if not hmac.compare_digest(str(message["token"]), self._token):
                raise ValueError("wrong token")
            peer.rank = int(message["rank"])
            state = RankState(peer.rank, str(message["node"]), int(message["pid"]), str(message["step"]), now, now)
            self.ranks[peer.rank] = state
            for told in self._to_all.values():
                self._send(peer, told)
            return
        state = self.ranks[peer.rank]
        state.heard_at = now
        if message.get("marks", state.marks) != state.marks or message.get("phase", state.phase) != state.phase:
            state.moved_at, state.marks, state.phase = now, message["marks"], message["phase"]
        state.signal = message.get("signal", state.signal)
        state.save_seconds = float(message.get("save_seconds", state.save_seconds))
        if "store" in message:
            self._broadcast({"store": [self.host, int(message["store"])]})
        if "outcome" in message:
            state.outcome, state.detail, state.ended_at = str(message["outcome"]), str(message["detail"]), now

    def _broadcast(self, message: dict[str, Any]) -> None:
        self._to_all[next(iter(message))] = message
        for peer in list(self._peers.values()):
            if peer.rank is not None:
                self._send(peer, message)

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        # A message is far smaller than any socket's buffer, and there are only a few: a rank that does not take it
        # has been stopped or lost, and is dropped.
        try:
            peer.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.connection, None) is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None and self.ranks[peer.rank].outcome is None:
            self.ranks[peer.rank].lost, self.ranks[peer.rank].ended_at = True, time.monotonic()


@dataclass(eq=False)
class _Peer:
    connection: socket.socket
    rank: int | None = None
    buffer: bytes = b""


@dataclass
class _Heard:
    """What the watcher has told this rank."""

    stop: str | None = None
    deadline: float | None = None
    store: tuple[str, int] | None = None
    changed: threading.Event = field(default_factory=threading.Event)


class Client:
    """A rank's side: a thread that beats and listens.

    `on_stop` is called, in that thread, with the reason once the watcher asks all ranks to stop; `signal_name` tells
    which stop signal this process got itself, if any.
    """

    def __init__(
        self,
        address: str,
        token: str,
        rank: int,
        world_size: int,
        *,
        node: str,
        on_stop: Callable[[str], None],
        signal_name: Callable[[], str | None],
        patience: float = 30.0,
    ) -> None:
        host, _, port = address.rpartition(":")
        self.host = host
        self.rank = rank
        self.save_seconds = 0.0
        self._heard = _Heard()
        self._on_stop, self._signal_name = on_stop, signal_name
        self._interval = max(1.0, world_size / _BEATS_PER_SECOND)
        self._sending = threading.Lock()
        self._connection = _connect(host, int(port), patience)
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}" if "SLURM_STEP_ID" in os.environ else ""
        self._send({"token": token, "rank": rank, "node": node, "pid": os.getpid(), "step": step})
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    @property
    def deadline(self) -> float | None:
        """When this process will be killed, in seconds since the epoch, if a stop was asked for and that is known."""
        return self._heard.deadline

    def publish_store(self, port: int) -> None:
        """Rank 0: the port on which torch.distributed's store listens on this host."""
        self._send({"store": port})

    def wait_for_store(self, timeout: float) -> tuple[str, int]:
        """Host and port of rank 0's store. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while self._heard.store is None:
            if not self._heard.changed.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank 0 told nobody within {timeout:.0f} s where to meet")
            self._heard.changed.clear()
        return self._heard.store

    def finish(self, outcome: str, detail: str = "") -> None:
        """How this rank ends. The last thing it says."""
        self._send({"outcome": outcome, "detail": detail[:2000]})

    def _run(self) -> None:
        buffer, beat_at = b"", 0.0
        told_signal: str | None = None
        while True:
            name = self._signal_name()
            if time.monotonic() >= beat_at or name != told_signal:
                beat_at, told_signal = time.monotonic() + self._interval, name
                message = {"marks": _marks, "phase": _phase, "save_seconds": self.save_seconds}
                self._send(message if name is None else message | {"signal": name})
            if not select.select([self._connection], [], [], 0.2)[0]:
                continue
            try:
                data = self._connection.recv(_LINE)
            except OSError:
                data = b""
            if not data:  # the watcher is gone: nobody would restart or end this rank any more
                self._on_stop("the watching process is gone")
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "store" in message:
            host, port = message["store"]
            self._heard.store = (str(host), int(port))
        if "stop" in message:
            self._heard.deadline = message["deadline"]
            if self._heard.stop is None:
                self._heard.stop = str(message["stop"])
                self._on_stop(self._heard.stop)
        self._heard.changed.set()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self._sending:  # the listening side notices
            self._connection.sendall(json.dumps(message).encode() + b"\n")


def _connect(host: str, port: int, patience: float) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5.0)
            connection.settimeout(None)
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"no answer from the watching process at {host}:{port}: {error}") from None
            time.sleep(0.2)
