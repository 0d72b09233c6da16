"""GPUs as nvidia-smi tells of them: how many, MIG, errors, who else is on them.

Floor 6. What nvidia-smi prints is read by pure functions.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_hpc.doctor_finding import Section, first_line, gib

QUERY = (
    *("index", "name", "uuid", "memory.total", "memory.used", "mig.mode.current"),
    *("ecc.errors.uncorrected.volatile.total", "compute_mode", "persistence_mode", "driver_version"),
)
APPS_QUERY = ("gpu_uuid", "pid", "process_name", "used_memory")
_FORMAT = "--format=csv,noheader,nounits"
_TIMEOUT = 30.0
_CUDA = re.compile(r"CUDA Version\s*:\s*(\d+\.\d+)")
_NEAR = 0.8  # of a GPU's memory: what activations and communication need of the rest is not known here


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi --query-gpu. None where the GPU does not say."""

    index: int
    name: str
    uuid: str
    memory: int | None  # bytes
    used: int | None
    mig: bool
    ecc_errors: int | None  # that were not corrected, since the driver was loaded
    compute_mode: str
    persistence: bool | None
    driver: str


@dataclass(frozen=True)
class App:
    """A process on a GPU."""

    uuid: str
    pid: int
    name: str
    used: int | None  # bytes


@dataclass(frozen=True)
class Gpus:
    """What nvidia-smi told."""

    gpus: tuple[Gpu, ...] = ()
    apps: tuple[App, ...] = ()
    cuda: str | None = None  # the newest CUDA that the driver knows
    error: str = ""  # of nvidia-smi; empty: it answered
    installed: bool = True


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The lines of --query-gpu=QUERY, in CSV without header and units. Raises ValueError for another format."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(QUERY) or not row[0].strip().isdigit():
            raise ValueError(f"nvidia-smi said {','.join(row)[:100]!r}: {len(QUERY)} values a GPU were asked for")
        index, name, uuid, total, used, mig, ecc, mode, persistence, version = (value.strip() for value in row)
        on = {"Enabled": True, "Disabled": False}.get(persistence)
        memory = (_mebibytes(total), _mebibytes(used))
        found.append(Gpu(int(index), name, uuid, *memory, mig == "Enabled", _number(ecc), mode, on, version))
    return tuple(found)


def parse_apps(text: str) -> tuple[App, ...]:
    """The lines of --query-compute-apps=APPS_QUERY. Raises ValueError for another format."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) < len(APPS_QUERY) or not row[1].strip().isdigit():
            raise ValueError(f"nvidia-smi said {','.join(row)[:100]!r} of processes")
        uuid, pid, *name, used = (value.strip() for value in row)  # a path may have a comma
        found.append(App(uuid, int(pid), ",".join(name), _mebibytes(used)))
    return tuple(found)


def parse_cuda(text: str) -> str | None:
    """The newest CUDA of the driver, from the head of nvidia-smi's page."""
    found = _CUDA.search(text)
    return found.group(1) if found else None


def read() -> Gpus:
    """What nvidia-smi tells here."""
    try:
        gpus = parse_gpus(_smi(f"--query-gpu={','.join(QUERY)}", _FORMAT))
        apps = parse_apps(_smi(f"--query-compute-apps={','.join(APPS_QUERY)}", _FORMAT))
        return Gpus(gpus, apps, parse_cuda(_smi()))
    except FileNotFoundError:
        return Gpus(error="nvidia-smi is not installed", installed=False)
    except (ValueError, OSError) as error:
        return Gpus(error=str(error))


def judge(found: Gpus, wanted: int | None, rank_bytes: int | None = None) -> Section:
    """`wanted`: ranks of a node. `rank_bytes`: weights, gradients and optimizer of one, where the model is known."""
    section = Section("gpus")
    if found.error:
        fix = "give cluster.platform=cpu, or run this where the GPUs are (--nodes N)"
        if found.installed:
            fix = "the driver does not work: dmesg says why; take this node out"
        section.fail("count", found.error, fix)
        return section
    _count(section, found.gpus, wanted)
    _each(section, found.gpus)
    _memory(section, found.gpus, rank_bytes)
    for app in found.apps:
        at = next((gpu.index for gpu in found.gpus if gpu.uuid == app.uuid), "?")
        size = gib(app.used) if app.used is not None else "memory"
        text = f"process {app.pid} ({os.path.basename(app.name)}) has {size} of GPU {at}"
        section.warn(
            "other processes",
            text,
            f"end it if it is yours (ps -p {app.pid}), or ask for whole nodes: slurm.exclusive=true",
        )
    if not found.apps and found.gpus:
        section.ok("other processes", "none on these GPUs")
    return section


