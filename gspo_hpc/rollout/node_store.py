"""The store of a node: notices that one thread copies from the store of the job, and counts of the ranks of the node.

The node's first rank makes two files in memory that have no name (memfd), and hands them to the others over a socket
(handover.py). So they need no room in /dev/shm, nobody can remove them, and they end with the last process that has
them open. Both are only appended to. A process that is killed in the middle of a write leaves a part of a record at
most, and readers take no record before its end is there, so they never wait for one. Nobody locks anything.

One thread on the node's first rank, the relay, copies new notices. The other ranks of the node depend on that thread,
so it shows them that it lives: with every look at the store of the job it changes the time of the file of notices, and
it writes the error that ends it there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from gspo_hpc.rollout.handover import Handover, receive
from gspo_hpc.system import environment
from gspo_hpc.system.files import write_all

COUNT = "notices"  # key of their number in the store of the job; each is at this key, "/" and its number
_CHUNK = 65536  # bytes of one read
_RECORD = 16  # bytes of a count; no page has a part of one, and the kernel writes a page as a whole or not at all
_JOIN = 0.5  # seconds to wait for the relay to end
_LONGEST_GAP = 1.0  # seconds between two looks of a rank that count as silence: it may have been stopped meanwhile


class NoticesLost(RuntimeError):
    """Notices no longer reach the ranks of this node."""


class NodeStore:
    """One rank's view of its node's store."""

    def __init__(
        self, job: dist.Store, local_rank: int, ranks_per_node: int, interval: float, patience: float = 30.0
    ) -> None:
        """Open the store; the node's first rank makes it, and looks at `job` every `interval` seconds.

        `patience`: seconds without a look after which :meth:`read` raises.
        """
        self._node, self._ranks, self._patience = environment.node_name(), ranks_per_node, patience
        key = f"node_store/{self._node}"
        self._relay: _Relay | None = None
        self._handover: Handover | None = None
        if local_rank:
            self._notices, self._arrivals = self._receive(json.loads(job.get(key)), local_rank)
        else:
            if job.add(f"{key}/made", 1) != 1:
                raise RuntimeError(f"two nodes of this job are called {self._node}: give each a name of its own")
            made = [os.memfd_create(f"gspo_hpc-{name}") for name in ("notices", "arrivals")]
            for file in made:
                os.fchmod(file, 0o600)
            token = secrets.token_hex(8)
            write_all(made[0], _line(_header(token)))
            self._notices, self._arrivals = _open_again(made)
            self._relay = _Relay(job, made, interval)
            if ranks_per_node > 1:
                self._handover = Handover(ranks_per_node, token, functools.partial(_open_again, made))
                job.set(key, json.dumps(self._handover.address()))
        self._place, self._torn = 0, b""  # how far this rank has read the notices, and the part of a line at the end
        self._error = ""  # why nothing more will come
        self._counted, self._counts = 0, Counter[bytes]()  # the same of the arrivals, which have no torn records
        self._beat, self._silent, self._looked = -1, 0.0, time.monotonic()

    def read(self) -> list[str]:
        """Return the notices that have come since the last call.

        Raises NoticesLost if the relay has ended, or has not looked at the store of the job for too long.
        """
        found = []
        while piece := os.pread(self._notices, _CHUNK, self._place):
            self._place += len(piece)
            *lines, self._torn = (self._torn + piece).split(b"\n")
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:  # a record that was begun, and removed for want of memory after this rank read it
                    record = {"error": "there is no memory for more of them"}
                self._error = self._error or record.get("error", "")
                if "notice" in record:
                    found.append(record["notice"])
        if not found:  # what came before the end still counts
            self._check()
        return found

    def count(self, name: str) -> int:
        """Count this rank, once for each name, and return how many ranks of this node have counted, itself included."""
        mine = hashlib.blake2b(name.encode(), digest_size=_RECORD).digest()
        os.write(self._arrivals, mine)
        end, found = os.lseek(self._arrivals, 0, os.SEEK_CUR), 0
        while not found:
            one = os.pread(self._arrivals, _RECORD, self._counted)
            self._counted += _RECORD
            self._counts[one] += 1
            if self._counted == end:
                found = self._counts[mine]
            if self._counts[one] == self._ranks:  # nobody will count it again
                del self._counts[one]
        return found

    def close(self) -> None:
        """Stop copying, and close the store for all ranks of the node, on its first rank. Calling it again is fine."""
        if self._handover is not None:
            self._handover.close()  # before the files
            self._handover = None
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        for file in (self._notices, self._arrivals):
            if file >= 0:
                os.close(file)
        self._notices = self._arrivals = -1

    def _receive(self, address: Mapping[str, str], local_rank: int) -> tuple[int, int]:
        """Get from the node's first rank what it opens for this one, and see that it is that."""
        try:
            notices, arrivals = files = receive(address, local_rank, 2, self._patience)
            try:
                if not all(stat.S_ISREG(os.fstat(file).st_mode) for file in files):
                    raise OSError("what came is no file")
                if not os.pread(notices, _CHUNK, 0).startswith(_line(_header(address["token"]))):
                    raise OSError("what came are the files of another job or attempt")
            except OSError:
                for file in files:
                    os.close(file)
                raise
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RuntimeError(
                f"rank {local_rank} of node {self._node} got no files from the node's first rank: {error}"
            ) from None
        return notices, arrivals

    def _check(self) -> None:
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, _LONGEST_GAP), now
        state = os.fstat(self._notices)
        if state.st_size < self._place:
            self._error = "there is no memory for more of them"
        if self._error:
            raise NoticesLost(
                f"node {self._node} cannot read notices from the store of the job any more: {self._error}"
            )
        if state.st_mtime_ns != self._beat:
            self._beat, self._silent = state.st_mtime_ns, 0.0
            return
        self._silent += gap
        if self._silent > self._patience:
            raise NoticesLost(
                f"the first rank of node {self._node} has not looked at the store of the job for {self._silent:.0f} s: "
                f"it hangs, or the store (on rank 0) does not answer"
            )


