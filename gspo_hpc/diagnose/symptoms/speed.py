"""Symptoms of speed and memory: idle GPUs, communication, rewards, checkpoints, no progress.

Shares refer to the wall time of all recent steps together, so one slow step alone is no symptom.
"""

from __future__ import annotations

import math

from gspo_hpc.config.constants import PHASES
from gspo_hpc.diagnose.evidence import (
    ENOUGH,
    SLOW,
    VERY_SLOW,
    Evidence,
    mean,
    middle,
    percent,
    share_of_step,
    span,
)
from gspo_hpc.diagnose.registry import Finding, symptom
from gspo_hpc.runs.reader import value
from gspo_hpc.system.text import rounded

# The target for GPUs is above 80 %; below 50 % is where people start to ask why.
DEVICE_USE, DEVICE_USE_LOW = 0.8, 0.5
# The target for the time in collectives divided by the time computing.
COMMUNICATION = 0.3
# The memory of updates varies by more than a fifth between steps.
MEMORY_SWING = 0.2
# A run without a new step for this many times its slowest recent step, and for at least this many seconds.
NO_PROGRESS, NO_PROGRESS_SECONDS = 5.0, 300.0


@symptom(
    "no_progress",
    severity="warning",
    shows="the run is alive but has logged no step for five times as long as its slowest step took",
    change="`tracking.debug`",
)
def no_progress(run: Evidence) -> Finding | None:
    """Find a running run that no longer logs steps."""
    since = run.seconds_since_step
    seconds = [n for _, n in run.points("seconds", run.recent)]
    if since is None or len(seconds) < ENOUGH or since < max(NO_PROGRESS_SECONDS, NO_PROGRESS * max(seconds)):
        return None
    timeout = run.config.faults.hang_timeout
    return Finding(
        (
            f"there was no step for {since:.0f} s after step {run.steps}; the slowest recent step took "
            f"{max(seconds):.0f} s",
        ),
        "a rank hangs, an evaluation or a save takes long, or the node stopped",
        ("tracking.debug=true",),
        ("gspo-hpc logs RUN -f", f"faults.hang_timeout: ends a run that hangs after {timeout:.0f} s"),
    )


@symptom(
    "low_device_use",
    severity="warning",
    shows="`device_use` is below 80 % (a problem below 50 %), and the phases that take the time",
    change="`parallel.overlap_grad_reduce`, `overlap_param_gather`; `CUDA_DEVICE_MAX_CONNECTIONS=1` (set automatically "
    "with TP or CP); `rollout.engine.max_num_seqs`; then profile a step",
)
def low_device_use(run: Evidence) -> Finding | None:
    """Find GPUs that are idle for much of the time."""
    points = run.points("device_use", run.recent)
    if len(points) < ENOUGH or mean(points) >= DEVICE_USE:
        return None
    use = mean(points)
    phases = {name: found[0] for name in PHASES if (found := share_of_step(run, f"seconds/{name}")) is not None}
    shown = ", ".join(f"{name} {percent(s)}" for name, s in sorted(phases.items(), key=lambda i: -i[1])[:3])
    ratio = run.points("communication_over_computation", run.computed)
    collectives = f"; communication / computation {middle(ratio):.2f} (target below {COMMUNICATION})" if ratio else ""
    return Finding(
        (
            f"GPUs were busy {percent(use)} of the time in {span(points)} (target above {percent(DEVICE_USE)})",
            f"the time is spent in: {shown or 'unknown phases'}{collectives}",
        ),
        "collectives do not overlap with computation, engines have too few sequences, or GPUs wait for rewards and "
        "saves",
        (*_overlap(run), "rollout.engine.max_num_seqs=512", f"tracking.profile_steps=[{run.steps + 2}]"),
        severity="problem" if use < DEVICE_USE_LOW else "warning",
    )


