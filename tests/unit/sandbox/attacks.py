"""A program that attempts, in a sandbox, what none may do. It prints which attempts were refused, as JSON.

An attempt is a function that returns if it succeeds and raises OSError if it is refused. `FACTS` names what the test
has put there for it (files, sockets and a process of its own), and the attempts to make.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = {}
ATTEMPTS: dict[str, Callable[[], object]] = {}

libc = ctypes.CDLL(None, use_errno=True)


def attempt(function: Callable[[], object]) -> Callable[[], object]:
    """Register an attempt by its name."""
    ATTEMPTS[function.__name__] = function
    return function


def must(result: int) -> int:
    """Raise OSError for the result of a function of libc that failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# --- What it was started with ---


@attempt
def finds_a_secret_in_its_environment() -> object:
    if FACTS["word"] in json.dumps(dict(os.environ)):
        return None
    raise FileNotFoundError(2, "no such variable")


@attempt
def has_inherited_a_file() -> object:
    for number in range(3, 1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        return number
    raise OSError(9, "none is open")


# --- Files ---


@attempt
def reads_the_run() -> object:
    return Path(FACTS["secret"]).read_text()


@attempt
def lists_the_run() -> object:
    return os.listdir(FACTS["run"])


@attempt
def reads_the_run_through_a_symbolic_link() -> object:
    os.symlink(FACTS["secret"], "link")
    return Path("link").read_text()


@attempt
def reads_the_run_through_a_link_to_its_folder() -> object:
    os.symlink(FACTS["run"], "folder")
    return Path("folder/secret").read_text()


@attempt
def reads_the_run_through_a_hard_link() -> object:
    os.link(FACTS["secret"], "hard")
    return Path("hard").read_text()


@attempt
def reads_the_run_by_way_of_dots() -> object:
    return Path(f"../../../../../../../..{FACTS['secret']}").read_text()


@attempt
def reads_home() -> object:
    for path in FACTS["home"]:
        try:
            return Path(path).read_bytes()
        except OSError:
            continue
    raise PermissionError(13, "none of its files can be read")


@attempt
def reads_shadow() -> object:
    return Path("/etc/shadow").read_text()


@attempt
def lists_other_sandboxes() -> object:
    return os.listdir(FACTS["temporary"])


@attempt
def writes_over_a_file() -> object:
    return Path(FACTS["secret"]).write_text("mine")


@attempt
def writes_beside_a_file() -> object:
    return Path(FACTS["run"], "new").write_text("mine")


@attempt
def writes_through_a_symbolic_link() -> object:
    os.symlink(f"{FACTS['run']}/linked", "linked")
    return Path("linked").write_text("mine")


@attempt
def moves_a_file_out() -> object:
    Path("mine").write_text("mine")
    return os.rename("mine", f"{FACTS['run']}/moved")


@attempt
def moves_a_file_in() -> object:
    return os.rename(FACTS["library"], "taken")


@attempt
def links_a_library_in() -> object:
    return os.link(FACTS["library"], "taken")


@attempt
def writes_to_a_library() -> object:
    return Path(FACTS["library"]).write_text("mine")


@attempt
def removes_a_library() -> object:
    return os.unlink(FACTS["library"])


@attempt
def cuts_a_library_off() -> object:
    return os.truncate(FACTS["library"], 0)


@attempt
def cuts_a_library_off_when_it_reads_it() -> object:
    return os.open(FACTS["library"], os.O_RDONLY | os.O_TRUNC)


@attempt
def cuts_a_library_off_with_the_fourth_mode() -> object:
    return os.open(FACTS["library"], 3 | os.O_TRUNC)


@attempt
def changes_the_mode_of_a_library() -> object:
    return os.chmod(FACTS["library"], 0o666)


@attempt
def changes_the_owner_of_a_library() -> object:
    return os.chown(FACTS["library"], os.getuid(), os.getgid())


@attempt
def changes_the_times_of_a_library() -> object:
    return os.utime(FACTS["library"])


@attempt
def gives_a_library_an_attribute() -> object:
    return os.setxattr(FACTS["library"], "user.mine", b"1")


@attempt
def makes_a_file_without_a_name_among_libraries() -> object:
    return os.open(os.path.dirname(FACTS["library"]), os.O_TMPFILE | os.O_RDWR)


@attempt
def writes_to_tmp() -> object:
    return Path("/tmp/gspo-attack").write_text("mine")


@attempt
def writes_to_shared_memory() -> object:
    return Path("/dev/shm/gspo-attack").write_text("mine")


@attempt
def writes_to_var_tmp() -> object:
    return Path("/var/tmp/gspo-attack").write_text("mine")


@attempt
def reserves_the_disk() -> object:
    """Take room beyond the end of a file, for which the limit of its size does not hold."""
    with open("reserved", "w") as file:
        try:
            keep_size, size = ctypes.c_int(1), ctypes.c_long(1 << 26)
            return must(libc.fallocate(file.fileno(), keep_size, ctypes.c_long(0), size))
        finally:
            os.unlink("reserved")


@attempt
def makes_a_device() -> object:
    return os.mknod("device", 0o600 | 0o020000, os.makedev(1, 1))


@attempt
def opens_the_memory_of_the_machine() -> object:
    return os.open("/dev/mem", os.O_RDONLY)


@attempt
def opens_the_log_of_the_kernel() -> object:
    return os.open("/dev/kmsg", os.O_RDONLY)


@attempt
def opens_the_terminal() -> object:
    return os.open("/dev/tty", os.O_RDWR)


@attempt
def makes_a_program_that_changes_the_user() -> object:
    Path("program").write_text("#!/bin/sh\nid\n")
    return os.chmod("program", 0o4755)


# --- Other processes ---


@attempt
def reads_the_environment_of_a_process() -> object:
    return Path(f"/proc/{FACTS['victim']}/environ").read_bytes()


@attempt
def reads_the_command_of_a_process() -> object:
    return Path(f"/proc/{FACTS['victim']}/cmdline").read_bytes()


@attempt
def reads_the_memory_of_its_parent() -> object:
    return os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY)