class _Relay:
    """A thread that copies new notices from the store of the job into the first of a node's files, which it owns."""

    def __init__(self, source: dist.Store, files: list[int], interval: float) -> None:
        self._source, self._files, self._interval = source, files, interval
        self._closed, self._writing, self._ended = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_JOIN)  # no longer: a store that does not answer holds it for ever
        self._end("the node's first rank has closed its store")
        if not self._thread.is_alive():
            for file in self._files:
                os.close(file)

    def _run(self) -> None:
        copied = looks = 0
        try:
            while not self._closed.wait(self._interval):
                while (text := find(self._source, copied + 1)) is not None:
                    self._append({"notice": text})
                    copied += 1
                looks += 1
                os.utime(self._files[0], ns=(looks, looks))
        except Exception as error:  # whatever it is, all ranks of the node wait for what this thread copies
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self._end(text)
            print(f"notices of this node are lost: {text}", file=sys.stderr, flush=True)

    def _append(self, record: Mapping[str, str]) -> None:
        with self._writing:
            whole = os.fstat(self._files[0]).st_size
            try:
                if not self._ended:
                    write_all(self._files[0], _line(record))
            except OSError:
                os.ftruncate(self._files[0], whole)
                os.lseek(self._files[0], whole, os.SEEK_SET)
                raise

    def _end(self, error: str) -> None:
        """Write why nothing more will come, unless that was done."""
        try:
            self._append({"error": error})
        except OSError:  # nothing can be appended
            os.ftruncate(self._files[0], 0)
        self._ended = True


def _open_again(made: Sequence[int]) -> tuple[int, int]:
    """Open this process's files once more: descriptors to read the notices, and to read and append counts.

    Not os.dup: :meth:`NodeStore.count` needs an offset that no other rank moves.
    """
    opened: list[int] = []
    try:
        for file, flags in zip(made, (os.O_RDONLY, os.O_RDWR | os.O_APPEND), strict=True):
            opened.append(os.open(f"/proc/self/fd/{file}", flags | os.O_CLOEXEC))
    except OSError:
        for file in opened:
            os.close(file)
        raise
    return opened[0], opened[1]


def _header(token: str) -> dict[str, str]:
    return {"token": token}


def _line(record: Mapping[str, str]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def find(store: dist.Store, number: int) -> str | None:
    """Return a notice, or None if it is not there: to wait for it would keep other threads from the store."""
    key = f"{COUNT}/{number}"
    return store.get(key).decode() if store.check([key]) else None
