"""The GPUs of a machine: how many, MIG, memory errors, who else uses them.

NVML answers through nvidia-ml-py (module pynvml). Only where that package is missing, or the driver is too old for it,
the text that nvidia-smi prints is read. Pure functions judge the answers.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_hpc.doctor.finding import Section, gib, shortened
from gspo_hpc.system.text import first_line

QUERY = (
    *("index", "name", "uuid", "memory.total", "memory.used", "mig.mode.current"),
    *("ecc.errors.uncorrected.volatile.total", "compute_mode", "persistence_mode", "driver_version"),
)
APPS_QUERY = ("gpu_uuid", "pid", "process_name", "used_memory")
_FORMAT = "--format=csv,noheader,nounits"
_TIMEOUT = 30.0
_CUDA = re.compile(r"CUDA Version\s*:\s*(\d+\.\d+)")
_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")  # by NVML's number, in nvidia-smi's words
_PATHS = {  # by NVML_TOPOLOGY_*
    **{0: "one board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "a PCIe host bridge"},
    **{40: "the PCIe host bridges of one CPU", 50: "the link between CPUs"},
}
_NEAR = 0.8  # share of a GPU's memory; how much activations and communication need of the rest is not known here


@dataclass(frozen=True)
class Gpu:
    """One GPU. None where it does not report a value."""

    index: int
    name: str
    uuid: str
    memory: int | None  # bytes
    used: int | None
    mig: bool
    ecc_errors: int | None  # uncorrected errors since the driver was loaded
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
class Link:
    """A way from one GPU to another, by their indices."""

    first: int
    second: int
    nvlink: bool
    path: str  # where the PCIe ways of both meet


@dataclass(frozen=True)
class Gpus:
    """All GPUs of this machine, or the reason why they are not known."""

    gpus: tuple[Gpu, ...] = ()
    apps: tuple[App, ...] = ()
    cuda: str | None = None  # the newest CUDA that the driver supports
    error: str = ""  # empty: the driver answered
    installed: bool = True  # whether there is a driver
    links: tuple[Link, ...] | None = None  # between every two GPUs; None: not known


def read() -> Gpus:
    """Return the GPUs of this machine, by NVML or else by nvidia-smi."""
    found = _read_nvml()
    return _read_smi() if found is None else found


def _read_nvml() -> Gpus | None:
    """Return NVML's answer; None if nvidia-ml-py is missing, or the driver lacks a function that it calls."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return Gpus(error="no NVIDIA driver is installed (there is no libnvidia-ml.so.1)", installed=False)
    except nvml.NVMLError_FunctionNotFound:
        return None
    except nvml.NVMLError as error:
        return Gpus(error=f"the NVIDIA driver does not answer: {error}")
    try:
        version = nvml.nvmlSystemGetDriverVersion()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_nvml_gpu(nvml, index, device, version) for index, device in enumerate(devices))
        apps = tuple(
            App(gpu.uuid, one.pid, _value(nvml, nvml.nvmlSystemGetProcessName, one.pid) or "?", one.usedGpuMemory)
            for gpu, device in zip(gpus, devices, strict=True)
            for one in _value(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, device) or ()
        )
        return Gpus(gpus, apps, f"{cuda // 1000}.{cuda % 1000 // 10}", links=_nvml_links(nvml, devices))
    except nvml.NVMLError_FunctionNotFound:
        return None
    except nvml.NVMLError as error:
        return Gpus(error=f"the NVIDIA driver reports: {error}")
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, index: int, device: Any, driver: str) -> Gpu:
    memory = _value(nvml, nvml.nvmlDeviceGetMemoryInfo, device)
    mig = _value(nvml, nvml.nvmlDeviceGetMigMode, device)
    mode = _value(nvml, nvml.nvmlDeviceGetComputeMode, device)
    persistence = _value(nvml, nvml.nvmlDeviceGetPersistenceMode, device)
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(device),
        uuid=nvml.nvmlDeviceGetUUID(device),
        memory=None if memory is None else memory.total,
        used=None if memory is None else memory.used,
        mig=mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        ecc_errors=_value(nvml, nvml.nvmlDeviceGetTotalEccErrors, device, *kinds),
        compute_mode="[N/A]" if mode is None else _MODES[mode] if mode < len(_MODES) else f"mode {mode}",
        persistence=None if persistence is None else persistence == nvml.NVML_FEATURE_ENABLED,
        driver=driver,
    )


