"""Symptoms of an error: what ended attempts of a run, known by its text, and what to change before the next one.

Floor 6. Every function is pure over the evidence, and answers None where the run does not show its symptom. Texts are
those that CUDA, NCCL, Megatron-Core, vLLM, Slurm, the kernel and this package write. What ended the last attempt is a
problem; what a run got over is a warning.
"""

from __future__ import annotations

import re

from gspo_hpc import memory_estimate
from gspo_hpc.durable import DISK_FULL
from gspo_hpc.symptoms import Evidence, Finder, Symptom
from gspo_hpc.symptoms_told import blamed, one_line, short, weight

_IGNORE = re.IGNORECASE
CUDA_MEMORY = re.compile(
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|No available memory for the cache blocks|larger than the available KV cache"
    r"|less than desired GPU memory utilization|NCCL.*out of memory",
    _IGNORE,
)
ENGINE_MEMORY = re.compile(
    r"cache blocks|KV cache|gpu_memory_utilization|GPU memory utilization|vLLM|EngineCore|gpu_worker|gpu_model_runner"
)
HOST_MEMORY = re.compile(
    r"oom[-_ ]kill|OOM[- ]?[Kk]ill|Out [Oo]f [Mm]emory|OUT_OF_MEMORY|Cannot allocate memory|\bMemoryError|"
    r"out of memory\?|DefaultCPUAllocator|std::bad_alloc|less than requested memory for kv"
)
NCCL = re.compile(r"nccl", _IGNORE)
NCCL_FAULT = re.compile(
    r"nccl\w*error|ncclUnhandled|ncclSystem|ncclRemote|NCCL error|NCCL WARN|collective operation timeout|"
    r"Watchdog caught|NET/IB|NET/Socket",
    _IGNORE,
)
TENSOR_PARALLEL = re.compile(
    r"must be divisible by tensor parallel size|(divisible by|multiple of)\s*`?tensor_model_parallel_size|"
    r"tensor[- _](model[- _])?parallel\w*.{0,60}(mismatch|divisible|not equal|does not (match|divide)|different)|"
    r"size mismatch for .*copying a param|AssertionError: \d+ is not divisible by \d+",
    _IGNORE,
)
VERSIONS = re.compile(
    r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|libcuda\.so|libcudart|"
    r"libnccl\.so|NVML.*(mismatch|version)|Driver/library version mismatch|undefined symbol|"
    r"no kernel image is available|unsupported display driver|forward compatibility was attempted|"
    r"PTX was compiled with an unsupported toolchain|NCCL version mismatch|requires torch|"
    r"(ImportError|ModuleNotFoundError|AttributeError).*(torch|megatron|vllm|transformer_engine|flash_attn)|"
    r"version .* (is|are) not (supported|compatible)",
    _IGNORE,
)
MIG = re.compile(r"\bMIG\b|MIG-[0-9a-f]{8}-", _IGNORE)
DUPLICATE_GPU = re.compile(r"Duplicate GPU detected", _IGNORE)
DEVICE_COUNT = re.compile(r"invalid device ordinal|device >= 0 && device < num_gpus", _IGNORE)
DISK = re.compile(f"{DISK_FULL}|No space left on device|Disk quota exceeded", _IGNORE)
HANGS = re.compile(r"(rank \d+ on \S+) (hangs in '(\w+)' for \d+ s|has not been heard of for \d+ s)")
NOT_UP = re.compile(r"not up within")
KILLED = re.compile(r"was killed|SIGKILL|exit code -9")
CRASHED = re.compile(r"SIG(SEGV|BUS|ILL|FPE|ABRT)\b|Segmentation fault|Bus error|Illegal instruction|\(Aborted")
LOST_NODE = re.compile(
    r"no answer from (\S.*?): the job goes back|rank \d+ on (\S+) has gone and its step has not|Node failure on (\S+)"
)
ENGINE_DEATH = re.compile(r"engine died \((.*?)\); restart")
CHANGED = re.compile(r"was started with another config|is not the file .* was started with")
GIVES_UP = re.compile(r"gives up: ")


