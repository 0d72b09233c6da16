"""A run on one node listens on the loopback interface only: nobody on the network can reach it. About 40 seconds.

It would catch a store, a process group, an engine or a tracker that binds to an address of the node or to all of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from tests.run import harness

LISTEN = "0A"  # state in /proc/net/tcp


def listeners() -> dict[str, str]:
    """The address and port, in hexadecimal digits, of every listening socket of this machine, by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN:
                found[words[9]] = words[1]
    return found


def is_loopback(address: str) -> bool:
    """Little-endian 127.x.y.z, ::1, or 127.x.y.z as an IPv6 address."""
    host = address.partition(":")[0]
    if len(host) == 8:
        return host.endswith("7F")
    return host == "00000000000000000000000001000000" or (host[:24] == "0000000000000000FFFF0000" and host[-2:] == "7F")


def test_a_run_on_one_node_listens_on_loopback_only(tiny_config: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    unset = {name: "" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}
    process = harness.start(harness.command(tiny_config, run_dir, *harness.OVERRIDES), log, **unset)
    found: dict[str, str] = {}
    family = psutil.Process(process.pid)
    while process.poll() is None and harness.last_step(run_dir) < 3:
        sockets = listeners()
        for member in [family, *family.children(recursive=True)]:
            try:
                for descriptor in Path(f"/proc/{member.pid}/fd").iterdir():
                    inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
                    if inode in sockets:
                        found[sockets[inode]] = " ".join(member.cmdline())[:80]
            except (OSError, psutil.Error):  # it has ended, or the descriptor was closed
                continue
        time.sleep(0.1)
    ended = process.poll()
    harness.kill(process)
    assert ended is None, log.read_text()[-3000:]
    assert len(found) >= 4, found  # the launcher, the store, and the connections of two ranks
    assert {address: who for address, who in found.items() if not is_loopback(address)} == {}
