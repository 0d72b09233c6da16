"""Symptoms of ranks, nodes and disks: killed and crashed processes, hangs, lost nodes, full disks.

What ended the last attempt is a problem; what the run recovered from is a warning.
"""

from __future__ import annotations

from gspo_hpc.config.derived import bringup_seconds
from gspo_hpc.diagnose.evidence import Evidence
from gspo_hpc.diagnose.excerpts import failure_matching, quoted, severity_of
from gspo_hpc.diagnose.patterns import (
    CRASHED,
    CUDA_MEMORY,
    DISK,
    HANGS,
    HOST_MEMORY,
    KILLED,
    KILLED_SUPERVISOR,
    LOST_NODE,
    NODE_SILENT,
    NOT_UP,
)
from gspo_hpc.diagnose.registry import Finding, symptom


@symptom(
    "disk_full",
    severity="problem",
    shows="the error of the file system",
    change="`checkpoint.keep`, `checkpoint.interval`",
    lines=DISK,
    job_lines=DISK,
    explains_failure=True,
)
def disk_full(run: Evidence) -> Finding | None:
    """Find an attempt that ended because a disk or a quota was full.

    The ranks' logs and the attempt's record may lie on that disk and lack the error: then the job's log has it.
    """
    hit = failure_matching(run, DISK)
    if hit is not None:
        attempt, excerpt = hit
        evidence, severity = f"attempt {attempt.number}: {quoted(excerpt)}", severity_of(run, attempt)
    elif reported := [excerpt for excerpt in run.job_excerpts if DISK.search(excerpt.text)]:
        evidence, severity = quoted(reported[-1]), "warning" if run.state in ("done", "running") else "problem"
    else:
        return None
    keep = run.config.checkpoint.keep
    return Finding(
        (evidence,),
        "the disk or the quota of the run directory is full (or that of /tmp or /dev/shm, if the error names it)",
        (f"checkpoint.keep={max(1, keep - 1)}", f"checkpoint.interval={2 * run.config.checkpoint.interval}"),
        (
            "free some space; the same command then resumes from the newest complete checkpoint",
            "df -h, df -i, quota: show what is full",
        ),
        severity,
    )


@symptom(
    "hanging_rank",
    severity="problem",
    shows="which rank stopped making progress, in which phase, and its stacks",
    change="`faults.*_timeout`, `tracking.debug`",
    explains_failure=True,
)
def hanging_rank(run: Evidence) -> Finding | None:
    """Find a rank that stopped making progress or never started."""
    hit = failure_matching(run, HANGS) or failure_matching(run, NOT_UP)
    if hit is None:
        return None
    attempt, excerpt = hit
    faults = run.config.faults
    silent, late = "has not been heard of" in excerpt.text, NOT_UP.search(excerpt.text) is not None
    stacks = attempt.error.where if attempt.error and attempt.error.where.endswith(".stacks") else None
    if late:
        cause = "a node is slow to start, or the rank ended before it could report"
        settings = [f"faults.bringup_timeout={3 * bringup_seconds(run.config):g}"]
    elif silent:
        cause, settings = "the rank's process was stopped, or its node is lost or out of memory", []
    else:
        cause = "another rank does not join a collective, a disk is slow, or a step takes longer than the timeout"
        settings = ["tracking.debug=true", f"faults.hang_timeout={2 * faults.hang_timeout:g}"]
    return Finding(
        (f"attempt {attempt.number}: {quoted(excerpt)}",),
        cause,
        tuple(settings),
        (f"{stacks}: shows where the rank hung" if stacks else "gspo-hpc logs RUN --errors",),
        severity_of(run, attempt),
    )


@symptom(
    "lost_node",
    severity="warning",
    shows="the node that stopped answering",
    change="`slurm.exclude`, with the name of the node",
    job_lines=NODE_SILENT,
    explains_failure=True,
)
def lost_node(run: Evidence) -> Finding | None:
    """Find nodes that stopped answering."""
    excerpts = [excerpt for excerpt in run.job_excerpts if LOST_NODE.search(excerpt.text)]
    hit = failure_matching(run, LOST_NODE)
    if hit is None and not excerpts:
        return None
    evidence = [f"attempt {hit[0].number}: {quoted(hit[1])}"] if hit else []
    texts = [excerpt.text for excerpt in (*excerpts, *([hit[1]] if hit else []))]
    groups = (group for text in texts if (found := LOST_NODE.search(text)) is not None for group in found.groups())
    names = dict.fromkeys(name for group in groups if group for name in group.split(", "))
    before = [run.config.slurm.exclude] if run.config.slurm.exclude else []
    return Finding(
        (*evidence, *(quoted(excerpt) for excerpt in excerpts[-2:])),
        "the node or its network went down; the job goes back to the queue without it",
        (f"slurm.exclude={','.join([*before, *names])}",) if names else (),
        ("sinfo -R, scontrol show node: show what Slurm knows about the node", "slurm.exclude: leave the node out"),
        severity_of(run, hit[0]) if hit else "warning",
    )