def _nvml_links(nvml: Any, devices: Sequence[Any]) -> tuple[Link, ...] | None:
    """Return the links between the GPUs; None where the driver does not tell."""
    found = []
    try:
        for (first, one), (second, other) in itertools.combinations(enumerate(devices), 2):
            status = _value(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            level = _value(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
            if status is None:
                return None
            path = _PATHS.get(level, "PCIe")
            found.append(Link(first, second, status == nvml.NVML_P2P_STATUS_OK, path))
    except nvml.NVMLError:  # it is worth no more than a line
        return None
    return tuple(found)


def _value(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NVML answers; None for a value that this GPU, or this user, does not get."""
    try:
        return call(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_NotFound):
        return None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse what nvidia-smi prints for --query-gpu=QUERY, as CSV without header and units.

    Raises ValueError for another format.
    """
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(QUERY) or not row[0].strip().isdecimal():
            raise ValueError(f"nvidia-smi printed {shortened(','.join(row), 100)!r}, not {len(QUERY)} values per GPU")
        index, name, uuid, total, used, mig, ecc, mode, persistence, version = (value.strip() for value in row)
        on = {"Enabled": True, "Disabled": False}.get(persistence)
        memory = (_mebibytes(total), _mebibytes(used))
        found.append(Gpu(int(index), name, uuid, *memory, mig == "Enabled", _number(ecc), mode, on, version))
    return tuple(found)


def parse_apps(text: str) -> tuple[App, ...]:
    """Parse what nvidia-smi prints for --query-compute-apps=APPS_QUERY. Raises ValueError for another format."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) < len(APPS_QUERY) or not row[1].strip().isdecimal():
            raise ValueError(
                f"nvidia-smi printed {shortened(','.join(row), 100)!r}, not {len(APPS_QUERY)} values per process"
            )
        uuid, pid, *name, used = (value.strip() for value in row)  # a path may have a comma
        found.append(App(uuid, int(pid), ",".join(name), _mebibytes(used)))
    return tuple(found)


def parse_cuda(text: str) -> str | None:
    """Return the newest CUDA that the driver supports, from the head of nvidia-smi's page."""
    found = _CUDA.search(text)
    return found.group(1) if found else None


def _read_smi() -> Gpus:
    """Return what nvidia-smi prints here."""
    try:
        gpus = parse_gpus(_smi(f"--query-gpu={','.join(QUERY)}", _FORMAT))
        apps = parse_apps(_smi(f"--query-compute-apps={','.join(APPS_QUERY)}", _FORMAT))
        return Gpus(gpus, apps, parse_cuda(_smi()))
    except FileNotFoundError:
        return Gpus(error="nvidia-smi is not installed", installed=False)
    except (ValueError, OSError) as error:
        return Gpus(error=str(error))


def judge(found: Gpus, wanted: int | None, rank_bytes: int | None = None, sharing: int = 1) -> Section:
    """Compare the GPUs with what a run needs.

    `wanted`: ranks per node. `rank_bytes`: weights, gradients and optimizer state of one rank, if the model is known.
    `sharing`: GPUs that share each layer, in the trainer or in an engine.
    """
    section = Section("gpus")
    if found.error:
        fix = "set cluster.platform=cpu, or run this where the GPUs are (--nodes N)"
        if found.installed:
            fix = "repair the driver (dmesg says why it fails), or leave this node out (slurm.exclude)"
        section.fail("count", found.error, fix)
        return section
    _count(section, found.gpus, wanted)
    _each(section, found.gpus, wanted)
    _links(section, found.gpus, found.links, sharing)
    _memory(section, found.gpus, rank_bytes)
    for app in found.apps:
        at = next((gpu.index for gpu in found.gpus if gpu.uuid == app.uuid), "?")
        size = gib(app.used) if app.used is not None else "memory"
        text = f"process {app.pid} ({os.path.basename(app.name)}) uses {size} of GPU {at}"
        section.warn(
            "other processes",
            text,
            f"end the process if it is yours (ps -p {app.pid}), or request whole nodes: slurm.exclusive=true",
        )
    if not found.apps and found.gpus:
        section.ok("other processes", "no process runs on these GPUs")
    return section


def facts(found: Gpus) -> dict[str, str]:
    """Return what must be the same on all nodes."""
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
        raise ValueError(
            f"nvidia-smi: {shortened(first_line(done.stderr or done.stdout)) or f'exit code {done.returncode}'}"
        )
    return done.stdout


def _count(section: Section, gpus: Sequence[Gpu], wanted: int | None) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count, note = len(gpus), ""
    if visible is not None and (allowed := len([one for one in visible.split(",") if one.strip()])) < count:
        count, note = allowed, f", and CUDA_VISIBLE_DEVICES allows {allowed} of them"
    kinds = sorted({gpu.name for gpu in gpus})
    text = f"{len(gpus)} x {' and '.join(kinds)}{note}" if gpus else "there is no GPU"
    if wanted is not None and count < wanted:
        fix = (
            f"cluster.gpus_per_node={max(1, count)}, or request nodes with {wanted} GPUs (slurm.gres, slurm.constraint)"
        )
        section.fail("count", f"{text}; cluster.gpus_per_node is {wanted}", fix)
    elif len(kinds) > 1:
        section.warn("count", text, "use GPUs of one kind: a step takes as long as its slowest rank")
    else:
        section.ok("count", text)


def _each(section: Section, gpus: Sequence[Gpu], wanted: int | None) -> None:
    def named(chosen: Sequence[Gpu]) -> str:
        return f"GPU{'s' * (len(chosen) > 1)} {', '.join(str(gpu.index) for gpu in chosen)}"

    if mig := [gpu for gpu in gpus if gpu.mig]:
        numbers = ",".join(str(gpu.index) for gpu in mig)
        text = (
            f"MIG is on for {named(mig)}: a rank sees one slice and its part of the memory, there is no NVLink or "
            "peer-to-peer access then, and NCCL refuses ranks on two slices of one GPU (Duplicate GPU detected)"
        )
        fix = f"root: nvidia-smi -i {numbers} -mig 0; or use a partition with whole GPUs"
        section.add("warn" if wanted == 1 else "fail", "MIG", text, fix)
    elif gpus:
        section.ok("MIG", "MIG is off")
    if bad := [gpu for gpu in gpus if gpu.ecc_errors]:
        errors = ", ".join(f"{gpu.ecc_errors} on GPU {gpu.index}" for gpu in bad)
        text = f"there are uncorrected memory errors: {errors}"
        section.fail(
            "ECC", text, "leave this node out (slurm.exclude), and ask its administrator to reset or replace the GPU"
        )
    elif gpus:
        unknown = all(gpu.ecc_errors is None for gpu in gpus)
        section.add(
            "skip" if unknown else "ok",
            "ECC",
            "these GPUs do not count memory errors" if unknown else "no uncorrected memory error",
        )
    if alone := [gpu for gpu in gpus if gpu.compute_mode not in ("Default", "[N/A]", "[Not Supported]")]:
        text = f"{alone[0].compute_mode} for {named(alone)}, but a rank and its engine are two processes on one GPU"
        section.fail("compute mode", text, "root: nvidia-smi -c DEFAULT")
    elif gpus:
        section.ok("compute mode", "Default")
    if slow := [gpu for gpu in gpus if gpu.persistence is False]:
        text = f"persistence mode is off for {named(slow)}, so every start loads the driver again"
        section.warn("persistence", text, "root: nvidia-smi -pm 1, or nvidia-persistenced")
    elif gpus:
        section.ok("persistence", "persistence mode is on")


def _links(section: Section, gpus: Sequence[Gpu], links: Sequence[Link] | None, sharing: int) -> None:
    """Tell which GPUs have NVLink to each other; ranks that share layers should be among them."""
    if len(gpus) < 2:
        return
    if links is None:
        section.skip("links", "the driver does not tell how GPUs reach each other; nvidia-smi topo -m may")
        return
    slow = " or ".join(sorted({link.path for link in links if not link.nvlink}))
    if not slow:
        section.ok("links", f"all {len(gpus)} GPUs have NVLink to each other")
        return
    islands = _islands([gpu.index for gpu in gpus], links)
    joined = " and ".join(", ".join(map(str, island)) for island in islands if len(island) > 1)
    text = f"NVLink joins GPUs {joined}; others reach" if joined else "there is no NVLink: GPUs reach"
    text, most = f"{text} each other through {slow}", min(map(len, islands))
    if sharing <= most:
        section.ok("links", text)
        return
    sizes = f"parallel.tensor_model_parallel_size={most} and rollout.tensor_parallel_size={most}"
    fix = f"{sizes}, with pipeline or data parallelism beside it; or nodes with NVLink (slurm.constraint)"
    section.warn("links", f"{text}, and {sharing} GPUs share every layer", fix)


def _islands(indices: Sequence[int], links: Sequence[Link]) -> list[list[int]]:
    """Return the groups of GPUs in which each has NVLink to each."""
    joined = {frozenset((link.first, link.second)) for link in links if link.nvlink}
    islands: list[list[int]] = []
    for index in indices:
        home = next((one for one in islands if all(frozenset((index, other)) in joined for other in one)), None)
        if home is None:
            islands.append([index])
        else:
            home.append(index)
    return islands


def _memory(section: Section, gpus: Sequence[Gpu], rank_bytes: int | None) -> None:
    sizes = [gpu.memory for gpu in gpus if gpu.memory is not None]
    if not sizes:
        return
    least = min(sizes)
    if rank_bytes is None:
        section.ok("memory", f"{gib(least)} each")
        return
    text = f"a rank needs {gib(rank_bytes)} for weights, gradients and optimizer state; the GPU has {gib(least)}"
    fix = (
        "raise parallel.tensor_model_parallel_size, or set optimizer.distributed=true or memory.offload_optimizer=true"
    )
    if rank_bytes > least:
        section.fail("memory", text, fix)
    elif rank_bytes > _NEAR * least:
        section.warn("memory", f"{text}, so little is left for activations", fix)
    else:
        section.ok("memory", text)


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * 2**20


def _number(text: str) -> int | None:
    """Parse a number; None for [N/A], [Not Supported], [Unknown Error] and the like."""
    digits = text.removesuffix("MiB").strip()
    return int(digits) if digits.isdecimal() else None
