"""Pure functions that judge the GPUs of a machine: against what a run needs, and against those of other nodes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from gspo_hpc.doctor.finding import Section, gib
from gspo_hpc.doctor.gpus.found import Gpu, Gpus, Link

_NEAR = 0.8  # share of a GPU's memory; how much activations and communication need of the rest is not known here


def judge(found: Gpus, wanted: int | None, rank_bytes: int | None = None, sharing: int = 1) -> Section:
    """Compare the GPUs with what a run needs.

    `wanted`: ranks per node; None: no run is known.
    `rank_bytes`: weights, gradients and optimizer state of one rank, if the model is known.
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
    names = sorted({f"{gpu.name}, {gib(gpu.memory or 0)}{_sliced([gpu])}" for gpu in found.gpus})
    return {
        "GPUs": f"{len(found.gpus)} x {' and '.join(names)}",
        "driver": " and ".join(sorted({gpu.driver for gpu in found.gpus})),
        "CUDA of the driver": found.cuda or "",
    }


def _count(section: Section, gpus: Sequence[Gpu], wanted: int | None) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count, note = len(gpus), ""
    if visible is not None and (allowed := len([one for one in visible.split(",") if one.strip()])) < count:
        count, note = allowed, f", and CUDA_VISIBLE_DEVICES allows {allowed} of them"
    kinds = sorted({gpu.name for gpu in gpus})
    text = f"{len(gpus)} x {' and '.join(kinds)}{note}" if gpus else "there is no GPU"
    if not count and wanted is None:
        section.fail("count", text, "set cluster.platform=cpu, or run this where the GPUs are (--nodes N)")
    elif wanted is not None and count < wanted:
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
            f"MIG is on for {named(mig)}{_sliced(mig)}: a rank sees one slice and its part of the memory, there is no "
            "NVLink or peer-to-peer access then, and NCCL refuses ranks on two slices of one GPU (Duplicate GPU "
            "detected)"
        )
        fix = f"root: nvidia-smi -i {numbers} -mig 0; or use a partition with whole GPUs"
        several = wanted is not None and wanted > 1
        text += (
            f"; cluster.gpus_per_node is {wanted}" if several else ", so that a node can have one rank of a run only"
        )
        section.add("fail" if several else "warn", "MIG", text, fix)
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


def _slices(gpu: Gpu) -> list[int]:
    """Return the bytes of each MIG slice of a GPU that this process may use, as far as they are known."""
    allowed = {one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")}
    known = {one.uuid: one.memory for one in gpu.slices or () if one.memory is not None}
    return [known[uuid] for uuid in known.keys() & allowed or known.keys()]


def _sliced(gpus: Sequence[Gpu]) -> str:
    """Return how many MIG slices of which sizes GPUs have, in brackets; empty where that is not known."""
    sizes = Counter(size for gpu in gpus for size in _slices(gpu))
    parts = [f"{count} slice{'s' * (count > 1)} of {gib(size)}" for size, count in sorted(sizes.items())]
    return f" ({', '.join(parts)})" if parts else ""


def _memory(section: Section, gpus: Sequence[Gpu], rank_bytes: int | None) -> None:
    if any(gpu.mig and not _slices(gpu) for gpu in gpus):
        section.skip("memory", "a rank has the memory of one MIG slice, and the driver does not tell how much that is")
        return
    own = [size for gpu in gpus if gpu.mig for size in _slices(gpu)]
    sizes = [*own, *(gpu.memory for gpu in gpus if not gpu.mig and gpu.memory is not None)]
    if not sizes:
        return
    least = min(sizes)
    if rank_bytes is None:
        section.ok("memory", f"{gib(least)} each")
        return
    sliced = least in own
    owner = "the MIG slice" if sliced else "the GPU"
    text = f"a rank needs {gib(rank_bytes)} for weights, gradients and optimizer state; {owner} has {gib(least)}"
    fix = (
        "request a larger slice or a whole GPU, or set memory.offload_optimizer=true, or optimizer.distributed=true on "
        "several nodes"
        if sliced  # of which a node has one rank, and layers are not cut across nodes
        else "raise parallel.tensor_model_parallel_size, or set optimizer.distributed=true or "
        "memory.offload_optimizer=true"
    )
    if rank_bytes > least:
        section.fail("memory", text, fix)
    elif rank_bytes > _NEAR * least:
        section.warn("memory", f"{text}, so little is left for activations", fix)
    else:
        section.ok("memory", text)