@attempt
def reads_files_through_a_process() -> object:
    return Path(f"/proc/{FACTS['victim']}/root{FACTS['secret']}").read_text()


@attempt
def reads_what_another_has_open() -> object:
    return os.listdir(f"/proc/{os.getppid()}/fd")


@attempt
def lists_processes() -> object:
    return os.listdir("/proc")


@attempt
def traces_its_parent() -> object:
    return must(libc.ptrace(16, os.getppid(), 0, 0))  # PTRACE_ATTACH


@attempt
def traces_a_process() -> object:
    return must(libc.ptrace(16, FACTS["victim"], 0, 0))


@attempt
def reads_another_memory() -> object:
    return must(libc.process_vm_readv(FACTS["victim"], None, 0, None, 0, 0))


@attempt
def sends_a_signal() -> object:
    return os.kill(FACTS["victim"], signal.SIGUSR1)


@attempt
def asks_for_a_process_by_signal() -> object:
    return os.kill(FACTS["victim"], 0)


@attempt
def sends_a_signal_to_its_parent() -> object:
    parent = os.getppid()
    if parent <= 1:
        raise ProcessLookupError(3, "its parent is the first process of its own namespace, or none that it sees")
    return os.kill(parent, 0)


@attempt
def sends_a_signal_to_a_group() -> object:
    return os.killpg(FACTS["victim"], 0)


@attempt
def sends_a_signal_by_a_file() -> object:
    return signal.pidfd_send_signal(os.pidfd_open(FACTS["victim"]), 0)


@attempt
def has_the_kernel_send_signals() -> object:
    here, _ = os.pipe()
    return fcntl.fcntl(here, fcntl.F_SETOWN, FACTS["victim"])


@attempt
def limits_another_process() -> object:
    return resource.prlimit(FACTS["victim"], resource.RLIMIT_CPU, (60, 60))


@attempt
def moves_another_process_to_a_core() -> object:
    return os.sched_setaffinity(FACTS["victim"], {0})


@attempt
def slows_another_process() -> object:
    return os.setpriority(os.PRIO_PROCESS, FACTS["victim"], 19)


@attempt
def leaves_its_session() -> object:
    if (child := os.fork()) == 0:
        try:
            os.setsid()
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise PermissionError(1, "refused in a child")
    return None


@attempt
def leaves_its_group() -> object:
    if (child := os.fork()) == 0:
        try:
            os.setpgid(0, 0)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise PermissionError(1, "refused in a child")
    return None


@attempt
def outlives_its_parent() -> object:
    return must(libc.prctl(1, 0, 0, 0, 0))  # PR_SET_PDEATHSIG


# --- The network ---