@symptom(
    "out_of_host_memory",
    "killed_rank",
    severity="problem",
    shows="the message of the OOM killer, or an engine on a CPU found too little memory; or a SIGKILL without a "
    "known sender",
    change="`slurm.mem`, `rollout.sleep_level`, `checkpoint.async_save`, `reward.workers`; `rollout.kv_cache_gb` (CPU)",
    lines=HOST_MEMORY,
    explains_failure=True,
)
def out_of_host_memory(run: Evidence) -> Finding | None:
    """Find a process that was killed because host memory ran out, or that may have been."""
    hit = failure_matching(run, HOST_MEMORY, lines=True) or failure_matching(run, KILLED)
    if hit is None or CUDA_MEMORY.search(hit[1].text) or CRASHED.search(hit[1].text):
        return None
    attempt, excerpt = hit
    sure = HOST_MEMORY.search(excerpt.text) is not None
    cuda, rollout = run.config.cluster.platform == "cuda", run.config.rollout
    return Finding(
        (f"attempt {attempt.number}: {quoted(excerpt)}",),
        "the node or the job reached its memory limit (weights and checkpoints in host memory, reward functions)"
        if sure
        else "a SIGKILL ended the rank: somebody sent it, or the kernel or Slurm did because memory ran out; the logs "
        "do not tell which",
        (
            *(
                [f"rollout.kv_cache_gb={rollout.kv_cache_gb / 2:g}"] if "memory for kv" in excerpt.text else []
            ),  # an engine on a CPU
            *(["slurm.mem='0'"] if run.config.slurm.mem != "0" else []),
            *(["rollout.sleep_level=2"] if cuda and rollout.sleep_level == 1 else []),  # engines on CPUs do not sleep
            *(["checkpoint.async_save=false"] if run.config.checkpoint.async_save else []),
            f"reward.workers={max(1, run.config.reward.workers // 2)}",
            *(["memory.offload_optimizer=false"] if run.config.memory.offload_optimizer else []),
        ),
        (excerpt.before, "dmesg or sacct -j JOB -o State,MaxRSS shows whether it was the OOM killer"),
        severity_of(run, attempt),
        "out_of_host_memory" if sure else "killed_rank",
    )


@symptom(
    "killed_supervisor",
    severity="warning",
    shows="the process that watches the ranks of a job was killed, and on which node",
    change="`slurm.mem`, `reward.workers`",
    explains_failure=True,
)
def killed_supervisor(run: Evidence) -> Finding | None:
    """Find a supervisor that was killed; another one took over."""
    hit = failure_matching(run, KILLED_SUPERVISOR)
    if hit is None:
        return None
    attempt, excerpt = hit
    return Finding(
        (f"attempt {attempt.number}: {quoted(excerpt)}",),
        "somebody sent the signal, or the kernel or Slurm did because the memory of the job's first node ran out; the "
        "supervisor itself needs little of it",
        (
            *(["slurm.mem='0'"] if run.config.slurm.mem != "0" else []),
            f"reward.workers={max(1, run.config.reward.workers // 2)}",
        ),
        ("dmesg or sacct -j JOB -o State,MaxRSS shows whether it was the OOM killer",),
        severity_of(run, attempt),
    )


@symptom(
    "crashed_rank",
    severity="problem",
    shows="a segmentation fault, bus error or abort, with the stacks",
    change="`tracking.debug`, `gspo-hpc doctor` (versions, `/dev/shm`)",
    explains_failure=True,
)
def crashed_rank(run: Evidence) -> Finding | None:
    """Find a rank that a library crashed."""
    hit = failure_matching(run, CRASHED)
    if hit is None or HANGS.search(hit[0].detail):  # a rank that hung is aborted so that it writes its stacks
        return None
    attempt, excerpt = hit
    stacks = attempt.error.where if attempt.error and attempt.error.where.endswith(".stacks") else None
    return Finding(
        (f"attempt {attempt.number}: {quoted(excerpt)}",),
        "a library crashed: it has a bug, packages do not fit together, or /dev/shm is full (SIGBUS)",
        ("tracking.debug=true",),
        (
            f"{stacks}: shows where the rank crashed" if stacks else f"{excerpt.where}: read the last lines",
            "gspo-hpc doctor CONFIG: checks versions and /dev/shm",
        ),
        severity_of(run, attempt),
    )
