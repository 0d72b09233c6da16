"""This machine: memory, /dev/shm, limits, clock; what it can listen on and be reached at.

Floor 6. What is judged is handed in as numbers, so that every judgement can be tried with any of them.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc import doctor_sizes
from gspo_hpc.config import Config
from gspo_hpc.doctor_finding import Section, gib

_UNLIMITED = resource.RLIM_INFINITY
# A rank has a few hundred files and threads: sockets to all others, shards of weights, engines, graders, W&B. Below the
# first a start fails, below the second a large one may.
_FILES = (512, 4096)
_PROCESSES = (512, 4096)
_PORTS = 1000  # that the kernel hands out; NCCL and gloo open many between ranks
_SKEW = (1.0, 60.0)  # seconds: worth a word; near what munge refuses (its credentials live 300 s)


@dataclass(frozen=True)
class Space:
    """Of a file system, in bytes."""

    size: int
    free: int


def judge_memory(
    section: Section, available: int, needed: int | None, why: str = "", *, sleeping: bool = False
) -> None:
    """Memory of this machine that a run can have, against what the plan puts there. `sleeping`: weights of engines that
    sleep at level 1 are among it."""
    if needed is None:
        section.ok("memory", f"{gib(available)} available{why}")
        return
    text = f"{gib(available)} available{why}; trainer and engines of a node take {gib(needed)} and more"
    fix = "rollout.sleep_level=2, " * sleeping + (
        "fewer ranks a node, optimizer.distributed=true, memory.offload_trainer=false or checkpoint.async_save=false; "
        "slurm.mem=0 asks for all of a node"
    )
    if available < needed:
        section.fail("memory", text, fix)
    elif available < 1.25 * needed:
        section.warn("memory", f"{text}: little is left", fix)
    else:
        section.ok("memory", text)


def judge_shm(section: Section, space: Space | None, needed: int) -> None:
    """/dev/shm against what NCCL and vLLM put there. None: there is none."""
    fix = "root: mount -o remount,size=50% /dev/shm; containers: --shm-size, --ipc=host or a bind of /dev/shm"
    if space is None:
        section.fail("/dev/shm", "not there", fix)
        return
    text = f"{gib(space.free)} free of {gib(space.size)}; about {gib(needed)} are needed"
    if space.free < needed:
        if space.size >= 2 * needed:
            fix = "what killed processes left there: ls -l /dev/shm, and remove what is yours"
        section.fail("/dev/shm", text, fix)
    elif space.free < 2 * needed:
        section.warn("/dev/shm", text, fix)
    else:
        section.ok("/dev/shm", text)


def judge_limits(section: Section, limits: Mapping[str, tuple[int, int]], needed: int | None, rdma: bool) -> None:
    """(soft, hard) of RLIMIT_NOFILE, NPROC, MEMLOCK, CORE, AS by these names. `needed`: bytes of memory, if known."""

    def lowest(name: str, what: str, bounds: tuple[int, int], letter: str) -> None:
        soft, hard = limits[name]
        if soft == _UNLIMITED or soft >= bounds[1]:
            section.ok(what, "unlimited" if soft == _UNLIMITED else f"{soft:,}")
            return
        raised = "unlimited" if hard == _UNLIMITED else str(hard)
        fix = f"ulimit -{letter} {raised} (a line of slurm.setup)"
        if hard != _UNLIMITED and hard < bounds[1]:
            fix = f"root: raise the hard limit ({hard:,}) in limits.conf, and LimitNOFILE/LimitNPROC of slurmd"
        text = f"{soft:,}; {bounds[1]:,} or more is good"
        section.add("fail" if soft < bounds[0] else "warn", what, text, fix)

    lowest("NOFILE", "open files", _FILES, "n")
    lowest("NPROC", "processes", _PROCESSES, "u")
    locked = limits["MEMLOCK"][0]
    if locked == _UNLIMITED or not rdma:
        section.ok("locked memory", "unlimited" if locked == _UNLIMITED else f"{gib(locked)}; no InfiniBand here")
    else:
        fix = "ulimit -l unlimited; root: LimitMEMLOCK=infinity of slurmd, PropagateResourceLimitsExcept=MEMLOCK"
        section.warn("locked memory", f"{gib(locked)}: NCCL cannot register its buffers for InfiniBand", fix)
    space = limits["AS"][0]
    if space != _UNLIMITED:
        text = f"{gib(space)} of addresses: CUDA and torch reserve far more than they use"
        small = needed is not None and space < needed
        section.add("fail" if small else "warn", "virtual memory", text, "ulimit -v unlimited")
    core = limits["CORE"][0]
    if core == 0:
        section.ok("core files", "off")
    else:
        size = "of any size" if core == _UNLIMITED else f"up to {gib(core)}"
        section.warn("core files", f"{size}: a rank that crashes writes its memory to disk", "ulimit -c 0")


def judge_clock(section: Section, skew: float, against: str) -> None:
    """Seconds that this clock is ahead of another."""
    text = f"{abs(skew):.2f} s {'ahead of' if skew > 0 else 'behind'} {against}"
    fix = "root: chronyc makestep, or timedatectl set-ntp true"
    if abs(skew) > _SKEW[1]:
        section.fail("clock", f"{text}: munge refuses credentials of clocks that differ much", fix)
    elif abs(skew) > _SKEW[0]:
        section.warn("clock", f"{text}: times in logs do not fit together", fix)
    else:
        section.ok("clock", f"within {_SKEW[0]:.0f} s of {against}")


def judge_names(section: Section, host: str, addresses: Sequence[str], nodes: int) -> None:
    """What this host's own name means, to itself."""
    outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
    if outside:
        section.ok("host name", f"{host} is {', '.join(outside)}")
    elif not addresses:
        fix = "a line for it in /etc/hosts, or in DNS"
        section.add("fail" if nodes > 1 else "warn", "host name", f"{host} does not resolve here", fix)
    else:
        text = f"{host} is {', '.join(addresses)}, where no other node reaches it"
        fix = (
            "take it off the line of 127.0.0.1 in /etc/hosts; ranks use what Slurm has as NodeAddr, NCCL its interfaces"
        )
        section.add("warn" if nodes > 1 else "ok", "host name", text, fix if nodes > 1 else "")


