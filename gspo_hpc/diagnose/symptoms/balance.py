"""Symptoms of uneven work: engines, ranks, micro-batches or experts that have more to do than others.

Shares refer to the wall time of all recent steps together, so one slow step alone is no symptom.
"""

from __future__ import annotations

from collections import Counter

from gspo_hpc.config.derived import node_of
from gspo_hpc.diagnose.evidence import (
    ENOUGH,
    ENOUGH_FOR_TREND,
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

# With a tenth of its sequences an engine makes hardly more than a tenth of its tokens per second.
TAIL, TAIL_HIGH = 0.3, 0.5
# Engines share the prompts of a rollout one by one, so all finish at nearly the same time, whatever their speed.
ENGINE_BUSY, ENGINE_SPEED = 0.7, 0.7
# The heaviest rank has a tenth more tokens than the mean. Packing comes within a hundredth where it has any choice.
UNEVEN_PACKING, UNEVEN_PACKING_HIGH = 1.1, 1.3
# Half of the token budget of micro-batches is unused, although every rank has several.
FILL = 0.5
# A rank that computes a quarter longer than the mean in three of four steps is slower, not unlucky; it costs something
# if the others wait for it for a twentieth of the step.
STRAGGLER, STRAGGLER_STEPS, STRAGGLER_COST = 1.25, 0.75, 0.05
# If packing gave a rank four fifths as much more to do as it takes longer, the rank is not to blame.
EXPLAINED = 0.8
# The fullest expert of the worst layer has this many times the mean: its rank computes while the others wait.
EXPERTS_UNEVEN, EXPERTS_UNEVEN_HIGH = 2.0, 4.0


@symptom(
    "generation_tail",
    severity="warning",
    shows="for 30 % of the generation time at most a tenth of the completions was still running",
    change="`rollout.max_response_length`, `batch.steps_per_generation`",
)
def generation_tail(run: Evidence) -> Finding | None:
    """Find engines that wait for a few long answers."""
    records = [r for r in run.recent if value(r, "seconds/generate_tail") is not None]
    tails, busy = run.points("seconds/generate_tail", records), run.points("seconds/engine_most", records)
    if len(tails) < ENOUGH or middle(busy) <= 0.0:
        return None
    share = middle(tails) / middle(busy)
    generating = share_of_step(run, "seconds/generate")
    if share < TAIL or generating is None or generating[0] < SLOW:
        return None
    longest, lengths = run.points("response_length_max", run.recent), run.points("response_length", run.recent)
    limit = run.config.rollout.max_response_length
    return Finding(
        (
            f"for {percent(share)} of the generation ({middle(tails):.1f} s per rollout, {span(tails)}) at most a "
            "tenth of the completions were still running",
            f"completions have {rounded(mean(lengths))} tokens on average, the longest "
            f"{max(tokens for _, tokens in longest):.0f} (limit {limit})",
        ),
        "a few answers are far longer than the rest, and the engines are nearly empty until these end",
        (
            f"rollout.max_response_length={max(1, limit // 2)}",
            f"batch.steps_per_generation={2 * (run.config.batch.steps_per_generation or 1)}",
        ),
        ("reward.functions: add a term for length", "samples.jsonl: see whether the long answers are of any use"),
        "problem" if share >= TAIL_HIGH and generating[0] >= VERY_SLOW else "warning",
    )


@symptom(
    "unbalanced_engines",
    severity="warning",
    shows="an engine has less than 0.7 times the work or the speed of another",
    change="`batch.steps_per_generation`, `rollout.engines_per_node`",
)
def unbalanced_engines(run: Evidence) -> Finding | None:
    """Find engines that are idle while others generate, or that are slower."""
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
    return Finding(
        (
            f"the least busy engine worked {_seconds(middle(least))}, the busiest {_seconds(middle(most))} (median, "
            f"{span(most)})",
            f"the slowest made {middle(slowest):,.0f} tokens/s, the fastest {middle(fastest):,.0f}",
        ),
        "one engine is slower than the others (its device or node), or restarted"
        if speed < ENGINE_SPEED
        else "a rollout has too few prompts to share among the engines, or one very long answer",
        (more, *([f"rollout.engines_per_node={engines // 2}"] if engines > 1 else [])),
        ("logs of the ranks: compare the engines' speed and cache use",),
    )


@symptom(
    "unbalanced_packing",
    severity="warning",
    shows="the heaviest rank has a tenth more tokens than the mean; micro-batches are half empty (a note)",
    change="`batch.global_batch_size`, `batch.micro_batch_tokens`",
)
def unbalanced_packing(run: Evidence) -> Finding | None:
    """Find ranks with unequal numbers of tokens, or micro-batches that are half empty."""
    uneven, filled = run.points("packing/imbalance", run.recent), run.points("packing/fill", run.recent)
    counts = run.points("packing/micro_batches", run.recent)
    if len(uneven) < ENOUGH:
        return None
    batch = run.config.batch
    if middle(uneven) >= UNEVEN_PACKING:
        few = counts and middle(counts) <= 2
        return Finding(
            (
                f"the heaviest rank has {middle(uneven):.2f} times the mean tokens (median, {span(uneven)})"
                + (f", in {middle(counts):.0f} micro-batches per rank" if counts else ""),
            ),
            "too few completions have an advantage to distribute them evenly"
            if few
            else "micro-batches hold a fixed number of completions, which differ in length",
            (
                *(["batch.micro_batch_tokens=8192"] if batch.micro_batch_size else []),
                *([f"batch.global_batch_size={2 * batch.global_batch_size}"] if batch.global_batch_size else []),
            ),
            ("batch.micro_batch_tokens instead of batch.micro_batch_size (set that to null)",)
            if batch.micro_batch_size
            else (),
            "problem" if middle(uneven) >= UNEVEN_PACKING_HIGH else "warning",
        )
    if len(filled) >= ENOUGH and middle(filled) < FILL and counts and middle(counts) > 2 and batch.micro_batch_tokens:
        return Finding(
            (f"micro-batches are {percent(middle(filled))} full (median, {span(filled)})",),
            "samples longer than half of the budget leave the rest of it empty",
            (f"batch.micro_batch_tokens={2 * batch.micro_batch_tokens}",),
            severity="note",
        )
    return None


@symptom(
    "stragglers",
    severity="warning",
    shows="one rank computes longest in three of four steps, by a quarter, and the others wait for it",
    change="the rank's node; `slurm.exclude`; profile a step",
)
def stragglers(run: Evidence) -> Finding | None:
    """Find a rank that the others wait for although it has no more work."""
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
    pipeline = run.config.parallel.pipeline_model_parallel_size > 1
    node, _ = node_of(run.config, rank)
    return Finding(
        (
            f"rank {rank} (node {node} of the job) computed longest in {times} of {len(records)} steps, "
            f"{middle(ratios):.2f} times the mean of the ranks (median)",
            f"the other ranks waited {waited[1]:.1f} s, {percent(waited[0])} of {span(waited[2])}",
        ),
        "a pipeline stage has more to do, or its device or node is slow"
        if pipeline
        else "the rank's device or node is slow: throttled, shared with another job, or short of cores",
        (f"tracking.profile_steps=[{run.steps + 2}]",),
        (
            f"check clocks, temperature and other processes on the node of rank {rank}",
            "slurm.exclude: leave the node out",
        ),
        "problem" if waited[0] >= VERY_SLOW else "warning",
    )


@symptom(
    "unbalanced_experts",
    severity="warning",
    shows="the fullest expert of a layer has twice the mean; the least, mean and most tokens of an expert",
    change="`moe.aux_loss_coeff`, `moe.z_loss_coeff`; on GPUs with expert parallelism then "
    "`moe.token_dispatcher=flex`, which speeds up dispatching but does not balance tokens",
)
def unbalanced_experts(run: Evidence) -> Finding | None:
    """Find experts that get far more tokens than others."""
    worst = run.points("experts/imbalance_max", run.recent)
    if len(worst) < ENOUGH or middle(worst) < EXPERTS_UNEVEN:
        return None
    step, _ = worst[-1]
    last = next(record for record in run.recent if record["step"] == step)
    counts = [value(last, f"experts/tokens_{name}") for name in ("min", "mean", "max")]
    tokens = " / ".join("?" if count is None else f"{count:,.0f}" for count in counts)
    idle = value(last, "experts/idle") or 0.0
    aux = run.config.moe.aux_loss_coeff
    spread = run.config.cluster.platform == "cuda" and run.config.parallel.expert_model_parallel_size > 1
    flex = ["moe.token_dispatcher=flex"] if spread and run.config.moe.token_dispatcher != "flex" else []
    return Finding(
        (
            f"the fullest expert of the worst layer gets {middle(worst):.1f} times the mean (median, {span(worst)})",
            f"tokens per expert at step {step}: least / mean / most {tokens}; {idle:.0f} experts had none",
        ),
        "the router prefers some experts, and ranks that hold them compute while the others wait. The losses balance "
        "the router; the flex dispatcher does not, but it moves tokens to other ranks faster",
        (f"moe.aux_loss_coeff={rounded(3 * aux) if aux else '0.001'}", "moe.z_loss_coeff=0.001", *flex),
        severity="problem" if middle(worst) >= EXPERTS_UNEVEN_HIGH else "warning",
    )


def _seconds(value: float) -> str:
    """Return a time with one decimal, or more where it is below a second: so that two of them differ."""
    return f"{value:.1f} s" if value >= 1.0 else f"{rounded(value)} s"
