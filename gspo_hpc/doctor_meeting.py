"""Nodes of one job meet in a shared folder: locks, renames, connections and clocks between them.

Floor 6. The first node holds a lock and listens; each of the others must be refused the lock, see what the first
renamed, reach it, and hear what time it has. Nobody waits for a node that does not come.
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

from gspo_hpc import slurm_commands
from gspo_hpc.doctor_finding import Finding, Section
from gspo_hpc.doctor_host import addresses_of, judge_clock
from gspo_hpc.durable import read_json, write_atomically, write_json
from gspo_hpc.slurm_commands import SlurmError

HELLO = "hello.json"
COME_SECONDS = 30.0  # that the first node waits for the others, and they for it
_LATE = 10.0  # seconds until a renamed file is seen, from which on it is worth a word
_PINGS = 5
_CONNECT_SECONDS = 5.0


class Host:
    """The first node's part, from its making to :meth:`close`."""

    def __init__(self, folder: Path, node: str, size: int) -> None:
        self._folder, self._size = folder, size
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        addresses = list(_addresses(node)) if size > 1 else ["127.0.0.1"]
        self._server = socket.create_server(("" if size > 1 else "127.0.0.1", 0), backlog=min(size, 4096))
        self._token = secrets.token_hex(16)
        threading.Thread(target=self._serve, name="doctor-meeting", daemon=True).start()
        port = self._server.getsockname()[1]
        hello = {"node": node, "addresses": addresses, "port": port, "token": self._token, "written": time.time()}
        write_json(folder / HELLO, hello)

    def close(self, seconds: float = COME_SECONDS) -> None:
        """Wait until all others have met this node, or some seconds, and let go."""
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
            connection.settimeout(COME_SECONDS)
            if not secrets.compare_digest(stream.readline(100).strip(), self._token.encode()):
                return
            while stream.readline(100):
                stream.write(f"{time.time()!r}\n".encode())


def visit(folder: Path, rank: int, seconds: float = COME_SECONDS) -> list[Finding]:
    """What another node finds: the lines of groups files, network and host that are about both."""
    files, network, clock = Section("files"), Section("network"), Section("host")
    hello, began, seen = _wait_for_hello(folder, seconds)
    if hello is None:
        fix = "put run.dir on a file system that all nodes share, mounted without long caches (NFS: actimeo)"
        text = f"what the first node renamed is not seen here within {seconds:.0f} s, or that node did not start"
        files.fail("rename between nodes", text, fix)
        return files.findings
    _lock(files, folder, str(hello["node"]))
    ahead = _clock(network, clock, hello)
    delay = max(0.0, seen - max(began, float(hello["written"]) + (ahead or 0.0)))
    text = f"seen after {delay:.1f} s"
    if delay > _LATE:
        files.warn("rename between nodes", text, "a shorter cache of attributes: NFS: actimeo=3")
    else:
        files.ok("rename between nodes", text)
    write_atomically(folder / f"met-{rank:05d}", "")
    return [*files.findings, *network.findings, *clock.findings]


def _wait_for_hello(folder: Path, seconds: float) -> tuple[dict[str, Any] | None, float, float]:
    """(what the first node wrote, when the wait began, when it was seen), by this clock."""
    began, deadline = time.time(), time.monotonic() + seconds
    while True:
        if HELLO in os.listdir(folder):  # a look into the folder, for NFS remembers what was not there
            return read_json(folder / HELLO), began, time.time()
        if time.monotonic() > deadline:
            return None, began, time.time()
        time.sleep(0.1)


def _lock(section: Section, folder: Path, host: str) -> None:
    fix = "mount it with locks between nodes (Lustre: -o flock; NFS: without nolock and local_lock), or another run.dir"
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        section.fail("lock between nodes", f"{host} holds it, and it was given to this node as well", fix)
    except (BlockingIOError, PermissionError):
        section.ok("lock between nodes", f"refused while {host} holds it")
    except OSError as error:
        section.fail("lock between nodes", f"no locks: {error.strerror}", fix)
    finally:
        os.close(fd)


def _clock(network: Section, clock: Section, hello: dict[str, Any]) -> float | None:
    """Seconds that this clock is ahead of the first node's; None where that node is not to be reached."""
    problems = []
    for address in hello["addresses"]:
        try:
            ahead = _ahead(address, hello["port"], hello["token"])
        except (OSError, ValueError) as error:
            problems.append(f"{address}: {getattr(error, 'strerror', None) or error}")
            continue
        network.ok("between nodes", f"{hello['node']} is reached at {address}")
        judge_clock(clock, ahead, str(hello["node"]))
        return ahead
    fix = "ranks talk over TCP on ports that the kernel hands out: a firewall between the nodes must let them"
    network.fail("between nodes", f"{hello['node']} is not reached: {'; '.join(problems)}", fix)
    return None


def _ahead(address: str, port: int, token: str) -> float:
    """By the exchange that took least time: the other's clock was read in the middle of it."""
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
    """Where this node may be reached: as the supervisor of a run would be first."""
    if os.environ.get("SLURMD_NODENAME"):
        with contextlib.suppress(SlurmError):
            yield slurm_commands.node_address(node)
    found = addresses_of(socket.gethostname())
    yield from (address for address in found if not address.startswith("127."))
    yield socket.gethostname()
