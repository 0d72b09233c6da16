"""Files that the first rank of a node hands over, open, to the other ranks of the node.

Each rank may be in a container of its own. Nobody may open ``/proc/PID/fd`` of a process in another user namespace, and
a process id says nothing in another PID namespace. So the files travel over a Unix socket (SCM_RIGHTS), which needs
neither. Its name is in Linux's abstract namespace, which belongs to the network namespace: that is what ranks of a node
have to share. The name ends with the socket, so nothing has to be removed.

The kernel tells both ends the user of the other one, in whatever user namespace that is. Processes of another user get
nothing and are not listened to. A token keeps this user's other jobs apart.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_BACKLOG = 4096  # ranks that may knock at once; the kernel has a bound of its own
_GREETING = 5.0  # seconds in which a rank that has connected must say who it is: it does so at once, unless it stops
_SLICE = 1.0  # seconds: the time for which a job is suspended counts as one of these at most
_RETRY = 0.01  # seconds, where too many knock at once
_LINE = 4096  # bytes of a greeting or an answer at most
_JOIN = 0.5  # seconds to wait for the end of the thread
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them

Address = Mapping[str, Any]  # plain values


class Handover:
    """A thread that hands files to each of the ranks 1 to `ranks` - 1 of this node, and ends after the last of them.

    `open_files` makes what one rank gets. Each needs an open file description of its own: a shared one has one offset.
    """

    def __init__(self, ranks: int, token: str, open_files: Callable[[], Sequence[int]]) -> None:
        self._known = {_greeting(token, rank) for rank in range(1, ranks)}
        self._token, self._open_files = token, open_files
        self._serving, self._closed = threading.Lock(), False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._name = f"gspo_hpc-{secrets.token_hex(8)}"
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(_BACKLOG)
        self._thread = threading.Thread(target=self._run, name="handover", daemon=True)
        self._thread.start()

    def address(self) -> dict[str, str]:
        """Return where :func:`receive` finds it."""
        return {"socket": self._name, "network": _network_namespace(), "token": self._token}

    def close(self) -> None:
        """Hand over nothing more: the files may be closed then. Ranks that are waiting get an error."""
        with self._serving:
            self._closed = True
        with contextlib.suppress(OSError):  # it has ended already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_JOIN)

    def _run(self) -> None:
        left = set(self._known)
        try:
            while left:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):  # that rank has ended, or stopped
                    left.discard(self._serve(connection))
        except OSError as error:
            if not self._closed:
                print(f"ranks of this node get no files any more: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            self._listener.close()

    def _serve(self, connection: socket.socket) -> bytes:
        """Return the greeting of the rank that has its files now; an empty one if it was refused."""
        if _user(connection) != os.geteuid():
            return _refuse(connection, "it runs as another user than this rank")
        connection.settimeout(_GREETING)
        greeting = connection.recv(_LINE)
        if greeting not in self._known:
            return _refuse(connection, "it does not know this rank's number and token, which are of another job")
        with self._serving:
            if self._closed:
                return _refuse(connection, "it has closed its store")
            try:
                files = self._open_files()
            except OSError as error:
                return _refuse(connection, f"it cannot open them: {error.strerror}")
            try:
                socket.send_fds(connection, [_answer("")], files)
            finally:
                for file in files:
                    os.close(file)
        return greeting


def receive(address: Address, rank: int, count: int, patience: float) -> list[int]:
    """Return the descriptors of `count` files that the first rank of this node hands over; the caller closes them.

    Raises OSError whose text says why there are none, among others after `patience` seconds without an answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_SLICE)
        _connect(connection, address, patience)
        if _user(connection) != os.geteuid():
            raise OSError("its socket belongs to another user than this rank's")
        with contextlib.suppress(BrokenPipeError):  # there is an answer all the same, or it has ended
            connection.sendall(_greeting(address["token"], rank))
        try:
            answer, files = _wait(connection, count, patience)
        except ConnectionResetError:
            answer, files = b"", []
    try:
        problem = json.loads(answer)["problem"] if answer else "it ended before it handed them over"
        if not problem and len(files) != count:
            problem = (
                f"{len(files)} of {count} arrived: this process has too many files open (`ulimit -n`), or SELinux or "
                f"the like refused it"
            )
        if problem:
            raise OSError(problem)
    except (OSError, ValueError, LookupError, TypeError):
        for file in files:
            os.close(file)
        raise
    return files


def _connect(connection: socket.socket, address: Address, patience: float) -> None:
    for _ in range(math.ceil(patience / _RETRY)):
        try:
            return connection.connect(f"\0{address['socket']}")
        except BlockingIOError:  # too many ranks at once
            time.sleep(_RETRY)
        except ConnectionRefusedError:
            if address["network"] == _network_namespace():
                raise OSError("it has ended, or closed its store") from None
            raise OSError(
                "it is in another network namespace\nranks of a node must share one: in containers, keep the host's "
                "(no --net in slurm.container.args)"
            ) from None
    raise OSError(f"it has not accepted a connection for {patience:.0f} s: it hangs")


def _wait(connection: socket.socket, count: int, patience: float) -> tuple[bytes, list[int]]:
    """Return the answer and the files with it. Slices of time, so that a job may be suspended meanwhile."""
    for _ in range(math.ceil(patience / _SLICE)):
        with contextlib.suppress(TimeoutError):
            # Not socket.recv_fds, which drops its flags: programs that this process starts would inherit the files.
            files = array.array("i")
            room = socket.CMSG_LEN(count * files.itemsize)
            answer, parts, _, _ = connection.recvmsg(_LINE, room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in parts:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    files.frombytes(data[: len(data) - len(data) % files.itemsize])
            return answer, files.tolist()
    raise OSError(f"it has not answered for {patience:.0f} s: it hangs")


def _greeting(token: str, rank: int) -> bytes:
    return json.dumps({"token": token, "rank": rank}).encode()


def _answer(problem: str) -> bytes:
    return json.dumps({"problem": problem}).encode()


def _refuse(connection: socket.socket, problem: str) -> bytes:
    connection.sendall(_answer(problem))
    return b""


def _user(connection: socket.socket) -> int:
    """Return the user at the other end, in terms of this process's user namespace.

    A user of ours is mapped as we are: two processes of one user agree on this in any pair of user namespaces.
    """
    size = _CREDENTIALS.size
    return int(_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def _network_namespace() -> str:
    return os.readlink("/proc/self/ns/net")
