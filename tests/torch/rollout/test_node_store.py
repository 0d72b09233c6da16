"""The store of a node when processes are killed, memory ends and /dev/shm is missing, full, read-only or emptied.

Catches a reader that waits for the rest of a record that a killed process has not written, one that reads a part of a
record, a count that two ranks believe to have ended, notices that depend on /dev/shm, ranks in containers of their own
that cannot open their node's files, and ranks that wait for one that is dead. Takes 30 seconds.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import resource
import signal
import socket
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

from gspo_hpc.rollout import handover, node_store
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
        for node in itertools.count():
            if node >= 16 and (torn or node == 200):  # whether a record is torn is up to the machine: try on
                break
            monkeypatch.setattr(node_store.environment, "node_name", lambda node=node: f"node-{node}")
            print(f"node-{node}", file=program.stdin, flush=True)
            pid = int(program.stdout.readline())
            other = NodeStore(job, 1, 2, 0.0)
            found = other.read()
            if node % 2:  # every second one is killed in the middle of a record, however long this machine takes to it
                while not other._torn and len(found) < len(notices):
                    found += other.read()
            else:
                time.sleep(chance.random() * 0.2)
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


def listening() -> list[str]:
    """The names of the sockets at which first ranks of nodes hand over files."""
    return [line.split("@")[1] for line in Path("/proc/net/unix").read_text().splitlines() if "@gspo_hpc-" in line]


def as_other_user(store: Any, *, careful: bool) -> str:
    """The error of a rank that another user runs; `careful`: it looks whose socket it is, as ours do."""
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            if not careful:
                handover._user = lambda connection: OTHER_USER
            NodeStore(store, 2, 3, 60.0, 5.0)
        except BaseException as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with open(ours) as file:
        return file.read()


def test_who_gets_the_files_of_a_node() -> None:
    """Its ranks, once they have said its token; another user gets nothing."""
    store: Any = dist.HashStore()
    key = f"node_store/{node_store.environment.node_name()}"
    first, other = NodeStore(store, 0, 3, 60.0), NodeStore(store, 1, 3, 60.0)
    address = json.loads(store.get(key))
    for file in (other._notices, other._arrivals):
        assert os.fstat(file).st_mode & 0o077 == 0 and os.fstat(file).st_uid == os.getuid()
        assert not os.get_inheritable(file)
    assert first.count("left") == 1 and os.lseek(other._arrivals, 0, os.SEEK_CUR) == 0, "they share one offset"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(other._notices, b"x")
    if os.getuid() == 0:
        assert "its socket belongs to another user than this rank's" in as_other_user(store, careful=True)
        assert "it runs as another user than this rank" in as_other_user(store, careful=False)
    store.set(key, json.dumps(address | {"token": "another"}))
    with pytest.raises(RuntimeError, match=r"rank 2 of node .* it does not know this rank's number and token"):
        NodeStore(store, 2, 3, 60.0)
    store.set(key, json.dumps(address))
    with pytest.raises(RuntimeError, match="number and token"):
        NodeStore(store, 3, 3, 60.0)
    with pytest.raises(OSError, match="2 of 3 arrived: this process has too many files open"):
        handover.receive(address, 1, 3, 5.0)
    assert address["socket"] in listening()
    first.close()
    with pytest.raises(RuntimeError, match="it has ended, or closed its store"):
        NodeStore(store, 2, 3, 60.0)
    with pytest.raises(NoticesLost, match="has closed its store"):
        other.read()
    other.close()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.pipe, "what came is no file"),
        (lambda: (os.memfd_create("a"), os.memfd_create("b")), "the files of another job"),
        (lambda: os.open("/nonexistent", 0), "it cannot open them: No such file"),
    ],
    ids=["pipe", "other files", "nothing"],
)
def test_what_is_handed_over_must_be_the_files(make: Any, told: str) -> None:
    store: Any = dist.HashStore()
    files = len(os.listdir("/proc/self/fd"))
    wrong = handover.Handover(2, "0123", make)
    store.set(f"node_store/{node_store.environment.node_name()}", json.dumps(wrong.address()))
    with pytest.raises(RuntimeError, match=told):
        NodeStore(store, 1, 2, 60.0)
    wrong.close()
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_rank_that_dies_before_it_has_its_files_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has not connected, one has ended after that, and one has connected and says nothing."""
    monkeypatch.setattr(handover, "_GREETING", 0.2)
    store: Any = dist.HashStore()
    files = len(os.listdir("/proc/self/fd"))
    first = NodeStore(store, 0, 5, 60.0)
    address = json.loads(store.get(f"node_store/{node_store.environment.node_name()}"))
    dead, stopped = (socket.socket(socket.AF_UNIX) for _ in range(2))
    for one in (dead, stopped):
        one.connect(f"\0{address['socket']}")
    dead.close()
    last = NodeStore(store, 4, 5, 60.0, 2.0)
    assert [first.count("left"), last.count("left")] == [1, 2]
    assert first._handover is not None
    thread = first._handover._thread
    first.close()
    thread.join(10)
    assert not thread.is_alive()
    assert address["socket"] not in listening()
    last.close()
    stopped.close()
    assert len(os.listdir("/proc/self/fd")) == files


