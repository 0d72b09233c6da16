"""Symptoms of speed: where the time and the memory of a run go.

Floor 6. Every function is pure over the evidence, and answers None where the run does not show its symptom. Shares are
of the wall time of the recent steps together: one slow step is none.
"""

from __future__ import annotations

import math
from collections import Counter

from gspo_hpc.report_data import value
from gspo_hpc.symptoms import (
    ENOUGH,
    ENOUGH_FOR_TREND,
    Evidence,
    Finder,
    Symptom,
    mean,
    middle,
    number,
    percent,
    share_of_step,
    span,
)

# BATCH_RULES: GPU use is to be above 80 %, and below 50 % is what people come with.
DEVICE_USE, DEVICE_USE_LOW = 0.8, 0.5
# BATCH_RULES: time in collectives over time computing.
COMMUNICATION = 0.3
# BATCH_RULES: memory that swings by more than a fifth between steps.
MEMORY_SWING = 0.2
# Of a step: below a tenth nothing else gets faster for the mend; above three tenths it is the first thing to mend.
SLOW, VERY_SLOW = 0.1, 0.3
# A rank that computes a quarter longer than the mean, in three of four steps, is slower and not unlucky; and it costs
# where the others wait for it for a twentieth of the step.
STRAGGLER, STRAGGLER_STEPS, STRAGGLER_COST = 1.25, 0.75, 0.05
# Where packing gave a rank as much more to do as four fifths of what it takes longer, the rank is not to blame.
EXPLAINED = 0.8
# The heaviest rank has a tenth more tokens than the mean. Packing comes to within a hundredth where it has any choice.
UNEVEN_PACKING, UNEVEN_PACKING_HIGH = 1.1, 1.3
# Half of what fits into micro-batches is not used, and every rank has several.
FILL = 0.5
# Engines share the prompts of a rollout one by one, so all are done at nearly the same time, whatever their speed.
ENGINE_BUSY, ENGINE_SPEED = 0.7, 0.7
# With a tenth of its sequences an engine makes hardly more than a tenth of its tokens a second.
TAIL, TAIL_HIGH = 0.3, 0.5
# A run without a new step for so many times its slowest recent step, and for at least so many seconds.
SILENT, SILENT_SECONDS = 5.0, 300.0

PROFILE = "tracking.profile_steps=[{}]"


def low_device_use(run: Evidence) -> Symptom | None:
    """GPUs that wait."""
    points = run.points("device_use", run.recent)
    if len(points) < ENOUGH or mean(points) >= DEVICE_USE:
        return None
    use = mean(points)
    phases = {
        name: found[0]
        for name in ("generate", "reward_wait", "sync", "old_logprobs", "reference", "update", "save", "eval")
        if (found := share_of_step(run, f"seconds/{name}")) is not None
    }
    shown = ", ".join(f"{name} {percent(s)}" for name, s in sorted(phases.items(), key=lambda i: -i[1])[:3])
    ratio = run.points("communication_over_computation", run.computed)
    told = f"; communication / computation {middle(ratio):.2f} (target below {COMMUNICATION})" if ratio else ""
    return Symptom(
        "low_device_use",
        "problem" if use < DEVICE_USE_LOW else "warning",
        (
            f"GPUs were at work {percent(use)} of {span(points)} (target above {percent(DEVICE_USE)})",
            f"the time goes to: {shown or 'not known'}{told}",
        ),
        "collectives that nothing runs beside, engines with too few sequences, or waiting for graders and saves",
        (
            *_overlap(run),
            "rollout.engine.max_num_seqs=512",
            PROFILE.format(run.steps + 2),
        ),
    )