def facts(found: Gpus) -> dict[str, str]:
    """What must be the same on all nodes."""
    if not found.gpus:
        return {}
    names = sorted({f"{gpu.name}, {gib(gpu.memory or 0)}" for gpu in found.gpus})
    return {
        "GPUs": f"{len(found.gpus)} x {' and '.join(names)}",
        "driver": " and ".join(sorted({gpu.driver for gpu in found.gpus})),
        "CUDA of the driver": found.cuda or "",
    }


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"nvidia-smi did not answer within {_TIMEOUT:.0f} s") from None
    if done.returncode:
        raise ValueError(f"nvidia-smi: {first_line(done.stderr or done.stdout) or f'exit code {done.returncode}'}")
    return done.stdout


def _count(section: Section, gpus: Sequence[Gpu], wanted: int | None) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count, note = len(gpus), ""
    if visible is not None and (allowed := len([one for one in visible.split(",") if one.strip()])) < count:
        count, note = allowed, f", {allowed} of them in CUDA_VISIBLE_DEVICES"
    kinds = sorted({gpu.name for gpu in gpus})
    text = f"{len(gpus)} x {' and '.join(kinds) or 'no GPU'}{note}"
    if wanted is not None and count < wanted:
        fix = f"cluster.gpus_per_node={max(1, count)}, or ask for nodes with {wanted} (slurm.gres, slurm.constraint)"
        section.fail("count", f"{text}; cluster.gpus_per_node is {wanted}", fix)
    elif len(kinds) > 1:
        section.warn("count", text, "a step takes as long as its slowest rank: use GPUs of one kind")
    else:
        section.ok("count", text)


def _each(section: Section, gpus: Sequence[Gpu]) -> None:
    def named(chosen: Sequence[Gpu]) -> str:
        return f"GPU{'s' * (len(chosen) > 1)} {', '.join(str(gpu.index) for gpu in chosen)}"

    if mig := [gpu for gpu in gpus if gpu.mig]:
        numbers = ",".join(str(gpu.index) for gpu in mig)
        text = f"on for {named(mig)}: NCCL does not join slices of a GPU, and a rank sees a part of its memory"
        section.fail("MIG", text, f"root: nvidia-smi -i {numbers} -mig 0; or a partition whose GPUs are whole")
    elif gpus:
        section.ok("MIG", "off")
    if bad := [gpu for gpu in gpus if gpu.ecc_errors]:
        errors = ", ".join(f"{gpu.ecc_errors} on GPU {gpu.index}" for gpu in bad)
        text = f"memory errors that were not corrected: {errors}"
        section.fail("ECC", text, "keep off this node (slurm.exclude), and tell its administrator: reset or replace")
    elif gpus:
        unknown = all(gpu.ecc_errors is None for gpu in gpus)
        section.add("skip" if unknown else "ok", "ECC", "these GPUs do not count errors" if unknown else "no errors")
    if alone := [gpu for gpu in gpus if gpu.compute_mode not in ("Default", "[N/A]", "[Not Supported]")]:
        text = f"{alone[0].compute_mode} for {named(alone)}: a rank and its engine are two processes on one GPU"
        section.fail("compute mode", text, "root: nvidia-smi -c DEFAULT")
    elif gpus:
        section.ok("compute mode", "Default")
    if slow := [gpu for gpu in gpus if gpu.persistence is False]:
        text = f"off for {named(slow)}: the driver is loaded again at every start"
        section.warn("persistence", text, "root: nvidia-smi -pm 1, or nvidia-persistenced")
    elif gpus:
        section.ok("persistence", "on")


def _memory(section: Section, gpus: Sequence[Gpu], rank_bytes: int | None) -> None:
    sizes = [gpu.memory for gpu in gpus if gpu.memory is not None]
    if not sizes:
        return
    least = min(sizes)
    if rank_bytes is None:
        section.ok("memory", f"{gib(least)} each")
        return
    text = f"{gib(rank_bytes)} of weights, gradients and optimizer a rank; the GPU has {gib(least)}"
    fix = (
        "raise parallel.tensor_model_parallel_size, or set optimizer.distributed=true or memory.offload_optimizer=true"
    )
    if rank_bytes > least:
        section.fail("memory", text, fix)
    elif rank_bytes > _NEAR * least:
        section.warn("memory", f"{text}: little is left for activations", fix)
    else:
        section.ok("memory", text)


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * 2**20


def _number(text: str) -> int | None:
    """None for [N/A], [Not Supported], [Unknown Error] and the like."""
    digits = text.removesuffix("MiB").strip()
    return int(digits) if digits.isdigit() else None
