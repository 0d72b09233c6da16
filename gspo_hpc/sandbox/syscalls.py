"""The system calls that a program in a sandbox may make, with their numbers on x86_64 and aarch64.

The numbers are those of the kernel's headers (asm/unistd_64.h and asm-generic/unistd.h), which never change; a test
compares them. A call that does not stand here does not exist for the program. So there are no sockets, no mounts, no
namespaces, no ptrace, no keys, no io_uring, no bpf, no userfaultfd, no shared memory of System V, and nothing that
changes the owner, the mode, the times or the attributes of a file, or the session and the group of a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MACHINES = ("x86_64", "aarch64")  # as uname says it; the columns of the tables

# Allowed, whatever the arguments are.
_FREE = """
# files
read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, lseek 8 62
pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70, preadv2 327 286
pwritev2 328 287, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78
getcwd 79 17, chdir 80 49, fchdir 81 50, getdents 78 -, getdents64 217 61, umask 95 166, statfs 137 43
fstatfs 138 44, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -
creat 85 -, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, unlink 87 -, unlinkat 263 35
ftruncate 77 46, fadvise64 221 223, fsync 74 82, fdatasync 75 83, flock 73 32, sendfile 40 71
copy_file_range 326 285, dup 32 23, dup2 33 -, dup3 292 24, close_range 436 436, pipe 22 -, pipe2 293 59
# memory
mprotect 10 226, munmap 11 215, mremap 25 216, msync 26 227, madvise 28 233, brk 12 214
# waiting
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21
epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, signalfd4 289 74
timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, futex 202 98
# time and signals
nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169
time 201 -, times 100 153, alarm 37 -, pause 34 -, getitimer 36 102, setitimer 38 103, timer_create 222 107
timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137
rt_sigsuspend 130 133, sigaltstack 131 132, restart_syscall 219 128
# processes
fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95
sched_yield 24 124, sched_getaffinity 204 123, set_tid_address 218 96, set_robust_list 273 99, rseq 334 293
membarrier 324 283, arch_prctl 158 -, getcpu 309 168
# what a process is
getpid 39 172, gettid 186 178, getppid 110 173, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174
geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150
getrlimit 97 163, setrlimit 160 164, getrusage 98 165, getpriority 140 141, uname 63 160, sysinfo 99 179
getrandom 318 278
# a pair of connected sockets, which asyncio needs
sendto 44 206, recvfrom 45 207, shutdown 48 210, getsockopt 55 209
"""

# Allowed for some arguments (seccomp.py), or answered otherwise.
_LIMITED = """
open 2 -, openat 257 56, mmap 9 222, ioctl 16 29, fcntl 72 25, clone 56 220, prctl 157 167, prlimit64 302 261
socketpair 53 199, kill 62 129, tgkill 234 131, fallocate 285 47
"""

# That start a process or a thread. The filter refuses clone3, whose arguments it cannot see; bubblewrap may use it.
_STARTING = "fork 57 -, vfork 58 -, clone 56 220, clone3 435 435"


def _table(text: str) -> Mapping[str, tuple[int | None, int | None]]:
    """Return the numbers of each call by its name; None where a machine does not have it."""
    found = {}
    for line in text.split("\n"):
        for entry in line.split(", ") if line and not line.startswith("#") else ():
            name, *numbers = entry.split()
            first, second = (None if number == "-" else int(number) for number in numbers)
            found[name] = (first, second)
    return MappingProxyType(found)


FREE = _table(_FREE)
LIMITED = _table(_LIMITED)
STARTING = _table(_STARTING)


def free(machine: str) -> list[int]:
    """Return the numbers of the calls that are always allowed on a machine."""
    return _numbers(FREE, machine)


def starting(machine: str) -> list[int]:
    """Return the numbers of the calls by which a process or a thread is started on a machine."""
    return _numbers(STARTING, machine)


def _numbers(table: Mapping[str, tuple[int | None, int | None]], machine: str) -> list[int]:
    column = MACHINES.index(machine)
    return sorted(number for numbers in table.values() if (number := numbers[column]) is not None)


def limited(name: str, machine: str) -> int | None:
    """Return the number of a call that is allowed for some arguments; None if a machine does not have it."""
    return LIMITED[name][MACHINES.index(machine)]
