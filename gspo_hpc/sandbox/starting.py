"""Permission to start a process or a thread, for which the kernel asks the supervisor of root's programs each time.

The kernel limits the processes of a user, but not those of root, and a look at what is there cannot bound a fork bomb:
on a busy machine it starts processes faster than they are counted. So a filter of system calls (the notifications of
seccomp, Linux 5.5 or newer) has every call that starts one wait for an answer. Nobody answers after the supervisor's
end. Such a call has a cost that it does not have otherwise: a signal that arrives while it waits interrupts it (EINTR).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat

from gspo_hpc.sandbox import kernel, seccomp
from gspo_hpc.sandbox.jails import Job

_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
_NOTIFICATION = 80  # bytes of struct seccomp_notif, which begins with the id of the question
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE


def channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends by which the process that becomes the program hands over its questions."""
    return socket.socketpair()


def ask(job: Job, end: socket.socket) -> None:
    """Have the kernel ask before this process, or what it becomes or starts, starts another; hand over the questions.

    Call it in the process that becomes the program. Nothing is asked for users other than root, who have a limit; with
    apptainer, whose starter may need more privileges than a process with a filter can get, as bubblewrap does where it
    is set-user-id; nor by a kernel that is too old, or that asks for a process above this one already.
    """
    if os.getuid() != 0 or job.kind == "apptainer" or (job.command and os.stat(job.command).st_mode & stat.S_ISUID):
        return
    kernel.gain_no_privileges()
    with contextlib.suppress(OSError):
        listener = kernel.ask_before_calls(seccomp.asking(os.uname().machine))
        socket.send_fds(end, [b"."], [listener])
        os.close(listener)


def questions(end: socket.socket) -> int | None:
    """Return the file descriptor that questions come from; None where nothing is asked. Waits for `ask`."""
    return next(iter(socket.recv_fds(end, 1, 1)[1]), None)


def question(listener: int) -> bytes | None:
    """Return the id of the question that waits; None where the process that asked it is gone."""
    asked = bytearray(_NOTIFICATION)
    with contextlib.suppress(FileNotFoundError):
        fcntl.ioctl(listener, _RECEIVE, asked)
        return bytes(asked[:8])
    return None


def permit(listener: int, asked: bytes) -> None:
    """Let the process that asked start another."""
    with contextlib.suppress(FileNotFoundError):  # it is gone
        fcntl.ioctl(listener, _SEND, asked + bytes(12) + _CONTINUE.to_bytes(4, "little"))
