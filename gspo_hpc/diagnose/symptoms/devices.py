"""Symptoms of devices and libraries: memory of GPUs, MIG, NCCL, tensor parallelism, versions.

What ended the last attempt is a problem; what the run recovered from is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gspo_hpc.config.engine_arguments import engine_setting
from gspo_hpc.diagnose.evidence import Evidence
from gspo_hpc.diagnose.excerpts import failure_matching, quoted, severity_of
from gspo_hpc.diagnose.fitting import lighter
from gspo_hpc.diagnose.patterns import (
    CUDA_MEMORY,
    DEVICE_COUNT,
    DUPLICATE_GPU,
    ENGINE_MEMORY,
    MIG,
    MIG_DEVICES,
    NCCL,
    NCCL_FAULT,
    TENSOR_PARALLEL,
    VERSIONS,
)
from gspo_hpc.diagnose.registry import Finding, symptom


@symptom(
    "out_of_memory_at_start",
    "out_of_memory_in_update",
    "out_of_memory_in_generation",
    severity="problem",
    shows="the error of CUDA or vLLM, and the step after which it came",
    change="`memory.*`, `optimizer.distributed`, smaller micro-batches, more pipeline stages; in generation "
    "`rollout.engine.gpu_memory_utilization` (CPU: `rollout.kv_cache_gb`)",
    lines=CUDA_MEMORY,
    explains_failure=True,
)
def out_of_gpu_memory(run: Evidence) -> Finding | None:
    """Find an attempt that ended because a GPU had no memory left: at the start, in an update, or in generation."""
    hit = failure_matching(run, CUDA_MEMORY)
    if hit is None:
        return None
    attempt, excerpt = hit
    memory, rollout, batch = run.config.memory, run.config.rollout, run.config.batch
    around = f"{excerpt.text} {attempt.error.text if attempt.error else ''}"
    in_engine = ENGINE_MEMORY.search(around) is not None and "megatron" not in around
    stages = run.config.parallel.pipeline_model_parallel_size
    recompute = "memory.recompute_granularity=full"
    tokens, samples = batch.micro_batch_tokens, batch.micro_batch_size
    smaller = (
        [f"batch.micro_batch_tokens={tokens // part}" for part in (2, 4, 8)]
        if tokens
        else [f"batch.micro_batch_size={max(1, (samples or 1) // part)}" for part in (2, 4, 8)]
    )
    if in_engine:
        name, cause = "out_of_memory_in_generation", "the engine found less free memory than its KV cache needs"
        used = engine_setting(run.config, "gpu_memory_utilization")
        settings: Sequence[str] = [
            f"rollout.engine.gpu_memory_utilization={max(0.1, used - 0.2):.1f}",
            "memory.offload_trainer=true",
            f"rollout.tensor_parallel_size={2 * rollout.tensor_parallel_size}",
        ]
        if run.config.cluster.platform == "cpu":
            settings = [f"rollout.kv_cache_gb={2 * rollout.kv_cache_gb:g}"]
    elif attempt.steps is None:
        name = "out_of_memory_at_start"
        where = " of a pipeline stage (the first stage holds the activations of most micro-batches)" * (stages > 1)
        cause = f"the weights, gradients, optimizer state and first activations{where} do not fit into a GPU"
        settings = [recompute, "memory.offload_optimizer=true", "optimizer.distributed=true", *smaller]
        settings = [*settings, f"parallel.pipeline_model_parallel_size={2 * stages}"]
    else:
        name, cause = "out_of_memory_in_update", "a micro-batch had longer samples than those before it"
        settings = [recompute, *smaller, "memory.offload_optimizer=true", "optimizer.distributed=true"]
    after = "before its first step" if attempt.steps is None else f"after step {attempt.steps[1]}"
    if memory.recompute_granularity == "full":
        settings = [text for text in settings if text != recompute]
    estimated: tuple[str, ...] = ()
    if not in_engine:
        settings, estimated = lighter(run, settings, around)
    evidence = (f"attempt {attempt.number} ended {after}: {quoted(excerpt)}", *estimated)
    return Finding(evidence, cause, tuple(settings), (excerpt.before,), severity_of(run, attempt), name)


@symptom(
    "mig_devices",
    severity="warning",
    shows="a rank's log names its device as a MIG instance, or NCCL reports `Duplicate GPU detected`",
    change="nodes with whole GPUs (`slurm.gres`, `slurm.constraint`), or a single rank",
    lines=MIG_DEVICES,
    explains_failure=True,
)
def mig_devices(run: Evidence) -> Finding | None:
    """Find ranks that were given a part of a GPU (MIG) instead of a whole one."""
    names = sorted({name for attempt in run.attempts for name in attempt.devices if MIG.search(name)})
    hit = failure_matching(run, DUPLICATE_GPU) or failure_matching(run, MIG, lines=True)
    if not names and hit is None:
        return None
    attempt, excerpt = hit or failure_matching(run, DEVICE_COUNT) or (None, None)
    evidence = [f"device: {', '.join(names)}"] if names else []
    evidence += [f"attempt {attempt.number}: {quoted(excerpt)}"] if attempt and excerpt else []
    several = run.config.world_size > 1
    return Finding(
        tuple(evidence),
        "a process sees only one MIG instance, however many the node has, and NCCL counts all instances of one GPU as "
        "the same device",
        ("cluster.gpus_per_node=1", "cluster.nodes=1") if several else (),
        ("slurm.gres, slurm.constraint or slurm.partition: ask for whole GPUs (nvidia-smi -L lists MIG instances)",),
        severity_of(run, attempt) if attempt else ("warning" if several else "note"),
    )


@symptom(
    "version_mismatch",
    severity="problem",
    shows="the error of the loader or the driver, and the versions of the attempt",
    change="`gspo-hpc doctor`, `slurm.modules`, `slurm.container`",
    lines=VERSIONS,
    explains_failure=True,
)
def version_mismatch(run: Evidence) -> Finding | None:
    """Find an attempt that ended because CUDA, driver, NCCL and packages do not fit together."""
    hit = failure_matching(run, VERSIONS)
    if hit is None:
        return None
    attempt, excerpt = hit
    versions = ", ".join(f"{name} {text}" for name, text in attempt.versions.items())
    return Finding(
        (
            f"attempt {attempt.number}: {quoted(excerpt)}",
            *([f"versions: {versions}"] if versions else []),
            *_version_changes(run),
        ),
        "the driver, CUDA, NCCL and the packages (torch, Megatron-Core, Transformer Engine, vLLM) do not fit together",
        (),
        (
            "gspo-hpc doctor CONFIG: shows what is installed, and what fits",
            "slurm.modules and slurm.container: they decide which CUDA the ranks get",
            excerpt.before,
        ),
        severity_of(run, attempt),
    )


@symptom(
    "versions_changed",
    severity="note",
    shows="the packages whose version changed between attempts",
    change="nothing, or the environment of the first attempt",
)
def versions_changed(run: Evidence) -> Finding | None:
    """Find attempts that ran with other versions of packages than the one before."""
    changes = _version_changes(run)
    if not changes or failure_matching(run, VERSIONS) is not None:
        return None
    cause = "attempts ran with different packages, so the later steps differ bit for bit from what the first would give"
    return Finding(changes, cause)


@symptom(
    "tensor_parallel_mismatch",
    severity="problem",
    shows="the error, and the tensor-parallel sizes of trainer and rollout",
    change="`rollout.tensor_parallel_size`, `parallel.tensor_model_parallel_size`",
    lines=TENSOR_PARALLEL,
    explains_failure=True,
)
def tensor_parallel_mismatch(run: Evidence) -> Finding | None:
    """Find an attempt that ended because a tensor-parallel size does not divide the model."""
    hit = failure_matching(run, TENSOR_PARALLEL)
    if hit is None:
        return None
    attempt, excerpt = hit
    train, generate = run.config.parallel.tensor_model_parallel_size, run.config.rollout.tensor_parallel_size
    return Finding(
        (f"attempt {attempt.number}: {quoted(excerpt)}", f"trainer TP {train}, rollout TP {generate}"),
        "the model's heads, KV heads or layer widths are not divisible by a tensor-parallel size",
        (
            *([f"rollout.tensor_parallel_size={generate // 2}"] if generate > 1 else []),
            *([f"parallel.tensor_model_parallel_size={train // 2}"] if train > 1 else []),
        ),
        ("gspo-hpc plan CONFIG: shows which sizes divide", excerpt.before),
        severity_of(run, attempt),
    )


@symptom(
    "nccl_error",
    severity="problem",
    shows="NCCL's error; time-outs are distinguished from errors of the network",
    change="`tracking.debug`, `NCCL_SOCKET_IFNAME`",
    lines=NCCL_FAULT,
    explains_failure=True,
)
def nccl_error(run: Evidence) -> Finding | None:
    """Find an attempt that ended because NCCL failed or a collective timed out."""
    hit = failure_matching(run, NCCL_FAULT) or failure_matching(run, NCCL)
    if hit is None or any(p.search(hit[1].text) for p in (CUDA_MEMORY, DUPLICATE_GPU, VERSIONS)):
        return None
    attempt, excerpt = hit
    timeout = re.search(r"timeout|timed out|Watchdog", excerpt.text, re.IGNORECASE) is not None
    return Finding(
        (f"attempt {attempt.number}: {quoted(excerpt)}",),
        "not all ranks joined a collective in time: a rank hangs or has ended, or ranks call different collectives"
        if timeout
        else "the network between GPUs or nodes failed: a wrong interface, a link that is down, or a limit on locked "
        "memory",
        (
            "tracking.debug=true",
            *([] if timeout else ["slurm.environment.NCCL_SOCKET_IFNAME=^lo,docker0"]),
        ),
        ("gspo-hpc logs RUN --errors", f"{excerpt.where}: read NCCL's own lines before this one"),
        severity_of(run, attempt),
    )


def _version_changes(run: Evidence) -> tuple[str, ...]:
    known = [a for a in run.attempts if a.versions]
    changes = []
    for before, after in zip(known, known[1:], strict=False):
        for name in sorted(before.versions.keys() & after.versions.keys()):
            if before.versions[name] != after.versions[name]:
                pair = f"{name} {before.versions[name]} -> {after.versions[name]}"
                changes.append(f"attempts {before.number} and {after.number}: {pair}")
    return tuple(changes)
