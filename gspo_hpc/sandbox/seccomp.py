"""A filter of system calls for the kernel (seccomp), as a program of classic BPF.

It lists what is allowed: what it does not list fails with ENOSYS, so that libraries fall back to what they did before
the call existed. Calls of another architecture end the process.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator

from gspo_hpc.sandbox import syscalls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # BPF_LD|W|ABS, ALU|AND|K, JMP|JEQ|K, RET|K
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000  # SECCOMP_RET_*, the last USER_NOTIF
_DENIED, _ABSENT = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
_NO_MEMORY = _ERRNO | errno.ENOMEM

_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_IOCTLS = (0x5401, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONBIO, FIONREAD, FIONCLEX, FIOCLEX
# F_DUPFD to F_SETLKW, F_OFD_*, F_DUPFD_CLOEXEC, F_GET_SEALS; not F_SETOWN, which has the kernel send signals to others.
_FCNTLS = (*range(8), 36, 37, 38, 1030, 1034)
_PRCTLS = (15, 16)  # PR_SET_NAME, PR_GET_NAME; not PR_SET_PDEATHSIG, with which a program could outlive its parent
_AF_UNIX, _SOCK_STREAM = 1, 1
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED (a bit of MAP_SHARED_VALIDATE, too) and MAP_ANONYMOUS
_ACCESS_MODE, _TRUNCATE = 0o3, 0o1000  # of open

Instruction = tuple[int, int, int, int]


def program(machine: str, own_pid: int | None) -> bytes:
    """Return the filter for a machine ("x86_64" or "aarch64"), as an array of struct sock_filter.

    `own_pid`: the process may send signals to itself and its group only, which its children inherit. None: to
    everything that it sees, in a pid namespace of its own. Raises ValueError for another machine.
    """
    lines = _beginning(machine)
    for name, block in _blocks(own_pid):
        if (number := syscalls.limited(name, machine)) is not None:
            lines += [(_EQUAL, 0, len(block), number), *block]
    for number in syscalls.free(machine):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _ABSENT))
    return _packed(lines)


def asking(machine: str) -> bytes:
    """Return the filter that has the kernel ask the supervisor whether a process or thread may be started.

    It allows all else: it is loaded beside the other one (`program`), whose refusals count. Raises ValueError for
    another machine.
    """
    lines = _beginning(machine)
    for number in syscalls.starting(machine):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ASK)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return _packed(lines)


def _beginning(machine: str) -> list[Instruction]:
    """Return what ends a process that makes a call of another architecture, and loads the number of the call."""
    if machine not in _ARCHITECTURES:
        raise ValueError(f"no filter of system calls for {machine}: there is one for {' and '.join(_ARCHITECTURES)}")
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _packed(lines: Iterable[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _blocks(own_pid: int | None) -> Iterator[tuple[str, list[Instruction]]]:
    """Yield the part of the filter for each call whose arguments count. The kernel reads 32 bits of these arguments."""
    yield "open", _opened(1)
    yield "openat", _opened(2)
    yield "mmap", _not_shared_memory()
    yield "ioctl", _one_of(1, _IOCTLS)
    yield "fcntl", _one_of(1, _FCNTLS)
    yield "clone", _if(0, _NAMESPACES, 0)
    yield "prctl", _one_of(0, _PRCTLS)
    yield "prlimit64", _one_of(0, (0, *_own(own_pid)))
    # Datagrams could be sent to any address.
    family = [_argument(0), (_EQUAL, 1, 0, _AF_UNIX), (_RETURN, 0, 0, _DENIED)]
    yield "socketpair", [*family, *_if(1, 0xF, _SOCK_STREAM)]
    # It reserves a whole disk at once: the limit of a file does not hold for room beyond its end. For EOPNOTSUPP libc
    # writes instead, which takes its time and has that limit.
    yield "fallocate", [(_RETURN, 0, 0, _ERRNO | errno.EOPNOTSUPP)]
    signals = [(_RETURN, 0, 0, _ALLOW)]
    yield "kill", signals if own_pid is None else _one_of(0, (0, own_pid))
    yield "tgkill", signals if own_pid is None else _one_of(0, (own_pid,))


def _own(own_pid: int | None) -> Iterable[int]:
    return () if own_pid is None else (own_pid,)


def _argument(place: int) -> Instruction:
    """Return the instruction that loads the low half of an argument; both machines are little-endian."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * place)


def _one_of(place: int, values: Iterable[int]) -> list[Instruction]:
    tests = [line for value in values for line in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
    return [_argument(place), *tests, (_RETURN, 0, 0, _DENIED)]


def _if(place: int, mask: int, value: int) -> list[Instruction]:
    """Return what allows a call whose masked argument is a value; the last two lines end it either way."""
    return [
        _argument(place),
        (_AND, 0, 0, mask),
        (_EQUAL, 1, 0, value),
        (_RETURN, 0, 0, _DENIED),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _not_shared_memory() -> list[Instruction]:
    """Return what allows to map memory, but none that processes share without a file.

    Its pages stay when a process lets go of them or unmaps all but one, and then they count for no process.
    """
    return [
        _argument(3),
        (_AND, 0, 0, _SHARED_ANONYMOUS),
        (_EQUAL, 0, 1, _SHARED_ANONYMOUS),
        (_RETURN, 0, 0, _NO_MEMORY),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _opened(place: int) -> list[Instruction]:
    """Return what allows to open a file to read it, to write it or both.

    Landlock takes the mode 3 for neither, and until its third version did not see that a file is cut off which is
    opened to be read.
    """
    return [
        _argument(place),
        (_AND, 0, 0, _ACCESS_MODE | _TRUNCATE),
        (_EQUAL, 3, 0, _TRUNCATE),
        (_AND, 0, 0, _ACCESS_MODE),
        (_EQUAL, 1, 0, _ACCESS_MODE),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENIED),
    ]
