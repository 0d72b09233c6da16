"""Checks of this machine: memory, /dev/shm, limits, clock, and the addresses at which it can be reached.

The functions judge_* take numbers, so that a test can try each with any of them.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import shutil
import socket
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.config.derived import busy_processes, cpus_per_task, engines_per_node
from gspo_hpc.config.schema import Config, Sandbox, replace
from gspo_hpc.doctor import sizes
from gspo_hpc.doctor.finding import Section, gib, shortened
from gspo_hpc.sandbox import runner
from gspo_hpc.sandbox.outcomes import KINDS
from gspo_hpc.system import host_memory
from gspo_hpc.system.text import GIB, counted

_UNLIMITED = resource.RLIM_INFINITY
# A rank has a few hundred files and threads: sockets to all others, shards of weights, engines, reward functions, W&B.
# Below the first number a start fails; below the second that of a large run may.
_FILES = (512, 4096)
_PROCESSES = (512, 4096)
_PORTS = 1000  # the kernel assigns them; NCCL and gloo open many between ranks
_SKEW = (1.0, 60.0)  # seconds: worth a warning; near what munge refuses (its credentials are valid for 300 s)


@dataclass(frozen=True)
class Space:
    """Size and free space of a file system, in bytes."""

    size: int
    free: int


def judge_memory(
    section: Section, available: int, needed: int | None, why: str = "", *, sleeping: bool = False
) -> None:
    """Compare the available memory with what the plan puts there.

    `sleeping`: engines that sleep at level 1 keep their weights there.
    """
    if needed is None:
        section.ok("memory", f"{gib(available)} are available{why}")
        return
    text = f"{gib(available)} are available{why}; trainer and engines of a node need at least {gib(needed)}"
    fix = (
        "set "
        + "rollout.sleep_level=2, " * sleeping
        + (
            "optimizer.distributed=true, memory.offload_trainer=false or checkpoint.async_save=false, or use fewer "
            "ranks per node; slurm.mem=0 requests all memory of a node"
        )
    )
    if available < needed:
        section.fail("memory", text, fix)
    elif available < 1.25 * needed:
        section.warn("memory", f"{text}, so little is left", fix)
    else:
        section.ok("memory", text)


def judge_shm(section: Section, space: Space | None, needed: int) -> None:
    """Compare /dev/shm with what NCCL and vLLM put there. `space` is None if there is no /dev/shm."""
    fix = "root: mount -o remount,size=50% /dev/shm; in a container: --shm-size, --ipc=host, or bind /dev/shm"
    if space is None:
        section.fail("/dev/shm", "there is no /dev/shm", fix)
        return
    text = f"{gib(space.free)} of {gib(space.size)} are free; about {gib(needed)} are needed"
    if space.free < needed:
        if space.size >= 2 * needed:
            fix = "remove your files that killed processes left there (ls -l /dev/shm)"
        section.fail("/dev/shm", text, fix)
    elif space.free < 2 * needed:
        section.warn("/dev/shm", text, fix)
    else:
        section.ok("/dev/shm", text)


def judge_limits(section: Section, limits: Mapping[str, tuple[int, int]], needed: int | None, rdma: bool) -> None:
    """Judge the limits of this process: (soft, hard) of RLIMIT_NOFILE, NPROC, MEMLOCK, CORE and AS, by these names.

    `needed`: bytes of memory, if known. `rdma`: whether there is an InfiniBand or RoCE device.
    """

    def lowest(name: str, what: str, bounds: tuple[int, int], letter: str) -> None:
        soft, hard = limits[name]
        if soft == _UNLIMITED or soft >= bounds[1]:
            section.ok(what, "unlimited" if soft == _UNLIMITED else f"the limit is {soft:,}")
            return
        raised = "unlimited" if hard == _UNLIMITED else str(hard)
        fix = f"add ulimit -{letter} {raised} to slurm.setup"
        if hard != _UNLIMITED and hard < bounds[1]:
            fix = f"root: raise the hard limit ({hard:,}) in limits.conf, and LimitNOFILE/LimitNPROC of slurmd"
        text = f"the limit is {soft:,}; it should be {bounds[1]:,} or more"
        section.add("fail" if soft < bounds[0] else "warn", what, text, fix)

    lowest("NOFILE", "open files", _FILES, "n")
    lowest("NPROC", "processes", _PROCESSES, "u")
    locked = limits["MEMLOCK"][0]
    if locked == _UNLIMITED or not rdma:
        section.ok(
            "locked memory",
            "unlimited" if locked == _UNLIMITED else f"the limit is {gib(locked)}; there is no InfiniBand here",
        )
    else:
        fix = "ulimit -l unlimited; root: LimitMEMLOCK=infinity of slurmd, PropagateResourceLimitsExcept=MEMLOCK"
        text = f"the limit is {gib(locked)}, so NCCL cannot register its buffers for InfiniBand"
        section.warn("locked memory", text, fix)
    space = limits["AS"][0]
    if space != _UNLIMITED:
        text = f"the limit is {gib(space)} of address space, but CUDA and torch reserve far more than they use"
        small = needed is not None and space < needed
        section.add("fail" if small else "warn", "virtual memory", text, "ulimit -v unlimited")
    core = limits["CORE"][0]
    if core == 0:
        section.ok("core files", "core files are off")
    else:
        size = "of any size" if core == _UNLIMITED else f"of up to {gib(core)}"
        section.warn("core files", f"a rank that crashes writes a core file {size} to disk", "ulimit -c 0")


def judge_clock(section: Section, skew: float, against: str) -> None:
    """Judge the seconds by which this clock is ahead of another."""
    text = f"this clock is {abs(skew):.2f} s {'ahead of' if skew > 0 else 'behind'} {against}"
    fix = "root: chronyc makestep, or timedatectl set-ntp true"
    if abs(skew) > _SKEW[1]:
        section.fail("clock", f"{text}; munge refuses credentials if clocks differ too much", fix)
    elif abs(skew) > _SKEW[0]:
        section.warn("clock", f"{text}, so times in logs do not match", fix)
    else:
        section.ok("clock", f"this clock is within {_SKEW[0]:.0f} s of {against}")


def judge_names(section: Section, host: str, addresses: Sequence[str], nodes: int) -> None:
    """Judge what the name of this host resolves to on the host itself."""
    outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
    if outside:
        section.ok("host name", f"{host} resolves to {', '.join(outside)}")
    elif not addresses:
        fix = "add the name to /etc/hosts or to DNS"
        section.add("fail" if nodes > 1 else "warn", "host name", f"{host} does not resolve here", fix)
    else:
        text = f"{host} resolves to {', '.join(addresses)}, where no other node can reach it"
        fix = (
            "remove the name from the line of 127.0.0.1 in /etc/hosts; ranks use Slurm's NodeAddr, NCCL its interfaces"
        )
        section.add("warn" if nodes > 1 else "ok", "host name", text, fix if nodes > 1 else "")


def judge_port(section: Section, check: str, address: str, error: OSError | None) -> None:
    """Report whether this machine can listen on an address and connect to itself there."""
    if error is None:
        section.ok(check, f"this machine can listen on {address} and connect to it")
        return
    fix = (
        "use another port, or end the process that has this one (ss -ltnp)"
        if error.errno == errno.EADDRINUSE
        else "check the firewall: iptables -L"
    )
    section.fail(check, f"{address}: {error.strerror or error}", fix)


def host(config: Config, needed: int | None, shm: int) -> Section:
    """Return the findings of the group on this machine. `needed` and `shm` are bytes of memory and of /dev/shm."""
    section = Section("host")
    room = host_memory.left()
    sleeping = sizes.sleeping(config)
    judge_memory(section, room.size, needed, " to this job" if room.limited else "", sleeping=sleeping)
    judge_shm(section, space_of("/dev/shm"), shm)
    temporary = space_of("/tmp")
    if temporary is None or not os.access("/tmp", os.W_OK):
        section.fail("/tmp", "cannot write to /tmp, where sockets and caches go", "set TMPDIR, or get permission")
    elif temporary.free < GIB:
        section.warn(
            "/tmp", f"only {gib(temporary.free)} are free for compiled kernels", "free some space, or set TMPDIR"
        )
    else:
        section.ok("/tmp", f"{gib(temporary.free)} are free")
    judge_limits(section, read_limits(), needed, rdma=has_rdma())
    judge_cores(section, config, len(os.sched_getaffinity(0)), in_job="SLURM_JOB_ID" in os.environ)
    if config.cluster.platform == "cuda":
        judge_compiler(section, compiler(os.environ), Path(sysconfig.get_path("include")) / "Python.h")
    return section


def sandbox(settings: Sandbox, asked: bool) -> tuple[Section, str]:
    """Return which rung of the sandbox programs run on here, by a trial of each; and its name, or "none".

    `asked`: the run has programs to run.
    """
    section = Section("host")
    kinds = KINDS if settings.kind == "auto" else (settings.kind,)
    found = {kind: runner.obstacle(kind, settings) for kind in kinds}
    fit = [kind for kind, why in found.items() if not why]
    reasons = "; ".join(f"{kind}: {shortened(why, 200)}" for kind, why in found.items() if why)
    if fit:
        others = f"; {' and '.join(fit[1:])} would serve, too" if fit[1:] else ""
        section.ok("sandbox", f"programs run in {fit[0]}{others}")
        return section, fit[0]
    text = f"there is no sandbox for programs here ({reasons})"
    if asked:
        fix = (
            "install bubblewrap, use a kernel with Landlock (Linux 5.13 or newer), or set sandbox.url (docs/sandbox.md)"
        )
        section.fail("sandbox", text, fix)
    else:
        section.skip("sandbox", f"{text}; nothing here asks for one")
    return section, "none"


def compiler(environment: Mapping[str, str]) -> str | None:
    """Return the C compiler that Triton takes: that of CC, else gcc or clang; None if there is none."""
    if given := environment.get("CC"):
        return shutil.which(given.split()[0], path=environment.get("PATH"))
    found = (shutil.which(name, path=environment.get("PATH")) for name in ("gcc", "clang"))
    return next(filter(None, found), None)


def judge_compiler(section: Section, path: str | None, header: Path) -> None:
    """Judge whether Triton can build what starts its kernels, which vLLM and the fused SwiGLU use."""
    missing = [*(["C compiler"] if path is None else []), *([] if header.is_file() else [str(header)])]
    if not missing:
        section.ok("C compiler", f"{path}, and {header}")
        return
    fix = "install gcc and Python's headers (python3-dev) in the image, load a module (slurm.modules), or set CC"
    section.fail("C compiler", f"there is no {' and no '.join(missing)}, and Triton builds its kernels with it", fix)


def judge_cores(section: Section, config: Config, cores: int, *, in_job: bool) -> None:
    """Compare the cores that this process may use with the processes that are busy at the same time.

    In a job they are those of one task, with as many as the run asks for; elsewhere those of a machine with all ranks.
    """
    text = f"there {'are' if cores > 1 else 'is'} {counted(cores, 'core')}"
    needed = (cpus_per_task(config) or 1) if in_job else _busy(config)
    if cores >= needed:
        section.ok("cores", counted(cores, "core"))
    elif in_job:
        fix = "slurm.exclusive=true, or other nodes (slurm.constraint): Slurm gave a task fewer cores than it asked for"
        section.warn("cores", f"{text} for a task, which asks for {needed}", fix)
    else:
        ranks = counted(config.cluster.gpus_per_node, "rank")
        who = f"{ranks} with {busy_processes(config)}" if config.cluster.platform == "cuda" else ranks
        text = f"{text}, and {needed} processes of a node are busy at the same time ({who})"
        section.warn("cores", text, _fewer(config, cores))


def _fewer(config: Config, cores: int) -> str:
    """Return the change with which no more processes are busy than there are cores: fewer ranks, or fewer workers."""
    now, workers = config.cluster.gpus_per_node, config.reward.workers
    whole = math.lcm(config.rollout.tensor_parallel_size, config.parallel.tensor_model_parallel_size)
    counts = [count for count in range(now, 0, -1) if now % count == 0 and count % whole == 0] or [now]
    tries = [(count, workers) for count in counts]
    if config.cluster.platform == "cuda":
        tries += [(count, fewer) for count in counts for fewer in range(workers - 1, 0, -1)]
    for count, fewer in tries:
        changed = replace(config.cluster, gpus_per_node=count)
        if _busy(replace(config, cluster=changed, reward=replace(config.reward, workers=fewer))) <= cores:
            parts = [f"cluster.gpus_per_node={count}"] * (count < now) + [f"reward.workers={fewer}"] * (fewer < workers)
            return f"use a machine with more cores, or {' '.join(parts)}"
    return "use a machine with more cores"


def _busy(config: Config) -> int:
    """Return the processes of a node that keep a core busy while engines generate; on CPUs phases take turns."""
    ranks, busy = config.cluster.gpus_per_node, busy_processes(config)
    return ranks + engines_per_node(config) * (busy.total - 1) if config.cluster.platform == "cuda" else ranks


def network(nodes: int, port: int = 0) -> Section:
    """Return what this machine can listen on and connect to. `port` 0 takes any free one, as runs do."""
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
    judge_ports(section, low, high)
    return section


def judge_ports(section: Section, low: int, high: int) -> None:
    """Judge the range of ports that the kernel assigns."""
    count = high - low + 1
    if count < _PORTS:
        fix = "root: sysctl net.ipv4.ip_local_port_range='32768 60999'"
        section.warn("ports", f"the kernel can assign only {count} ports ({low} to {high})", fix)
    else:
        section.ok("ports", f"the kernel assigns ports from {low} to {high}; a run needs no fixed one")


def try_port(address: str, port: int = 0) -> OSError | None:
    """Listen at an address and connect to it; return the error, or None."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, port), family=family) as server:
            with socket.create_connection(server.getsockname()[:2], timeout=5.0):
                return None
    except OSError as error:
        return error


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a host name resolves to here; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def read_limits() -> dict[str, tuple[int, int]]:
    """Return (soft, hard) of the limits of this process, by name."""
    names = ("NOFILE", "NPROC", "MEMLOCK", "CORE", "AS")
    return {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names}


def has_rdma() -> bool:
    """Return whether there is an InfiniBand or RoCE device."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def space_of(path: str | Path) -> Space | None:
    """Return size and free space of a path's file system; None if there is no such path."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return Space(stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail)


def skew_of(folder: Path) -> float:
    """Return the seconds by which this clock is ahead of the one that dates files in `folder`."""
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
