"""The store of a node when processes are killed, memory ends and /dev/shm is missing, full, read-only or emptied.

Catches a reader that waits for the rest of a record that a killed process has not written, one that reads a part of a
record, a count that two ranks believe to have ended, and notices that depend on /dev/shm. Takes 20 seconds.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gspo_hpc.rollout import node_store
from gspo_hpc.rollout.node_store import COUNT, NodeStore, NoticesLost

OTHER_USER = 65534  # nobody

FIRST_RANKS = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from gspo_hpc.rollout import node_store

for name in sys.stdin:  # each a node, whose first rank is a process that will be killed
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)
        continue
    node_store.environment.node_name = lambda: name.strip()
    job = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=60), wait_for_workers=False)
    store = node_store.NodeStore(job, 0, 2, 0.0)
    store._relay._thread.join()
"""


@pytest.fixture
def job() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def test_a_first_rank_that_is_killed_at_any_moment_leaves_whole_notices(
    job: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's FileStore reads for ever what is missing of a record."""
    chance = random.Random(5)
    notices = [str(number) * chance.choice((1, 1000, 1_000_000)) for number in range(40)]
    for number, text in enumerate(notices, 1):
        job.set(f"{COUNT}/{number}", text)
    program = subprocess.Popen(
        [sys.executable, "-c", FIRST_RANKS, str(job.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None and program.stdout is not None
    torn = 0
    try:
        for node in range(16):
            monkeypatch.setattr(node_store.environment, "node_name", lambda node=node: f"node-{node}")
            print(f"node-{node}", file=program.stdin, flush=True)
            pid = int(program.stdout.readline())
            other = NodeStore(job, 1, 2, 0.0)
            found, end = other.read(), time.monotonic() + chance.random() * 0.2
            while time.monotonic() < end and not (node % 2 and other._torn):  # every second one in the middle of it
                found += other.read() if node % 2 else []
            os.kill(pid, signal.SIGKILL)
            assert program.stdout.readline() == "gone\n"
            found += other.read()
            assert found == notices[: len(found)]
            torn += bool(other._torn)
            other._patience = 0.05
            with pytest.raises(NoticesLost, match="has not looked"):
                while True:
                    found += other.read()
                    time.sleep(0.01)
            assert found == notices[: len(found)]
            other.close()
    finally:
        program.stdin.close()
        program.wait(20)
        program.stdout.close()
    assert torn, "no process was killed in the middle of a record"


def test_a_part_of_a_record_is_no_notice_until_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.HashStore()
    first, other = NodeStore(store, 0, 2, 60.0), NodeStore(store, 1, 2, 60.0)
    line = node_store._line({"notice": 'said\nhello "you" äöü'})
    assert first._relay is not None
    written = first._relay._files[0]
    for place, byte in enumerate(line):
        assert other.read() == [], line[:place]
        os.write(written, bytes([byte]))
    assert other.read() == ['said\nhello "you" äöü'] and other.read() == []
    first.close()
    other.close()


@pytest.mark.parametrize(("room", "told"), [(1000, "OSError: .* File too large"), (10, "no memory for more")])
def test_readers_learn_that_there_is_no_room_for_a_notice(
    room: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notice is too long, and the error fits behind the others or does not fit either."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # pytest's is a file, and has no room either
    store: Any = dist.HashStore()
    first, other = NodeStore(store, 0, 2, 0.2), NodeStore(store, 1, 2, 0.2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(other._notices).st_size + 23 + room, before[1]))
    try:
        store.set(f"{COUNT}/1", "a notice")  # 23 bytes
        store.set(f"{COUNT}/2", "long" * 1000)
        found = []
        with pytest.raises(NoticesLost, match=told):
            for _ in range(1000):
                found += other.read()
                time.sleep(0.01)
        assert found == ["a notice"] or not found  # where both came at once the error comes first
        with pytest.raises(NoticesLost, match=told):
            other.read()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    first.close()
    other.close()


def test_one_rank_of_a_node_is_the_last_to_count() -> None:
    ranks, names = 6, [f"generate/{call}/left" for call in range(300)]
    job: Any = dist.HashStore()
    stores = [NodeStore(job, rank, ranks, 60.0) for rank in range(ranks)]
    counts: list[list[int]] = [[] for _ in stores]

    def count(rank: int) -> None:
        order = random.Random(rank)
        for begin in range(0, len(names), 3):  # ranks may be a few calls apart, in any order
            counts[rank] += [stores[rank].count(name) for name in order.sample(names[begin : begin + 3], 3)]

    threads = [threading.Thread(target=count, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sum(counts, [])) == sorted(number for number in range(1, ranks + 1) for _ in names)
    for store in stores:
        store.count("last")
        assert len(store._counts) <= 4, "what a rank keeps grows with the calls"
    for store in reversed(stores):
        store.close()


def test_who_may_open_the_files_of_a_node() -> None:
    """Its ranks; another user may not, and who finds another process is told."""
    store: Any = dist.HashStore()
    key = f"node_store/{node_store.environment.node_name()}"
    first, other = NodeStore(store, 0, 2, 60.0), NodeStore(store, 1, 2, 60.0)
    address = json.loads(store.get(key))
    path = Path(f"/proc/{os.getpid()}/fd/{address['files'][0]}")
    assert path.stat().st_mode & 0o077 == 0 and path.stat().st_uid == os.getuid()
    if os.getuid() == 0:
        refused = subprocess.run(["cat", path], user=OTHER_USER, group=OTHER_USER, capture_output=True, text=True)
        assert "Permission denied" in refused.stderr and not refused.stdout
    store.set(key, json.dumps(address | {"token": "another"}))
    with pytest.raises(RuntimeError, match=r"it is another process\): ranks of a node must see each other in /proc"):
        NodeStore(store, 1, 2, 60.0)
    store.set(key, json.dumps(address | {"pid": 2**22 + 1}))
    with pytest.raises(RuntimeError, match="No such file or directory"):
        NodeStore(store, 1, 2, 60.0)
    first.close()
    with pytest.raises(NoticesLost, match="has closed its store"):
        other.read()
    other.close()
    assert not path.exists()


EXCHANGE = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from gspo_hpc.rollout.node_store import COUNT, NodeStore

store = dist.HashStore()
first, other = NodeStore(store, 0, 2, 0.001), NodeStore(store, 1, 2, 0.001)
found = []
for number in range(1, 200):
    store.set(f"{COUNT}/{number}", "x" * 1000)
    while len(found) < number:
        found += other.read()
    assert [one.count(f"call {number}") for one in (first, other)] == [1, 2]
    if number == 100 and sys.argv[1] == "emptied":  # as systemd does, with RemoveIPC=yes, when a user has logged out
        for path in Path("/dev/shm").rglob("*"):
            path.unlink()
other.close()
first.close()
print("done")
"""
SHARED_MEMORY = {
    "missing": "mkdir $0/dev && touch $0/dev/null $0/dev/urandom && mount --bind /dev/null $0/dev/null && "
    "mount --bind /dev/urandom $0/dev/urandom && mount --rbind $0/dev /dev && test ! -e /dev/shm",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "full": "mount -t tmpfs -o size=1m tmpfs /dev/shm && (cat /dev/zero > /dev/shm/filled || true) 2> $0/errors",
    "emptied": "mount -t tmpfs tmpfs /dev/shm && touch /dev/shm/other",
}


@pytest.mark.parametrize("state", SHARED_MEMORY)
def test_notices_do_not_depend_on_dev_shm(state: str, tmp_path: Path) -> None:
    """In a mount namespace of its own, where /dev/shm is what the test wants."""
    private = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    if subprocess.run([*private, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True).returncode:
        pytest.skip("this machine gives no mount namespaces")
    script = f'{SHARED_MEMORY[state]}; exec "$@"'
    command = [*private, script, str(tmp_path), sys.executable, "-c", EXCHANGE, state]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.stdout == "done\n", told.stderr
