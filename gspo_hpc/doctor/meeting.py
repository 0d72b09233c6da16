"""Checks between the nodes of one job: locks, renames, connections and clocks.

The first node holds a lock in a shared folder and listens. Each of the others must be refused the lock, see the file
that the first renamed, connect to it, and compare clocks. Nobody waits for a node that does not start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_hpc.doctor.finding import Finding, Section
from gspo_hpc.doctor.host import addresses_of, judge_clock
from gspo_hpc.launch.slurm import commands
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.system.files import read_json, write_atomically, write_json

HELLO = "hello.json"
MEET_SECONDS = 30.0  # the first node waits this long for the others, and they for it
_LATE = 10.0  # seconds until other nodes see a renamed file; more is a warning
_PINGS = 5
_CONNECT_SECONDS = 5.0


class Host:
    """The first node's part: it holds the lock and answers the others until :meth:`close`."""

    def __init__(self, folder: Path, node: str, size: int) -> None:
        self._folder, self._size = folder, size
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: the others, and the checks of files, say so
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        addresses = list(_addresses(node)) if size > 1 else ["127.0.0.1"]
        self._server = socket.create_server(("" if size > 1 else "127.0.0.1", 0), backlog=min(size, 4096))
        self._token = secrets.token_hex(16)
        threading.Thread(target=self._serve, name="doctor-meeting", daemon=True).start()
        port = self._server.getsockname()[1]
        hello = {"node": node, "addresses": addresses, "port": port, "token": self._token, "written": time.time()}
        write_json(folder / HELLO, hello)

    def close(self, seconds: float = MEET_SECONDS) -> None:
        """Wait until all others have met this node, at most `seconds`, and release the lock."""
        deadline = time.monotonic() + seconds
        while sum(1 for _ in self._folder.glob("met-*")) < self._size - 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        self._server.close()
        os.close(self._lock)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rwb", buffering=0) as stream:
            connection.settimeout(MEET_SECONDS)
            if not secrets.compare_digest(stream.readline(100).strip(), self._token.encode()):
                return
            while stream.readline(100):
                stream.write(f"{time.time()!r}\n".encode())


def visit(folder: Path, rank: int, seconds: float = MEET_SECONDS) -> list[Finding]:
    """Meet the first node from another one; return the findings about both (groups files, network and host)."""
    files, network, clock = Section("files"), Section("network"), Section("host")
    hello, began, seen = _wait_for_hello(folder, seconds)
    if hello is None:
        fix = "put run.dir on a file system that all nodes share, mounted without long caches (NFS: actimeo)"
        text = f"a file that the first node renamed is not visible after {seconds:.0f} s, or that node did not start"
        files.fail("rename between nodes", text, fix)
        return files.findings
    _lock(files, folder, str(hello["node"]))
    ahead = _clock(network, clock, hello)
    delay = max(0.0, seen - max(began, float(hello["written"]) + (ahead or 0.0)))
    text = f"a renamed file is visible after {delay:.1f} s"
    if delay > _LATE:
        files.warn("rename between nodes", text, "shorten the cache of attributes (NFS: actimeo=3)")
    else:
        files.ok("rename between nodes", text)
    write_atomically(folder / f"met-{rank:05d}", "")
    return [*files.findings, *network.findings, *clock.findings]


def _wait_for_hello(folder: Path, seconds: float) -> tuple[dict[str, Any] | None, float, float]:
    """Return what the first node wrote, when the wait began and when the file appeared, by this clock."""
    began, deadline = time.time(), time.monotonic() + seconds
    while True:
        if HELLO in os.listdir(folder):  # list the folder, because NFS caches that a file did not exist
            return read_json(folder / HELLO), began, time.time()
        if time.monotonic() > deadline:
            return None, began, time.time()
        time.sleep(0.1)


def _lock(section: Section, folder: Path, host: str) -> None:
    fix = "mount it with locks between nodes (Lustre: -o flock; NFS: no nolock, no local_lock), or change run.dir"
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        section.fail("lock between nodes", f"{host} holds the lock, but this node got it as well", fix)
    except (BlockingIOError, PermissionError):
        section.ok("lock between nodes", f"the lock is refused while {host} holds it")
    except OSError as error:
        section.fail("lock between nodes", f"locks do not work: {error.strerror}", fix)
    finally:
        os.close(fd)


def _clock(network: Section, clock: Section, hello: dict[str, Any]) -> float | None:
    """Return the seconds by which this clock is ahead of the first node's; None if that node cannot be reached."""
    problems = []
    for address in hello["addresses"]:
        try:
            ahead = _ahead(address, hello["port"], hello["token"])
        except (OSError, ValueError) as error:
            problems.append(f"{address}: {getattr(error, 'strerror', None) or error}")
            continue
        network.ok("between nodes", f"this node can reach {hello['node']} at {address}")
        judge_clock(clock, ahead, str(hello["node"]))
        return ahead
    fix = "open the firewall between nodes for TCP: ranks use ports that the kernel assigns"
    network.fail("between nodes", f"this node cannot reach {hello['node']}: {'; '.join(problems)}", fix)
    return None


def _ahead(address: str, port: int, token: str) -> float:
    """Measure by how many seconds this clock is ahead, in the fastest exchange: the other clock was read half-way."""
    samples = []
    with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
        with connection.makefile("rwb", buffering=0) as stream:
            stream.write(f"{token}\n".encode())
            for _ in range(_PINGS):
                before = time.time()
                stream.write(b"time\n")
                theirs = float(stream.readline(100))
                after = time.time()
                samples.append((after - before, (before + after) / 2 - theirs))
    return min(samples)[1]


def _addresses(node: str) -> Iterator[str]:
    """Yield the addresses at which others may reach this node; first the one that a run's supervisor would use."""
    if os.environ.get("SLURMD_NODENAME"):
        with contextlib.suppress(SlurmError):
            yield commands.node_address(node)
    found = addresses_of(socket.gethostname())
    yield from (address for address in found if not address.startswith("127."))
    yield socket.gethostname()