@attempt
def connects_by_tcp() -> object:
    return socket.create_connection(("127.0.0.1", FACTS["port"]), 2.0)


@attempt
def connects_by_tcp_over_ipv6() -> object:
    return socket.socket(socket.AF_INET6).connect(("::1", FACTS["port"]))


@attempt
def listens() -> object:
    return socket.create_server(("127.0.0.1", 0))


@attempt
def sends_a_datagram() -> object:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"mine", ("127.0.0.1", FACTS["port"]))


@attempt
def connects_to_a_unix_socket() -> object:
    return socket.socket(socket.AF_UNIX).connect(FACTS["socket"])


@attempt
def connects_to_an_abstract_socket() -> object:
    return socket.socket(socket.AF_UNIX).connect(b"\0" + FACTS["abstract"].encode())


@attempt
def sends_from_a_pair_of_sockets() -> object:
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return ours.sendto(b"mine", FACTS["datagrams"])


@attempt
def asks_the_kernel_by_netlink() -> object:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)


@attempt
def sends_raw_packets() -> object:
    return socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)


@attempt
def reads_packets() -> object:
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)


@attempt
def talks_to_a_virtual_machine() -> object:
    return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)


# --- Privileges and the kernel ---


@attempt
def becomes_another_user() -> object:
    return os.setuid(1)


@attempt
def changes_its_groups() -> object:
    return os.setgroups([])


@attempt
def makes_a_user_namespace() -> object:
    return must(libc.unshare(0x10000000))


@attempt
def makes_a_child_in_a_user_namespace() -> object:
    child = must(libc.syscall(FACTS["calls"]["clone"], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0))
    if child == 0:
        os._exit(0)
    return os.waitpid(child, 0)


@attempt
def mounts() -> object:
    return must(libc.mount(b"none", b"/sandbox", b"tmpfs", 0, None))


@attempt
def changes_its_root() -> object:
    return os.chroot(".")


@attempt
def raises_its_limits() -> object:
    return resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@attempt
def locks_memory() -> object:
    region = mmap.mmap(-1, 1 << 20)
    return must(libc.mlock(ctypes.addressof(ctypes.c_char.from_buffer(region)), 1 << 20))


@attempt
def makes_a_file_in_memory() -> object:
    return os.memfd_create("mine")


def _call(name: str, *arguments: int) -> Callable[[], object]:
    return lambda: must(libc.syscall(FACTS["calls"][name], *arguments))


for _name, _arguments in {
    **{"bpf": (0, 0, 0), "io_uring_setup": (8, 0), "add_key": (0, 0, 0, 0, 0), "keyctl": (0, 0, 0)},
    **{"userfaultfd": (1,), "perf_event_open": (0, 0, -1, -1, 0), "setns": (0, 0), "pivot_root": (0, 0)},
    **{"shmget": (0, 4096, 0o1600), "msgget": (0, 0o1600), "mq_open": (0, 0), "personality": (0x0040000,)},
    **{"kexec_load": (0, 0, 0, 0), "init_module": (0, 0, 0), "quotactl": (0, 0, 0, 0), "syslog": (3, 0, 0)},
    **{
        "pidfd_getfd": (0, 0, 0),
        "process_madvise": (0, 0, 0, 0, 0),
        "kcmp": (1, 1, 0, 0, 0),
        "open_by_handle_at": (0, 0),
    },
    **{
        "clone3": (0, 88),
        "openat2": (0, 0, 0, 0),
        "fanotify_init": (0, 0),
        "inotify_init1": (0,),
        "seccomp": (1, 0, 0),
    },
}.items():
    ATTEMPTS[f"calls_{_name}"] = _call(_name, *_arguments)


# --- What is left behind ---


@attempt
def leaves_a_core_file() -> object:
    if (child := os.fork()) == 0:
        os.abort()
    os.waitpid(child, 0)
    if any(name.startswith("core") for name in os.listdir(".")):
        return None
    raise FileNotFoundError(2, "there is none")


def main() -> None:
    """Make the attempts that are wanted, each for itself, and print what became of them."""
    FACTS.update(json.loads(sys.stdin.read()))
    found = {}
    for name in FACTS["attempts"]:
        try:
            found[name] = f"succeeded: {ATTEMPTS[name]()!r}"
        except (OSError, ValueError) as error:  # ValueError: of limits that are raised
            found[name] = f"refused: {error}"
    assert threading.active_count() == 1
    print(json.dumps(found))


if __name__ == "__main__":
    main()