@symptom(
    "communication",
    severity="warning",
    shows="`communication_over_computation` is above 0.3; a note on CPUs",
    change="the same overlaps; a smaller TP; larger micro-batches",
)
def communication(run: Evidence) -> Finding | None:
    """Find collectives that take long compared with computation."""
    points = run.points("communication_over_computation", run.computed)
    if len(points) < ENOUGH or middle(points) <= COMMUNICATION:
        return None
    cpu = run.config.cluster.platform == "cpu"
    parallel, batch = run.config.parallel, run.config.batch
    shrink = []
    if parallel.tensor_model_parallel_size > 1:
        shrink.append(f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size // 2}")
    if batch.micro_batch_tokens:
        shrink.append(f"batch.micro_batch_tokens={2 * batch.micro_batch_tokens}")
    elif batch.micro_batch_size:
        shrink.append(f"batch.micro_batch_size={2 * batch.micro_batch_size}")
    return Finding(
        (
            f"collectives take {middle(points):.2f} times as long as computation (median, {span(points)}; target below "
            f"{COMMUNICATION})",
        ),
        "ranks that talk over gloo share the cores; on CPUs this says little"
        if cpu
        else "collectives do not overlap with computation, tensor parallelism spans nodes, or micro-batches are small",
        () if cpu else (*_overlap(run), *shrink),
        severity="note" if cpu else "problem" if middle(points) > 2 * COMMUNICATION else "warning",
    )


def _overlap(run: Evidence) -> tuple[str, ...]:
    """Settings that overlap collectives with computation.

    The trainer sets CUDA_DEVICE_MAX_CONNECTIONS itself if layers are split.
    """
    parallel = run.config.parallel
    split = parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1
    return (
        "parallel.overlap_grad_reduce=true",
        *(["parallel.overlap_param_gather=true"] if run.config.optimizer.distributed else []),
        *([] if split else ["slurm.environment.CUDA_DEVICE_MAX_CONNECTIONS='1'"]),
    )


@symptom(
    "memory_swings",
    severity="warning",
    shows="the peak memory of updates (`runtime_memory_gib`, GPUs) differs by more than 20 % between steps",
    change="`memory.recompute_granularity=full`, `batch.micro_batch_tokens`",
)
def memory_swings(run: Evidence) -> Finding | None:
    """Find updates whose GPU memory varies between steps."""
    points = run.points("runtime_memory_gib", run.recent)
    if run.config.cluster.platform != "cuda" or len(points) < ENOUGH:
        return None
    least, most = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    if most[1] <= 0.0 or (most[1] - least[1]) / most[1] <= MEMORY_SWING:
        return None
    swing, budget = (most[1] - least[1]) / most[1], run.config.batch.micro_batch_tokens
    return Finding(
        (
            f"updates took {rounded(least[1])} GiB at step {least[0]} and {rounded(most[1])} GiB at step {most[0]}: "
            f"they differ by {percent(swing)} (target below {percent(MEMORY_SWING)})",
        ),
        "activations grow with the samples in a micro-batch; the largest micro-batch decides whether it fits",
        (
            "memory.recompute_granularity=full",
            f"batch.micro_batch_tokens={budget // 2}" if budget else "batch.micro_batch_size=1",
        ),
        ()
        if budget
        else ("batch.micro_batch_tokens instead of micro_batch_size: a budget that no micro-batch exceeds",),
    )


@symptom(
    "slow_rewards",
    severity="warning",
    shows="a tenth of the step or more is spent waiting for reward functions alone",
    change="`reward.workers`",
)
def slow_rewards(run: Evidence) -> Finding | None:
    """Find steps in which generation is done and reward functions are not."""
    found = share_of_step(run, "seconds/reward_wait")
    if found is None or found[0] < SLOW:
        return None
    share, seconds, points = found
    workers = run.config.reward.workers
    return Finding(
        (f"the run waited {seconds:.1f} s for reward functions alone, {percent(share)} of {span(points)}",),
        f"reward functions are slower than generation (reward.workers is {workers})",
        (f"reward.workers={4 * workers}",),
        (
            "reward.functions: find out what takes so long",
            "slurm.cpus_per_task: gives the reward functions more cores",
        ),
        "problem" if share >= VERY_SLOW else "warning",
    )


@symptom(
    "slow_checkpoints",
    severity="warning",
    shows="training waits for checkpoints a tenth of the time or more",
    change="`checkpoint.async_save`, `checkpoint.interval`",
)
def slow_checkpoints(run: Evidence) -> Finding | None:
    """Find training that waits for checkpoints."""
    points = run.points("seconds/save", run.recent)
    whole = math.fsum(value(record, "seconds") or 0.0 for record in run.recent)
    if len(run.recent) < ENOUGH or not points or whole <= 0.0:
        return None
    # The seconds of a step do not include its save.
    saving = math.fsum(n for _, n in points)
    share = saving / (whole + saving)
    if share < SLOW:
        return None
    options = run.config.checkpoint
    # An interval at which saving takes a hundredth of the time.
    interval = max(2 * options.interval, math.ceil(mean(points) * len(run.recent) / whole * 100))
    return Finding(
        (
            f"training waited {saving:.1f} s for {len(points)} checkpoints in {span(run.points('step', run.recent))}: "
            f"{percent(share)} of the time, {rounded(mean(points))} s each (checkpoint.interval {options.interval})",
        ),
        "the file system is slow, or a checkpoint starts before the last one is written"
        if options.async_save
        else "checkpoint.async_save is false, so training waits for every save",
        (*([] if options.async_save else ["checkpoint.async_save=true"]), f"checkpoint.interval={interval}"),
        ("run.dir: use a faster file system",),
        "problem" if share >= VERY_SLOW else "warning",
    )