def communication(run: Evidence) -> Symptom | None:
    """Collectives take long against computing."""
    points = run.points("communication_over_computation", run.computed)
    if len(points) < ENOUGH or middle(points) <= COMMUNICATION:
        return None
    cpu = run.config.cluster.platform == "cpu"
    at = run.config.parallel
    shrink = []
    if at.tensor_model_parallel_size > 1:
        shrink.append(f"parallel.tensor_model_parallel_size={at.tensor_model_parallel_size // 2}")
    if run.config.batch.micro_batch_tokens:
        shrink.append(f"batch.micro_batch_tokens={2 * run.config.batch.micro_batch_tokens}")
    elif run.config.batch.micro_batch_size:
        shrink.append(f"batch.micro_batch_size={2 * run.config.batch.micro_batch_size}")
    return Symptom(
        "communication",
        "note" if cpu else "problem" if middle(points) > 2 * COMMUNICATION else "warning",
        (
            f"collectives take {middle(points):.2f} of the time that ranks compute (median, {span(points)}; target "
            f"below {COMMUNICATION})",
        ),
        "gloo between ranks that share the cores; on a CPU this says little"
        if cpu
        else "collectives that nothing runs beside, tensor parallelism beyond a node, or too small micro-batches",
        () if cpu else (*_overlap(run), *shrink),
    )


def _overlap(run: Evidence) -> tuple[str, ...]:
    """Settings with which collectives run beside computation. CUDA_DEVICE_MAX_CONNECTIONS is set by itself where
    layers are split."""
    at = run.config.parallel
    split = at.tensor_model_parallel_size > 1 or at.context_parallel_size > 1
    return (
        "parallel.overlap_grad_reduce=true",
        *(["parallel.overlap_param_gather=true"] if run.config.optimizer.distributed else []),
        *([] if split else ["slurm.environment.CUDA_DEVICE_MAX_CONNECTIONS='1'"]),
    )


def memory_swings(run: Evidence) -> Symptom | None:
    """The memory that updates take on a GPU goes up and down."""
    points = run.points("runtime_memory_gib", run.recent)
    if run.config.cluster.platform != "cuda" or len(points) < ENOUGH:
        return None
    least, most = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    if most[1] <= 0.0 or (most[1] - least[1]) / most[1] <= MEMORY_SWING:
        return None
    budget = run.config.batch.micro_batch_tokens
    return Symptom(
        "memory_swings",
        "warning",
        (
            f"updates took {number(least[1])} GiB at step {least[0]} and {number(most[1])} GiB at step {most[0]}: a "
            f"swing of {percent((most[1] - least[1]) / most[1])} (above {percent(MEMORY_SWING)})",
        ),
        "activations grow with the lengths of what is in a micro-batch; the longest one decides whether it fits",
        (
            "memory.recompute_granularity=full",
            f"batch.micro_batch_tokens={budget // 2}" if budget else "batch.micro_batch_size=1",
        ),
        ()
        if budget
        else ("batch.micro_batch_tokens in the place of micro_batch_size: a budget that no micro-batch exceeds",),
    )


def slow_checkpoints(run: Evidence) -> Symptom | None:
    """Training waits for checkpoints."""
    points = run.points("seconds/save", run.recent)
    whole = math.fsum(value(record, "seconds") or 0.0 for record in run.recent)
    if len(run.recent) < ENOUGH or not points or whole <= 0.0:
        return None
    # A step's own seconds do not have its save in them.
    saving = math.fsum(n for _, n in points)
    share = saving / (whole + saving)
    if share < SLOW:
        return None
    options = run.config.checkpoint
    settings = [] if options.async_save else ["checkpoint.async_save=true"]
    # So many steps between two that saving is a hundredth of the time.
    interval = max(2 * options.interval, math.ceil(mean(points) * len(run.recent) / whole * 100))
    return Symptom(
        "slow_checkpoints",
        "problem" if share >= VERY_SLOW else "warning",
        (
            f"training waited {saving:.1f} s for {len(points)} checkpoints in {span(run.points('step', run.recent))}: "
            f"{percent(share)} of the time, {number(mean(points))} s each (checkpoint.interval {options.interval})",
        ),
        "a slow file system, or checkpoints that come before the last one is written"
        if options.async_save
        else "checkpoint.async_save is false: every save is waited for",
        (*settings, f"checkpoint.interval={interval}"),
        ("run.dir: on a faster file system",),
    )