def out_of_gpu_memory(run: Evidence) -> Symptom | None:
    """CUDA had no memory left: at the start, in generation, or later."""
    hit = blamed(run, CUDA_MEMORY)
    if hit is None:
        return None
    attempt, told = hit
    memory, rollout, batch = run.config.memory, run.config.rollout, run.config.batch
    around = f"{told.text} {attempt.error.text if attempt.error else ''}"
    in_engine = ENGINE_MEMORY.search(around) is not None and "megatron" not in around
    stages = run.config.parallel.pipeline_model_parallel_size
    recompute = "memory.recompute_granularity=full"
    smaller = (
        [f"batch.micro_batch_tokens={batch.micro_batch_tokens // 2}"]
        if batch.micro_batch_tokens
        else ["batch.micro_batch_size=1"]
    )
    if in_engine:
        name, cause = "out_of_memory_in_generation", "the engine finds less memory than its cache is to have"
        used = memory_estimate.engine_setting(run.config, "gpu_memory_utilization")
        settings = [
            f"rollout.engine.gpu_memory_utilization={max(0.1, used - 0.2):.1f}",
            "memory.offload_trainer=true",
            f"rollout.tensor_parallel_size={2 * rollout.tensor_parallel_size}",
        ]
        if run.config.cluster.platform == "cpu":
            settings = [f"rollout.kv_cache_gb={2 * rollout.kv_cache_gb:g}"]
    elif attempt.steps is None:
        name = "out_of_memory_at_start"
        at_stage = " of the pipeline's stages (the first one keeps activations of most micro-batches)" * (stages > 1)
        cause = f"weights, gradients, optimizer state and first activations{at_stage} do not fit"
        settings = [recompute, "memory.offload_optimizer=true", "optimizer.distributed=true", *smaller]
        settings += [f"parallel.pipeline_model_parallel_size={2 * stages}"]
    else:
        name, cause = "out_of_memory_in_update", "a micro-batch with longer samples than those before it"
        settings = [recompute, *smaller, "memory.offload_optimizer=true", "optimizer.distributed=true"]
    after = "before its first step" if attempt.steps is None else f"after step {attempt.steps[1]}"
    if memory.recompute_granularity == "full":
        settings.remove(recompute) if recompute in settings else None
    evidence = (f"attempt {attempt.number} ended {after}: {short(told)}",)
    return Symptom(name, weight(run, attempt), evidence, cause, tuple(settings), (told.where,))


def out_of_host_memory(run: Evidence) -> Symptom | None:
    """A process was killed for want of host memory, or may have been."""
    hit = blamed(run, HOST_MEMORY, lines=True) or blamed(run, KILLED)
    if hit is None or CUDA_MEMORY.search(hit[1].text) or CRASHED.search(hit[1].text):
        return None
    attempt, told = hit
    sure = HOST_MEMORY.search(told.text) is not None
    async_save, cache = run.config.checkpoint.async_save, run.config.rollout.kv_cache_gb
    return Symptom(
        "out_of_host_memory" if sure else "killed_rank",
        weight(run, attempt),
        (f"attempt {attempt.number}: {short(told)}",),
        "the memory limit of the node or the job was reached (weights and checkpoints in host memory, graders)"
        if sure
        else "killed by SIGKILL: by hand, or by the kernel or Slurm for want of memory, which nothing here tells apart",
        (
            *([f"rollout.kv_cache_gb={cache / 2:g}"] if "memory for kv" in told.text else []),  # of an engine on a CPU
            *(["slurm.mem='0'"] if run.config.slurm.mem != "0" else []),
            *(["rollout.sleep_level=2"] if run.config.cluster.platform == "cuda" else []),  # CPU engines do not sleep
            *(["checkpoint.async_save=false"] if async_save else []),
            f"reward.workers={max(1, run.config.reward.workers // 2)}",
            *(["memory.offload_optimizer=false"] if run.config.memory.offload_optimizer else []),
        ),
        (told.where, "dmesg, or sacct -j JOB -o State,MaxRSS: whether it was the OOM killer"),
    )


def crashed_rank(run: Evidence) -> Symptom | None:
    """A rank that a library took down with it."""
    hit = blamed(run, CRASHED)
    if hit is None or HANGS.search(hit[0].detail):  # one that hung is ended so that it shows its stacks
        return None
    attempt, told = hit
    stacks = attempt.error.where if attempt.error and attempt.error.where.endswith(".stacks") else None
    return Symptom(
        "crashed_rank",
        weight(run, attempt),
        (f"attempt {attempt.number}: {short(told)}",),
        "a library crashed: a fault of its own, packages that do not fit each other, or no room in /dev/shm (SIGBUS)",
        ("tracking.debug=true",),
        (
            f"{stacks}: what it was at" if stacks else f"{told.where}: what it said last",
            "gspo-hpc doctor CONFIG: versions, /dev/shm",
        ),
    )


