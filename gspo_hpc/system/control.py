"""The connection between the ranks of an attempt and the process that watches them: JSON lines over TCP.

Every rank reports who it is, sends a heartbeat while it lives, and reports its phase, the signal it got and how it
ended. The watcher sends all of them the address of torch.distributed's store and the request to stop. A heartbeat
carries the count of system/progress.py: a rank that hangs in a collective still sends heartbeats, but its count stands
still.

The server accepts only connections that begin with the token that the watcher put into the environment of its ranks.
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

from gspo_hpc.system import progress
from gspo_hpc.system.environment import CONTROL, CONTROL_TOKEN, slurm_job_id
from gspo_hpc.system.text import MALFORMED, parse_json

_LINE = 65536  # bytes of a message at most
_BEATS_PER_SECOND = 500.0  # that a watcher is given to read, however many ranks there are


@dataclass
class RankState:
    """The state of a rank, as its watcher knows it. Times are the watcher's monotonic clock."""

    rank: int
    node: str
    pid: int
    step: str  # Slurm's JOB.STEP, or empty
    heard_at: float
    moved_at: float  # when its count last grew
    phase: str = progress.STARTED
    marks: int = 0
    excuse: str | None = None  # why its count may stand still: see system/progress.py
    signal: str | None = None  # the stop signal it got
    outcome: str | None = None  # "done", "stopped", "refused", "failed"
    ended_at: float = 0.0  # when it reported its outcome or was lost
    detail: str = ""
    lost: bool = False  # its connection ended before it reported an outcome
    save_seconds: float = 0.0  # duration of its last checkpoint


class Server:
    """The watcher's side, in one thread: call :meth:`poll` often."""

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
        self._to_all: dict[str, dict[str, Any]] = {}  # by kind: messages that a rank that connects later gets, too

    def environment(self) -> dict[str, str]:
        """Return the variables by which a rank finds this server and is accepted."""
        return {CONTROL: f"{self.host}:{self.port}", CONTROL_TOKEN: self._token}

    def stop(self, reason: str, deadline: float | None) -> None:
        """Ask all ranks to stop. `deadline`: when they will be killed, in seconds since the epoch, if that is known."""
        self._broadcast({"stop": reason, "deadline": deadline})

    def poll(self, timeout: float) -> None:
        """Handle the messages that have arrived; wait at most `timeout` seconds for the first one."""
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
                self._handle(peer, parse_json(line))
        except MALFORMED:  # not a rank of this attempt
            data = b""
        if not data:
            self._drop(peer)

    def _handle(self, peer: _Peer, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if peer.rank is None:
            if not hmac.compare_digest(str(message["token"]), self._token):
                raise ValueError("wrong token")
            peer.rank = int(message["rank"])
            state = RankState(peer.rank, str(message["node"]), int(message["pid"]), str(message["step"]), now, now)
            self.ranks[peer.rank] = state
            for earlier in self._to_all.values():
                self._send(peer, earlier)
            return
        state = self.ranks[peer.rank]
        state.heard_at = now
        if message.get("marks", state.marks) != state.marks or message.get("phase", state.phase) != state.phase:
            state.moved_at, state.marks, state.phase = now, message["marks"], message["phase"]
        state.excuse = message.get("excuse", state.excuse)
        state.signal = message.get("signal", state.signal)
        state.save_seconds = float(message.get("save_seconds", state.save_seconds))
        if "store" in message:
            port, secret = message["store"]
            self._broadcast({"store": [self.host, int(port), str(secret)]})
        if "outcome" in message:
            state.outcome, state.detail, state.ended_at = str(message["outcome"]), str(message["detail"]), now

    def _broadcast(self, message: dict[str, Any]) -> None:
        self._to_all[next(iter(message))] = message
        for peer in list(self._peers.values()):
            if peer.rank is not None:
                self._send(peer, message)

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        # A message is far smaller than a socket's buffer, and there are only a few: a rank that does not take one has
        # been stopped or lost, and is dropped.
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
class _Received:
    """The messages that this rank got from its watcher."""

    stop: str | None = None
    deadline: float | None = None
    store: tuple[str, int, str] | None = None
    changed: threading.Event = field(default_factory=threading.Event)


class Client:
    """A rank's side: a thread that sends heartbeats and listens.

    `on_stop` is called in that thread, with the reason, once the watcher asks all ranks to stop. `signal_name` returns
    the stop signal that this process got itself, or None.
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
        self._received = _Received()
        self._on_stop, self._signal_name = on_stop, signal_name
        self._interval = max(1.0, world_size / _BEATS_PER_SECOND)
        self._sending = threading.Lock()
        self._connection = _connect(host, int(port), patience)
        step = f"{slurm_job_id()}.{os.environ['SLURM_STEP_ID']}" if "SLURM_STEP_ID" in os.environ else ""
        self._send({"token": token, "rank": rank, "node": node, "pid": os.getpid(), "step": step})
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    @property
    def deadline(self) -> float | None:
        """Time at which this process will be killed, in seconds since the epoch; None if it is not known."""
        return self._received.deadline

    def publish_store(self, port: int, secret: str) -> None:
        """Report the port on which torch.distributed's store listens on this host, and what its keys begin with.

        Called by rank 0.
        """
        self._send({"store": [port, secret]})

    def wait_for_store(self, timeout: float) -> tuple[str, int, str]:
        """Return host and port of rank 0's store, and what its keys begin with.

        Raises TimeoutError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self._received.store is None:
            if not self._received.changed.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank 0 did not report the port of its store within {timeout:.0f} s")
            self._received.changed.clear()
        return self._received.store

    def finish(self, outcome: str, detail: str = "") -> None:
        """Report how this rank ends: its last message."""
        self._send({"outcome": outcome, "detail": detail[:2000]})

    def _run(self) -> None:
        buffer, beat_at = b"", 0.0
        reported: str | None = None
        while True:
            name = self._signal_name()
            if time.monotonic() >= beat_at or name != reported:
                beat_at, reported = time.monotonic() + self._interval, name
                marks, phase, excuse = progress.marks()
                message = {"marks": marks, "phase": phase, "excuse": excuse, "save_seconds": self.save_seconds}
                self._send(message if name is None else message | {"signal": name})
            if not select.select([self._connection], [], [], 0.2)[0]:
                continue
            try:
                data = self._connection.recv(_LINE)
            except OSError:
                data = b""
            if not data:  # without the watcher nobody would restart or end this rank
                self._on_stop("the watching process is gone")
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "store" in message:
            host, port, secret = message["store"]
            self._received.store = (str(host), int(port), str(secret))
        if "stop" in message:
            self._received.deadline = message["deadline"]
            if self._received.stop is None:
                self._received.stop = str(message["stop"])
                self._on_stop(self._received.stop)
        self._received.changed.set()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self._sending:  # the listening thread notices it
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