def slow_rewards(run: Evidence) -> Symptom | None:
    """Generation is done and graders are not."""
    found = share_of_step(run, "seconds/reward_wait")
    if found is None or found[0] < SLOW:
        return None
    share, seconds, points = found
    return Symptom(
        "slow_rewards",
        "problem" if share >= VERY_SLOW else "warning",
        (f"nothing but graders was at work for {seconds:.1f} s, {percent(share)} of {span(points)}",),
        f"graders are slower than generation (reward.workers {run.config.reward.workers})",
        (f"reward.workers={4 * run.config.reward.workers}",),
        ("reward.functions: what the grader does for so long", "slurm.cpus_per_task: cores for the graders"),
    )


def stragglers(run: Evidence) -> Symptom | None:
    """The others wait for one rank that has not more to do."""
    waited = share_of_step(run, "seconds/waiting")
    records = [
        r
        for r in run.recent
        if (value(r, "seconds/computing") or 0.0) > 0.0
        and value(r, "seconds/computing_most") is not None
        and value(r, "rank_of_most_seconds") is not None
    ]
    if waited is None or len(records) < ENOUGH_FOR_TREND or waited[0] < STRAGGLER_COST:
        return None
    rank, times = Counter(int(r["rank_of_most_seconds"]) for r in records).most_common(1)[0]
    own = [r for r in records if int(r["rank_of_most_seconds"]) == rank]
    ratios = [(int(r["step"]), r["seconds/computing_most"] / r["seconds/computing"]) for r in own]
    tokens = run.points("packing/imbalance", records)
    if times < STRAGGLER_STEPS * len(records) or middle(ratios) < STRAGGLER:
        return None
    if tokens and middle(tokens) > 1.0 + EXPLAINED * (middle(ratios) - 1.0):
        return None  # it has more to do: unbalanced packing
    stage = run.config.parallel.pipeline_model_parallel_size > 1
    node = rank // max(1, run.config.cluster.gpus_per_node)
    return Symptom(
        "stragglers",
        "problem" if waited[0] >= VERY_SLOW else "warning",
        (
            f"rank {rank} (node {node} of the job) computed longest in {times} of {len(records)} steps, "
            f"{middle(ratios):.2f} times the mean of the ranks (median)",
            f"the other ranks waited {waited[1]:.1f} s, {percent(waited[0])} of {span(waited[2])}",
        ),
        "a stage of the pipeline with more to do, or a slow device or node"
        if stage
        else "its device or node is slow: throttled, shared with another job, or short of cores",
        (PROFILE.format(run.steps + 2),),
        (f"clocks, temperature and other processes on the node of rank {rank}", "slurm.exclude: leave the node out"),
    )


def unbalanced_packing(run: Evidence) -> Symptom | None:
    """Ranks get unequal numbers of tokens, or micro-batches that are half empty."""
    uneven, filled = run.points("packing/imbalance", run.recent), run.points("packing/fill", run.recent)
    counts = run.points("packing/micro_batches", run.recent)
    if len(uneven) < ENOUGH:
        return None
    batch = run.config.batch
    if middle(uneven) >= UNEVEN_PACKING:
        few = counts and middle(counts) <= 2
        return Symptom(
            "unbalanced_packing",
            "problem" if middle(uneven) >= UNEVEN_PACKING_HIGH else "warning",
            (
                f"the heaviest rank has {middle(uneven):.2f} times the mean tokens (median, {span(uneven)})"
                + (f", in {middle(counts):.0f} micro-batches a rank" if counts else ""),
            ),
            "too few completions with an advantage to deal out evenly"
            if few
            else "micro-batches of a fixed number of completions, which differ in length",
            (
                *(["batch.micro_batch_tokens=8192"] if batch.micro_batch_size else []),
                *([f"batch.global_batch_size={2 * batch.global_batch_size}"] if batch.global_batch_size else []),
            ),
            ("batch.micro_batch_tokens in the place of batch.micro_batch_size (set that to null)",)
            if batch.micro_batch_size
            else (),
        )
    if len(filled) >= ENOUGH and middle(filled) < FILL and counts and middle(counts) > 2 and batch.micro_batch_tokens:
        return Symptom(
            "unbalanced_packing",
            "note",
            (f"micro-batches are {percent(middle(filled))} full (median, {span(filled)})",),
            "samples that are longer than half of the budget leave the rest of it empty",
            (f"batch.micro_batch_tokens={2 * batch.micro_batch_tokens}",),
        )
    return None