def nccl_errors(run: Evidence) -> Symptom | None:
    """NCCL failed, or a collective took too long."""
    hit = blamed(run, NCCL_FAULT) or blamed(run, NCCL)
    if hit is None or any(p.search(hit[1].text) for p in (CUDA_MEMORY, DUPLICATE_GPU, VERSIONS)):
        return None
    attempt, told = hit
    timeout = re.search(r"timeout|timed out|Watchdog", told.text, _IGNORE) is not None
    return Symptom(
        "nccl_error",
        weight(run, attempt),
        (f"attempt {attempt.number}: {short(told)}",),
        "a collective was not joined by all ranks in time: a rank hangs or has gone, or ranks call different ones"
        if timeout
        else "the network between GPUs or nodes: the wrong interface, a link that is down, a limit on locked memory",
        (
            "tracking.debug=true",
            *([] if timeout else ["slurm.environment.NCCL_SOCKET_IFNAME=^lo,docker0"]),
        ),
        ("gspo-hpc logs RUN --errors", f"{told.where}: NCCL's own lines before it"),
    )


def tensor_parallel_mismatch(run: Evidence) -> Symptom | None:
    """Tensor-parallel sizes that do not fit the model, or each other."""
    hit = blamed(run, TENSOR_PARALLEL)
    if hit is None:
        return None
    attempt, told = hit
    train, generate = run.config.parallel.tensor_model_parallel_size, run.config.rollout.tensor_parallel_size
    return Symptom(
        "tensor_parallel_mismatch",
        weight(run, attempt),
        (f"attempt {attempt.number}: {short(told)}", f"trainer TP {train}, rollout TP {generate}"),
        "heads, KV heads or widths of the model do not divide by a tensor-parallel size",
        (
            *(f"rollout.tensor_parallel_size={generate // n}" for n in (2,) if generate > 1),
            *(f"parallel.tensor_model_parallel_size={train // n}" for n in (2,) if train > 1),
        ),
        ("gspo-hpc plan CONFIG: which sizes divide", told.where),
    )


def versions_that_do_not_fit(run: Evidence) -> Symptom | None:
    """CUDA, driver, NCCL and the packages are not made for each other."""
    hit = blamed(run, VERSIONS)
    changed = _version_changes(run)
    if hit is None:
        if not changed:
            return None
        return Symptom(
            "versions_changed",
            "note",
            changed,
            "attempts ran with different packages: what follows is not bit for bit what would have been",
        )
    attempt, told = hit
    found = ", ".join(f"{name} {text}" for name, text in attempt.versions.items())
    return Symptom(
        "version_mismatch",
        weight(run, attempt),
        (f"attempt {attempt.number}: {short(told)}", *([f"versions: {found}"] if found else []), *changed),
        "driver, CUDA, NCCL and packages (torch, Megatron-Core, Transformer Engine, vLLM) do not fit each other",
        (),
        (
            "gspo-hpc doctor CONFIG: what is here, and what fits",
            "slurm.modules and slurm.container: the CUDA that ranks get",
            told.where,
        ),
    )


def mig_devices(run: Evidence) -> Symptom | None:
    """Parts of a GPU (MIG) in the place of whole ones."""
    names = sorted({name for attempt in run.attempts for name in attempt.devices if MIG.search(name)})
    hit = blamed(run, DUPLICATE_GPU) or blamed(run, MIG, lines=True)
    ordinal = blamed(run, DEVICE_COUNT)
    if not names and hit is None:
        return None
    told = (hit or ordinal or (None, None))[1]
    last = (hit or ordinal or (None, None))[0]
    evidence = [f"device: {', '.join(names)}"] if names else []
    evidence += [f"attempt {last.number}: {short(told)}"] if last and told else []
    several = run.config.world_size > 1
    return Symptom(
        "mig_devices",
        weight(run, last) if last else ("warning" if several else "note"),
        tuple(evidence),
        "a process sees one MIG instance, whatever the node has, and NCCL takes instances of one GPU for one device",
        ("cluster.gpus_per_node=1", "cluster.nodes=1") if several else (),
        ("slurm.gres, slurm.constraint or slurm.partition: nodes with whole GPUs (nvidia-smi -L shows MIG ones)",),
    )


def disk_full(run: Evidence) -> Symptom | None:
    """There was no room for a file."""
    hit = blamed(run, DISK)
    if hit is None:
        return None
    attempt, told = hit
    keep = run.config.checkpoint.keep
    return Symptom(
        "disk_full",
        weight(run, attempt),
        (f"attempt {attempt.number}: {short(told)}",),
        "the disk or the quota of the run directory (or of /tmp or /dev/shm, if the path is there) is used up",
        (f"checkpoint.keep={max(1, keep - 1)}", f"checkpoint.interval={2 * run.config.checkpoint.interval}"),
        ("free some space; the same command goes on from the newest whole checkpoint", "df -h, df -i, quota"),
    )