def judge_port(section: Section, check: str, address: str, error: OSError | None) -> None:
    """Whether a port could be listened on and reached at an address."""
    if error is None:
        section.ok(check, f"{address}: can be listened on and reached")
        return
    fix = (
        "another port, or end who has it (ss -ltnp)"
        if error.errno == errno.EADDRINUSE
        else "a firewall or its rules: iptables -L"
    )
    section.fail(check, f"{address}: {error.strerror or error}", fix)


def host(config: Config, needed: int | None, shm: int) -> Section:
    """All lines of the group for this machine. `needed` and `shm` in bytes."""
    section = Section("host")
    available, bounded = available_memory()
    sleeping = doctor_sizes.sleeping(config)
    judge_memory(section, available, needed, " to this job" if bounded else "", sleeping=sleeping)
    judge_shm(section, space_of("/dev/shm"), shm)
    temporary = space_of("/tmp")
    if temporary is None or not os.access("/tmp", os.W_OK):
        section.fail("/tmp", "cannot be written", "sockets and caches go there: TMPDIR, or ask for it")
    elif temporary.free < 2**30:
        section.warn(
            "/tmp", f"{gib(temporary.free)} free", "caches of compiled kernels go there: free some, or set TMPDIR"
        )
    else:
        section.ok("/tmp", f"{gib(temporary.free)} free")
    judge_limits(section, read_limits(), needed, rdma=has_rdma())
    cores = len(os.sched_getaffinity(0))
    ranks = config.cluster.gpus_per_node
    if cores < ranks:
        fix = f"slurm.cpus_per_task=2, or fewer ranks: cluster.gpus_per_node={max(1, cores)}"
        section.warn("cores", f"{cores} for {ranks} ranks and their engines", fix)
    else:
        section.ok("cores", f"{cores}")
    return section


def network(nodes: int, port: int = 0) -> Section:
    """What this machine can listen on, and reach. `port`: 0 for any that is free, which is what runs use."""
    section = Section("network")
    judge_port(section, "loopback", "127.0.0.1", try_port("127.0.0.1", port))
    name = socket.gethostname()
    found = addresses_of(name)
    judge_names(section, name, found, nodes)
    for address in found[:1]:
        if not address.startswith("127."):
            judge_port(section, "own address", address, try_port(address, port))
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return section
    if high - low < _PORTS:
        fix = "root: sysctl net.ipv4.ip_local_port_range='32768 60999'"
        section.warn("ports", f"{low} to {high}: {high - low + 1} that the kernel can hand out", fix)
    else:
        section.ok("ports", f"{low} to {high}, handed out by the kernel; none is fixed")
    return section


def try_port(address: str, port: int = 0) -> OSError | None:
    """Listen at an address, and connect to it; what went wrong."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, port), family=family) as server:
            with socket.create_connection(server.getsockname()[:2], timeout=5.0):
                return None
    except OSError as error:
        return error


def addresses_of(name: str) -> list[str]:
    """What a host name resolves to here; nothing where it does not."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def read_limits() -> dict[str, tuple[int, int]]:
    """(soft, hard) of this process."""
    names = ("NOFILE", "NPROC", "MEMLOCK", "CORE", "AS")
    return {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names}


def has_rdma() -> bool:
    """Whether there is an InfiniBand or RoCE device."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def space_of(path: str | Path) -> Space | None:
    """None where there is no such folder."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return Space(stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail)


def total_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> tuple[int, bool]:
    """Bytes that this process can still have, and whether a control group bounds them, not the machine."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    values = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    free = values.get("MemAvailable", values.get("MemFree", 0))
    bound = _cgroup_room()
    return (bound, True) if bound is not None and bound < free else (free, False)


def skew_of(folder: Path) -> float:
    """Seconds that this clock is ahead of the one that dates files in `folder`."""
    path = folder / f".doctor-clock-{os.getpid()}-{time.monotonic_ns()}"
    path.touch(mode=0o600, exist_ok=False)
    try:
        with path.open("wb", buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
            now, dated = time.time(), os.fstat(file.fileno()).st_mtime
        return now - dated
    finally:
        path.unlink(missing_ok=True)


def _cgroup_room() -> int | None:
    """What the control groups of this process leave it; None where they set no bound."""
    rooms = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, files = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        at = root / path.lstrip("/")
        while at != root.parent:
            try:
                bound, used = (int((at / name).read_text()) for name in files)
                rooms.append(bound - used)
            except (OSError, ValueError):  # no such file; or "max"
                pass
            at = at.parent
    return max(0, min(rooms)) if rooms else None
