"""The filter of system calls: its numbers, and what it answers on machines of both kinds.

It takes under a second. The filter for aarch64 cannot be loaded on another machine, so both are interpreted here, as
the kernel does it; on the machine at hand test_refused.py makes the calls. It would catch a wrong number in the tables,
a jump that leads past a test of arguments, and an argument that is let through.
"""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from gspo_hpc.sandbox import seccomp, syscalls

HEADERS = {  # of Debian's linux-libc-dev, which comes with the C++ compiler
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ASK = 0x7FC00000
ALLOW, KILL, PERM, NOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
NOMEM = 0x50000 | errno.ENOMEM
PID = 4711


def numbers(machine: str) -> dict[str, int]:
    """The numbers of system calls by name, from the kernel's header."""
    text = HEADERS[machine].read_text()
    found = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", text)}
    others = re.findall(r"#define __NR_(\w+) __NR3264_(\w+)", text)
    return found | {name: found[other] for name, other in others if other in found}


def answer(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Interpret a filter for one call; the instructions are those that filters here consist of."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(one % 2**64 for one in (*arguments, *[0] * 6)[:6]))
    lines = list(struct.iter_unpack("=HBBI", program))
    place, register = 0, 0
    while True:
        code, then, otherwise, value = lines[place]
        place += 1
        if code == 0x20:
            (register,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            register &= value
        elif code == 0x15:
            place += then if register == value else otherwise
        else:
            assert code == 0x06
            return value


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    known, column = numbers(machine), syscalls.MACHINES.index(machine)
    for name, pair in (syscalls.FREE | syscalls.LIMITED | syscalls.STARTING).items():
        assert pair[column] == known.get(name), name


# Call, arguments, answer. Flags of open: 0o1 write, 0o100 create, 0o1000 cut off; the same on both machines.
CALLS = [
    *[("openat", (0, 0, flags), ALLOW) for flags in (0, 0o1, 0o2, 0o1101, 0o1102, 0o2000000)],
    *[("openat", (0, 0, flags), PERM) for flags in (0o1000, 0o1003, 0o3, 0o2001000)],
    *[("mmap", (0, 4096, 3, flags), ALLOW) for flags in (0x1, 0x2, 0x3, 0x22, 0x4022, 0x20022)],
    *[("mmap", (0, 4096, 3, flags), NOMEM) for flags in (0x21, 0x23, 0x8021, 0x40021)],
    ("ioctl", (1, 0x5401), ALLOW),
    ("ioctl", (1, 0x5412), PERM),  # TIOCSTI, which types for the user
    ("ioctl", (1, 0x5401 | 1 << 32), ALLOW),  # the kernel reads 32 bits
    *[("fcntl", (1, command), ALLOW) for command in (0, 1, 2, 3, 4, 1030)],
    *[("fcntl", (1, command), PERM) for command in (8, 10, 15, 1024, 1031)],  # F_SETOWN, F_SETSIG, F_SETOWN_EX, ...
    ("clone", (0x3D0F00,), ALLOW),  # a thread
    ("clone", (0x1200011,), ALLOW),  # a process
    *[("clone", (17 | flag,), PERM) for flag in (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)],
    *[("fallocate", (1, mode, 0, 1 << 40), 0x50000 | errno.EOPNOTSUPP) for mode in (0, 1, 3)],
    ("prctl", (15,), ALLOW),
    *[("prctl", (option,), PERM) for option in (1, 4, 22, 36, 0x59616D61)],
    ("prlimit64", (0,), ALLOW),
    ("prlimit64", (PID,), ALLOW),
    ("prlimit64", (1,), PERM),
    ("socketpair", (1, 1), ALLOW),
    ("socketpair", (1, 1 | 0o2004000), ALLOW),
    *[("socketpair", (family, kind), PERM) for family, kind in ((1, 2), (1, 5), (2, 1), (16, 1), (0, 1))],
    ("kill", (PID, 9), ALLOW),
    ("kill", (0, 9), ALLOW),
    *[("kill", (who, 9), PERM) for who in (1, -1, -PID, PID + 1)],
    ("tgkill", (PID, PID, 6), ALLOW),
    ("tgkill", (1, 1, 6), PERM),
    *[(name, (), ALLOW) for name in ("read", "write", "mmap", "execve", "futex", "exit_group", "getrandom")],
    *[(name, (), NOSYS) for name in ("socket", "connect", "bind", "sendmsg", "ptrace", "mount", "unshare", "setns")],
    *[(name, (), NOSYS) for name in ("bpf", "io_uring_setup", "keyctl", "userfaultfd", "process_vm_readv", "clone3")],
    *[(name, (), NOSYS) for name in ("setsid", "setpgid", "fchmodat", "fchownat", "utimensat", "setxattr", "truncate")],
    *[(name, (), NOSYS) for name in ("setuid", "capset", "tkill", "pidfd_open", "memfd_create", "mknodat", "chroot")],
]


@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS)
@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_calls_are_answered_by_their_arguments(
    machine: str, name: str, arguments: tuple[int, ...], expected: int
) -> None:
    program = seccomp.program(machine, PID)
    assert answer(program, ARCHITECTURES[machine], numbers(machine)[name], arguments) == expected


def test_open_is_tested_as_openat_is() -> None:
    program = seccomp.program("x86_64", PID)
    assert [answer(program, 0xC000003E, 2, (0, flags)) for flags in (0, 0o1000, 0o3)] == [ALLOW, PERM, PERM]


def test_signals_are_free_in_a_namespace_of_its_own() -> None:
    program = seccomp.program("x86_64", None)
    assert answer(program, 0xC000003E, 62, (1, 9)) == ALLOW and answer(program, 0xC000003E, 234, (1, 1, 9)) == ALLOW


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    program = seccomp.program(machine, PID)
    for architecture in {*ARCHITECTURES.values(), 0x40000003} - {ARCHITECTURES[machine]}:
        assert answer(program, architecture, 63) == KILL


def test_numbers_of_x32_do_not_exist() -> None:
    program = seccomp.program("x86_64", PID)
    assert all(answer(program, 0xC000003E, 0x40000000 | number) == NOSYS for number in range(600))


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_nothing_else_is_allowed(machine: str) -> None:
    known, column = numbers(machine), syscalls.MACHINES.index(machine)
    program, free = seccomp.program(machine, PID), set(syscalls.free(machine))
    limited = {pair[column] for pair in syscalls.LIMITED.values()}
    for name, number in known.items():
        if number not in free | limited:
            assert answer(program, ARCHITECTURES[machine], number) == NOSYS, name


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_whatever_starts_a_process_is_asked_for(machine: str) -> None:
    program, known = seccomp.asking(machine), numbers(machine)
    starting = {name for name in ("fork", "vfork", "clone", "clone3") if name in known}
    for name, number in known.items():
        assert answer(program, ARCHITECTURES[machine], number) == (ASK if name in starting else ALLOW), name
    assert answer(program, 0x40000003, 2) == KILL


def test_other_machines_have_no_filter() -> None:
    with pytest.raises(ValueError, match="no filter of system calls for riscv64: there is one for x86_64 and aarch64"):
        seccomp.program("riscv64", PID)