def hanging_rank(run: Evidence) -> Symptom | None:
    """A rank that no longer got on, or did not come up."""
    hit = blamed(run, HANGS) or blamed(run, NOT_UP)
    if hit is None:
        return None
    attempt, told = hit
    faults = run.config.faults
    silent_rank, late = "has not been heard of" in told.text, NOT_UP.search(told.text) is not None
    stacks = attempt.error.where if attempt.error and attempt.error.where.endswith(".stacks") else None
    if late:
        cause, settings = (
            "a node is slow to start, or the rank was ended",
            [f"faults.bringup_timeout={3 * faults.bringup_timeout:g}"],
        )
    elif silent_rank:
        cause, settings = "its process was stopped, or its node is lost or out of memory", []
    else:
        cause, settings = (
            "a collective that another rank does not join, a slow disk, or a step that takes longer",
            [
                "tracking.debug=true",
                f"faults.hang_timeout={2 * faults.hang_timeout:g}",
            ],
        )
    return Symptom(
        "hanging_rank",
        weight(run, attempt),
        (f"attempt {attempt.number}: {short(told)}",),
        cause,
        tuple(settings),
        (f"{stacks}: what it was at" if stacks else "gspo-hpc logs RUN --errors",),
    )


def lost_node(run: Evidence) -> Symptom | None:
    """A node that no longer answered."""
    said = [told for told in run.job_said if LOST_NODE.search(told.text)]
    hit = blamed(run, LOST_NODE)
    if hit is None and not said:
        return None
    evidence = [f"attempt {hit[0].number}: {short(hit[1])}"] if hit else []
    texts = [told.text for told in (*said, *([hit[1]] if hit else []))]
    groups = (group for text in texts if (found := LOST_NODE.search(text)) is not None for group in found.groups())
    names = dict.fromkeys(name for group in groups if group for name in group.split(", "))
    before = [run.config.slurm.exclude] if run.config.slurm.exclude else []
    return Symptom(
        "lost_node",
        weight(run, hit[0]) if hit else "warning",
        (*evidence, *(short(told) for told in said[-2:])),
        "the node went down, or its network: the job goes back to the queue without it",
        (f"slurm.exclude={','.join([*before, *names])}",) if names else (),
        ("sinfo -R, scontrol show node: what Slurm says of it", "slurm.exclude: leave the node out"),
    )


def engine_mismatch(run: Evidence) -> Symptom | None:
    """The check after a weight sync failed."""
    hit = blamed(run, re.compile("ProbeMismatch|engine and trainer disagree on the probe"))
    if hit is None:
        return None
    attempt, told = hit
    return Symptom(
        "engine_mismatch",
        weight(run, attempt),
        (f"attempt {attempt.number}: {short(told)}",),
        "the engine does not compute what the trainer does: another precision, or weights that did not arrive",
        ("rollout.dtype=float32", "model.dtype=float32"),
        (told.where, "rollout.probe_max_gap and rollout.probe_mean_gap: only where the gap is known to be rounding"),
    )


def changed_settings(run: Evidence) -> Symptom | None:
    """A start that was refused since the config or the data were not those of the run."""
    said = [told for told in run.job_said if CHANGED.search(told.text)]
    refused = [a for a in run.attempts if a.reason == "refused"]
    if not said and not refused:
        return None
    last = run.attempts[-1] if run.attempts else None
    evidence = [
        *(short(told) for told in said[-2:]),
        *(f"attempt {a.number}: {one_line(a.detail)}" for a in refused[-2:]),
    ]
    return Symptom(
        "refused",
        "problem"
        if (said and (last is None or last.reason != "done")) or (last and last.reason == "refused")
        else "note",
        tuple(evidence),
        "settings, data or graders that make it another run" if said else "a mistake that only the model or data show",
        (),
        ("give the old values back, or start another run: another run.name",) if said else ("what the text says",),
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


FINDERS: tuple[Finder, ...] = (
    out_of_gpu_memory,
    disk_full,
    mig_devices,
    versions_that_do_not_fit,
    tensor_parallel_mismatch,
    engine_mismatch,
    hanging_rank,
    lost_node,
    out_of_host_memory,
    crashed_rank,
    nccl_errors,
    changed_settings,
)