def unbalanced_engines(run: Evidence) -> Symptom | None:
    """Some engines idle while others generate, or are slower."""
    least, most = run.points("seconds/engine_least", run.recent), run.points("seconds/engine_most", run.recent)
    slowest = run.points("engine_tokens_per_s_least", run.recent)
    fastest = run.points("engine_tokens_per_s_most", run.recent)
    if min(len(least), len(slowest)) < ENOUGH or middle(most) <= 0.0 or middle(fastest) <= 0.0:
        return None
    busy, speed = middle(least) / middle(most), middle(slowest) / middle(fastest)
    if busy >= ENGINE_BUSY and speed >= ENGINE_SPEED:
        return None
    batch, engines = run.config.batch, run.config.rollout.engines_per_node or 0
    more = f"batch.steps_per_generation={2 * (batch.steps_per_generation or 1)}"
    if batch.generation_batch_size:
        more = f"batch.generation_batch_size={2 * batch.generation_batch_size}"
    return Symptom(
        "unbalanced_engines",
        "warning",
        (
            f"the least busy engine had {middle(least):.1f} s, the busiest {middle(most):.1f} (median, {span(most)})",
            f"the slowest made {middle(slowest):,.0f} tokens/s, the fastest {middle(fastest):,.0f}",
        ),
        "one engine is slower than the others (its device or node), or restarted"
        if speed < ENGINE_SPEED
        else "too few prompts a rollout to share among the engines, or one very long answer",
        (more, *([f"rollout.engines_per_node={engines // 2}"] if engines > 1 else [])),
        ("rank logs: the engine's own speed and its cache",),
    )


def generation_tail(run: Evidence) -> Symptom | None:
    """Engines wait for a few long answers."""
    records = [r for r in run.recent if value(r, "seconds/generate_tail") is not None]
    tails, busy = run.points("seconds/generate_tail", records), run.points("seconds/engine_most", records)
    if len(tails) < ENOUGH or middle(busy) <= 0.0:
        return None
    share = middle(tails) / middle(busy)
    generating = share_of_step(run, "seconds/generate")
    if share < TAIL or generating is None or generating[0] < SLOW:
        return None
    longest, lengths = run.points("response_length_max", run.recent), run.points("response_length", run.recent)
    rollout = run.config.rollout
    return Symptom(
        "generation_tail",
        "problem" if share >= TAIL_HIGH and generating[0] >= VERY_SLOW else "warning",
        (
            f"for {percent(share)} of the generation ({middle(tails):.1f} s a rollout, {span(tails)}) at most a "
            "tenth of the completions were still running",
            f"completions have {number(mean(lengths))} tokens on average, the longest "
            f"{max(tokens for _, tokens in longest):.0f} (limit {rollout.max_response_length})",
        ),
        "a few answers are far longer than the rest, and the engines are nearly empty while they end",
        (
            f"rollout.max_response_length={max(1, rollout.max_response_length // 2)}",
            f"batch.steps_per_generation={2 * (run.config.batch.steps_per_generation or 1)}",
        ),
        ("reward.functions: a term for length", "samples.jsonl: whether the long ones are of any use"),
    )


def silent(run: Evidence) -> Symptom | None:
    """A run that runs and logs nothing."""
    since = run.seconds_since_step
    seconds = [n for _, n in run.points("seconds", run.recent)]
    if since is None or len(seconds) < ENOUGH or since < max(SILENT_SECONDS, SILENT * max(seconds)):
        return None
    return Symptom(
        "silent",
        "warning",
        (f"no step for {since:.0f} s after step {run.steps}; the slowest recent one took {max(seconds):.0f} s",),
        "a rank hangs, an evaluation or a save takes long, or the node stands still",
        ("tracking.debug=true",),
        ("gspo-hpc logs RUN -f", f"faults.hang_timeout ({run.config.faults.hang_timeout:.0f} s) ends it by itself"),
    )


FINDERS: tuple[Finder, ...] = (
    silent,
    low_device_use,
    communication,
    memory_swings,
    slow_rewards,
    slow_checkpoints,
    generation_tail,
    unbalanced_engines,
    unbalanced_packing,
    stragglers,
)
