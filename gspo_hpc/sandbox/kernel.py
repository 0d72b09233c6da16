"""Requests of a process to the kernel about itself, by libc: Landlock, a filter of system calls, no privileges.

Linux only. Nothing here needs root or a namespace. Everything raises OSError where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, _FILTER = 47, 4, 2
_CAPABILITY_VERSION_3 = 0x20080522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock; the same on every machine
_SECCOMP = {"x86_64": 317, "aarch64": 277}
# SECCOMP_SET_MODE_FILTER; SECCOMP_FILTER_FLAG_NEW_LISTENER and WAIT_KILLABLE_RECV (Linux 5.19)
_SET_FILTER, _LISTENER, _KILLABLE = 1, 1 << 3, 1 << 5
_VERSION, _PATH_BENEATH = 1, 1  # LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH
# Rights on files: execute, write, read, list; remove folders and files; make devices, folders, files, sockets, pipes,
# block devices, links; move between folders (from version 2 on), cut off (3), control devices (5).
_EXECUTE, _READ, _LIST, _REFER, _TRUNCATE, _CONTROL = 1 << 0, 1 << 2, 1 << 3, 1 << 13, 1 << 14, 1 << 15
_WRITE, _REMOVE, _MAKE = 1 << 1, 1 << 4 | 1 << 5, 1 << 7 | 1 << 8 | 1 << 12
_TCP, _SCOPES = 0b11, 0b11  # bind and connect (version 4); abstract Unix sockets and signals (version 6)

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; 0 where it has none, or does not use it."""
    found = int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))
    return max(0, found)


def adopt_orphans() -> None:
    """Have descendants whose parents ended become children of this process, so that none can get away."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent, which has this process id, is gone."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def gain_no_privileges() -> None:
    """Have no program that this process becomes or starts give it more privileges, a set-user-id one either."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def drop_privileges() -> None:
    """Give up every capability for good; a set-user-id program that this process starts has none either."""
    gain_no_privileges()
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):  # fails for those that the kernel does not know, and for who has none
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def only_these_files(readable: Iterable[str], usable: Iterable[str], own: str) -> None:
    """Confine this process to files: it reads and runs what lies in `readable`, and may write to what is in `own`.

    `usable` are devices that it may read and write. Paths that are not there are left out. Also no TCP connections, and
    no signals to processes that are not confined with it, as far as the version of Landlock knows these.
    """
    version = landlock_version()
    handled = (1 << 13) - 1  # the rights of version 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _CONTROL)):
        handled |= right if version >= since else 0
    attributes = struct.pack("=QQQ", handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0), "landlock_create_ruleset")
    for path in readable:
        _allow(ruleset, path, _EXECUTE | _READ | _LIST)
    for path in usable:
        _allow(ruleset, path, _READ | _WRITE)
    _allow(ruleset, own, handled & (_READ | _LIST | _WRITE | _REMOVE | _MAKE | _REFER | _TRUNCATE))
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _EXECUTE | _READ | _WRITE | _TRUNCATE
        rule = struct.pack("=Qi", rights, place)
        _checked(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


class _Filter(ctypes.Structure):  # struct sock_fprog
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_void_p)]


def only_these_calls(program: bytes) -> None:
    """Load a filter of system calls (seccomp.py). It holds for this process, what it becomes and what it starts."""
    lines = ctypes.create_string_buffer(program, len(program))
    loaded = _Filter(len(program) // 8, ctypes.addressof(lines))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(loaded), 0, 0), "PR_SET_SECCOMP")


def ask_before_calls(program: bytes) -> int:
    """Load a filter of system calls that asks (seccomp.asking); return the file descriptor that questions come from.

    It holds for this process, what it becomes and what it starts. A call waits for its answer. From Linux 5.19 on no
    signal but SIGKILL ends this wait, so that `fork` is not interrupted.
    """
    lines = ctypes.create_string_buffer(program, len(program))
    loaded = _Filter(len(program) // 8, ctypes.addressof(lines))
    number = _SECCOMP[os.uname().machine]
    for flags in (_LISTENER | _KILLABLE, _LISTENER):
        listener = int(_libc.syscall(number, _SET_FILTER, flags, ctypes.byref(loaded)))
        if listener >= 0 or ctypes.get_errno() != errno.EINVAL:
            break
    return _checked(listener, "SECCOMP_FILTER_FLAG_NEW_LISTENER")


def limit(*, memory: int, cpu_seconds: int, file_bytes: int, tasks: int) -> None:
    """Limit this process and those that it starts, each by itself: memory and file size in bytes.

    `tasks` counts processes and threads of the user on this machine; root has no such limit.
    """
    for name, value in (
        ("AS", memory),
        ("CPU", cpu_seconds),
        ("FSIZE", file_bytes),
        ("NPROC", tasks),
        ("NOFILE", 128),
        ("CORE", 1),  # a dump of more is not written, and with 1 none is piped to a program either
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
        ("SIGPENDING", 256),
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        given = resource.getrlimit(number)[1]
        value = value if given == resource.RLIM_INFINITY else min(value, given)
        resource.setrlimit(number, (value, value))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)