def test_all_ranks_of_a_node_may_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel lets wait; after the last of them nobody listens any more."""
    monkeypatch.setattr(handover, "_BACKLOG", 0)
    store: Any = dist.HashStore()
    ranks = 24
    stores = [NodeStore(store, 0, ranks, 60.0)]
    hands = stores[0]._handover
    threads = [
        threading.Thread(target=lambda rank=rank: stores.append(NodeStore(store, rank, ranks, 60.0)))
        for rank in range(1, ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert hands is not None
    hands._thread.join(10)
    assert not hands._thread.is_alive() and hands.address()["socket"] not in listening()
    assert sorted(one.count("left") for one in stores) == list(range(1, ranks + 1))
    for one in stores:
        one.close()


def states(pid: int) -> set[str]:
    """The states of a process's threads, as in /proc."""
    return {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}


@pytest.mark.parametrize(("killed", "told"), [(True, "it ended before it"), (False, "not answered for 2 s: it hangs")])
def test_a_first_rank_that_stops_before_it_hands_over_its_files(
    killed: bool, told: str, job: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others learn at once that it was killed, and that it hangs when their patience ends."""
    monkeypatch.setattr(node_store.environment, "node_name", lambda: "node")
    program = subprocess.Popen(
        [sys.executable, "-c", FIRST_RANKS, str(job.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None and program.stdout is not None
    found: list[str] = []

    def open_store() -> None:
        try:
            NodeStore(job, 1, 2, 0.0, 60.0 if killed else 2.0)
        except RuntimeError as error:
            found.append(str(error))

    print("node", file=program.stdin, flush=True)
    pid = int(program.stdout.readline())
    try:
        job.get("node_store/node")
        os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + 20
        while states(pid) != {"T"}:  # the signal takes a while to reach all threads
            assert time.monotonic() < end
            time.sleep(0.01)
        thread = threading.Thread(target=open_store)
        thread.start()
        thread.join(0.3 if killed else 10)
        assert thread.is_alive() == killed
        os.kill(pid, signal.SIGKILL)
        assert program.stdout.readline() == "gone\n"
        thread.join(10)
        assert not thread.is_alive() and told in found[0]
        open_store()
        assert "it has ended, or closed its store" in found[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        program.kill()  # at its end Python would wait for threads, as long as a busy machine makes it
        program.wait()
        program.stdin.close()
        program.stdout.close()


RANK = """
import json, sys
import torch.distributed as dist
from gspo_hpc.rollout.node_store import COUNT, NodeStore

path, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
job = dist.FileStore(path, -1)
store = NodeStore(job, rank, ranks, 0.001, 20.0)
if not rank:
    for number in range(1, 50):
        job.set(f"{COUNT}/{number}", f"notice {number}")
found = []
while len(found) < 49:
    found += store.read()
print(json.dumps([found, [store.count(f"call {number}") for number in range(500)]]), flush=True)
sys.stdin.read()
store.close()
"""


def ranks_in(tmp_path: Path, *namespaces: list[str]) -> list[tuple[str, str]]:
    """What the ranks of a node print, and their errors, where each is in the namespaces that it makes."""
    for words in namespaces:
        if (tried := subprocess.run([*words, "true"], capture_output=True, text=True)).returncode:
            pytest.xfail(f"this machine gives no namespaces: {tried.stderr}")
    started = [
        subprocess.Popen(
            [*words, sys.executable, "-c", RANK, str(tmp_path / "job"), str(rank), str(len(namespaces))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SLURMD_NODENAME": "node"},
        )
        for rank, words in enumerate(namespaces)
    ]
    try:  # the first rank closes its store after the others
        return [one.communicate(timeout=60) for one in reversed(started)][::-1]
    finally:
        for one in started:
            one.kill()
            one.wait()


OWN = ["unshare", "--user", "--map-current-user", "--mount"]


@pytest.mark.parametrize(
    "namespaces", [OWN, [*OWN, "--pid", "--fork", "--kill-child", "--mount-proc"]], ids=["user", "user and PID"]
)
def test_each_rank_may_have_namespaces_of_its_own(namespaces: list[str], tmp_path: Path) -> None:
    """As in a container for each rank: `apptainer exec` makes a user namespace where it has no setuid program."""
    told = ranks_in(tmp_path, namespaces, namespaces, namespaces)
    assert all(output for output, _ in told), [error for _, error in told]
    read, counts = zip(*(json.loads(output) for output, _ in told), strict=True)
    assert all(notices == [f"notice {number}" for number in range(1, 50)] for notices in read)
    assert [sorted(call) for call in zip(*counts, strict=True)] == [[1, 2, 3]] * 500


def test_a_rank_in_another_network_namespace_is_told_so(tmp_path: Path) -> None:
    _, (_, error) = ranks_in(tmp_path, OWN, [*OWN, "--net"])
    assert error.splitlines()[-2:] == [
        "RuntimeError: rank 1 of node node got no files from the node's first rank: it is in another network namespace",
        "ranks of a node must share one: in containers, keep the host's (no --net in slurm.container.args)",
    ]


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
