"""Symptoms of learning: whether there is anything to learn from, and whether the policy learns it or comes apart.

Floor 6. Every function is pure over the evidence, and answers None where the run does not show its symptom.
"""

from __future__ import annotations

from gspo_hpc import algorithms
from gspo_hpc.report_data import value
from gspo_hpc.symptoms import (
    ENOUGH,
    Evidence,
    Finder,
    Symptom,
    ends,
    mean,
    middle,
    number,
    percent,
    span,
)

# A group whose completions all have one reward teaches nothing. Half of them so is half of the generation for nothing;
# above four fifths the gradient is that of a handful of prompts.
ZERO_VARIANCE, ZERO_VARIANCE_HIGH = 0.5, 0.8
# Rewards of a batch that differ by less than a tenth of their mean: of right-or-wrong rewards, 99 % are right.
SATURATED_SPREAD = 0.1
# Completions whose grader failed. One in fifty is a grader with a bug; one in five changes what is learnt.
GRADER_FAILURES, GRADER_FAILURES_HIGH = 0.02, 0.2
# Completions cut off at max_response_length are graded without their answer.
TRUNCATED, TRUNCATED_HIGH = 0.1, 0.3
# Answers that get longer while a model learns to reason do so by a few parts in ten over a quarter of a run; twice as
# long, and half-way to the limit, is a policy that has found out that length pays, or has come apart.
LENGTH_GROWTH, LENGTH_OF_LIMIT = 2.0, 0.5
# The gap is rounding while the weights are equal, and stays where it is. Three times the first is beyond its noise.
GAP_GROWTH = 3.0
# Below these mean gaps (of log-probs, per token) ratios are not moved: float32 sums in another order, and bfloat16's
# two decimal digits.
GAP_SMALL, GAP_SMALL_16_BIT = 1e-4, 2e-2
# A gradient ten times as long as at first is no longer that of the policy the learning rate was chosen for.
GRADIENT_GROWTH = 10.0
CLIP_GRAD = 1.0  # what BATCH_RULES and nearly all published runs clip to
# The fullest expert of the worst layer has so many times the mean: its rank computes while the others wait.
EXPERTS_UNEVEN, EXPERTS_UNEVEN_HIGH = 2.0, 4.0


def zero_variance_groups(run: Evidence) -> Symptom | None:
    """Groups in which every completion has the same reward."""
    batch = run.config.batch
    if not batch.global_batch_size or not batch.num_generations:
        return None
    each = batch.global_batch_size // batch.num_generations
    points = run.points("zero_variance_groups", run.recent)
    if len(points) < ENOUGH:
        return None
    count = int(sum(n for _, n in points))
    share = count / (each * len(points))
    if share < ZERO_VARIANCE:
        return None
    empty = sum(1 for record in run.recent if record.get("empty"))
    nothing = f"; {empty} of {len(points)} steps had nothing to learn from" if empty else ""
    cold = run.config.rollout.temperature < 0.5
    return Symptom(
        "zero_variance_groups",
        "problem" if share >= ZERO_VARIANCE_HIGH else "warning",
        (f"{percent(share)} of the groups ({count} of {each * len(points)}, {span(points)}) have one reward{nothing}",),
        f"completions of a group are nearly the same: rollout.temperature is {number(run.config.rollout.temperature)}"
        if cold
        else "prompts that are too easy or too hard, or a grader that gives all answers the same mark",
        (*(["rollout.temperature=1.0"] if cold else []), f"batch.num_generations={2 * batch.num_generations}"),
        ("data.train: leave out prompts that the model always or never answers rightly", "samples.jsonl"),
    )


def reward_saturation(run: Evidence) -> Symptom | None:
    """Nearly every completion already has the best mark seen."""
    rewards, spreads = run.points("reward", run.recent), run.points("reward_std", run.recent)
    if len(rewards) < ENOUGH or len(spreads) < ENOUGH:
        return None
    level, spread = mean(rewards), mean(spreads)
    best = max(n for _, n in run.points("reward"))
    if level <= 0.0 or spread > SATURATED_SPREAD * level or level < 0.9 * best:
        return None
    return Symptom(
        "reward_saturation",
        "problem" if spread == 0.0 else "warning",
        (f"reward {number(level)} with a standard deviation of {number(spread)} over {span(rewards)}",),
        "the task is learnt, or the grader gives nearly every answer the full mark: advantages are noise or zero",
        (),
        ("data.train: harder prompts", "reward.functions: a grader that tells good from better", "samples.jsonl"),
    )


def reward_absent(run: Evidence) -> Symptom | None:
    """No completion has ever had a reward."""
    rewards = run.points("reward")
    if len(rewards) < ENOUGH or any(n != 0.0 for _, n in rewards + run.points("reward_std")):
        return None
    return Symptom(
        "reward_absent",
        "problem",
        (f"the reward of every completion was 0, {span(rewards)}",),
        "prompts that are too hard for the model, or a grader that does not find the answer in its completions",
        (),
        ("samples.jsonl: what the completions are", "reward.functions", "data.train: easier prompts to begin with"),
    )


def grader_failures(run: Evidence) -> Symptom | None:
    """Completions whose grader raised, was too slow or said nothing of use."""
    points = run.points("failures", run.recent)
    size = run.config.batch.global_batch_size
    failed = sum(n for _, n in points)
    if not points or not size or failed < GRADER_FAILURES * size * len(points):
        return None
    share = failed / (size * len(points))
    return Symptom(
        "grader_failures",
        "problem" if share >= GRADER_FAILURES_HIGH else "warning",
        (f"graders failed for {percent(share)} of the completions ({failed:.0f}, {span(points)})",),
        f"a grader raises, answers after more than reward.timeout ({number(run.config.reward.timeout)} s), or returns "
        "no number",
        (f"reward.timeout={number(3 * run.config.reward.timeout)}",),
        ("the console or the job's log says which grader failed, and why", "samples.jsonl: failure"),
    )


def inert_clipping(run: Evidence) -> Symptom | None:
    """The clip range is there and never acts."""
    objective = algorithms.resolve(run.config.algorithm)
    later = [r for r in run.recent if value(r, "update") not in (None, 0.0) and not r.get("empty")]
    if algorithms.updates_per_rollout(run.config.batch) == 1:
        if len(run.records) < ENOUGH:
            return None
        return Symptom(
            "inert_clipping",
            "note",
            ("one update per rollout: every ratio is 1, and the clip range does nothing",),
            "the policy that is updated is the one that sampled; right if it is meant, and generation is used once",
            ("batch.steps_per_generation=4",),
        )
    clipped, moved = run.points("clip_fraction", later), run.points("ratio_deviation_max", later)
    if len(clipped) < ENOUGH or not moved or any(n > 0.0 for _, n in clipped):
        return None
    largest = max(n for _, n in moved)
    return Symptom(
        "inert_clipping",
        "warning",
        (
            f"no ratio was clipped in the later updates of rollouts, {span(clipped)}: the largest |ratio - 1| was "
            f"{number(largest)}, the range is -{objective.clip_low:g} to +{objective.clip_high:g}",
        ),
        "updates are too small for the clip range to matter: the policy hardly moves within a rollout",
        (f"optimizer.lr={number(3 * run.config.optimizer.lr)}", f"algorithm.clip_high={largest / 2:.1g}"),
    )


def length_explosion(run: Evidence) -> Symptom | None:
    """Completions get much longer."""
    points = run.points("response_length")
    parts, limit = ends(points), run.config.rollout.max_response_length
    if parts is None:
        return None
    before, after = mean(parts[0]), mean(parts[1])
    if after < LENGTH_GROWTH * before or after < LENGTH_OF_LIMIT * limit:
        return None
    rewards = ends(run.points("reward"))
    paid = rewards is not None and mean(rewards[1]) > mean(rewards[0])
    return Symptom(
        "length_explosion",
        "warning" if paid else "problem",
        (
            f"{number(before)} tokens a completion in {span(parts[0])}, {number(after)} in {span(parts[1])} (limit "
            f"{limit})" + ("" if rewards is None else f"; reward {mean(rewards[0]):.3f} to {mean(rewards[1]):.3f}"),
        ),
        "longer answers earn more, whatever is in them" if paid else "the policy no longer ends its answers",
        (f"optimizer.lr={number(run.config.optimizer.lr / 10)}", "algorithm.kl_beta=0.001"),
        ("reward.functions: a term for length (its grader is given response_length)", "samples.jsonl"),
    )


def truncation(run: Evidence) -> Symptom | None:
    """Completions that were cut off."""
    points = run.points("truncated_fraction", run.recent)
    if len(points) < ENOUGH or mean(points) < TRUNCATED:
        return None
    limit = run.config.rollout.max_response_length
    lengths = run.points("response_length", run.recent)
    return Symptom(
        "truncation",
        "problem" if mean(points) >= TRUNCATED_HIGH else "warning",
        (
            f"{percent(mean(points))} of the completions were cut off at {limit} tokens, {span(points)}"
            + (f"; their mean length is {number(mean(lengths))}" if lengths else ""),
        ),
        "answers do not fit into rollout.max_response_length, or the model does not end them",
        (f"rollout.max_response_length={2 * limit}",),
        ("samples.jsonl: whether answers are long, or go on after they are done",),
    )


def growing_gap(run: Evidence) -> Symptom | None:
    """Engine and trainer drift apart: their log-probs for the sampled tokens differ more and more."""
    sixteen = "float32" not in (run.config.model.dtype, run.config.rollout.dtype or run.config.model.dtype)
    floor = GAP_SMALL_16_BIT if sixteen else GAP_SMALL
    told = None
    for key in ("gap_mean", "probe_gap_mean"):
        points = [p for p in run.points(key) if p[1] > 0.0]
        parts = ends(points)
        if parts is None:
            continue
        before, after = middle(parts[0]), middle(parts[1])
        if after > floor and after > GAP_GROWTH * before:
            told = told or (key, parts, before, after)
    if told is None:
        return None
    key, parts, before, after = told
    peak = max(run.points("gap_max") or [(0, 0.0)], key=lambda p: p[1])
    settings = ["rollout.dtype=float32", "model.dtype=float32"]
    if run.points("experts/imbalance"):
        settings.insert(0, "moe.router_replay=auto")
    return Symptom(
        "growing_gap",
        "problem" if after > 10 * floor else "warning",
        (
            f"{key} went from {before:.1e} ({span(parts[0])}) to {after:.1e} ({span(parts[1])}), median of log-prob "
            f"differences per token; the largest was {number(peak[1])} at step {peak[0]}",
        ),
        "engine and trainer round differently, and the policy now has places where that shows: very sharp "
        "distributions, large weights, or experts chosen otherwise",
        (*settings, f"optimizer.lr={number(run.config.optimizer.lr / 10)}"),
    )


def exploding_gradients(run: Evidence) -> Symptom | None:
    """Gradients that are not finite, or far longer than at first."""
    skipped = [int(r["step"]) for r in run.records if r.get("skipped")]
    half = run.config.model.dtype == "float16"
    norms = [p for p in run.points("grad_norm") if p[1] > 0.0]
    parts = ends(norms)
    evidence, severe = [], False
    if skipped and not (half and len(skipped) <= 0.05 * len(run.records)):  # loss scaling finds its scale by some
        evidence.append(f"the gradient was not finite in {len(skipped)} of {len(run.records)} steps ({_some(skipped)})")
        severe = skipped[-1] >= run.recent[0]["step"]
    if parts is not None:
        before, after = middle(parts[0]), middle(parts[1])
        limit = max(CLIP_GRAD, run.config.optimizer.clip_grad)
        if after > GRADIENT_GROWTH * before and after > limit:
            evidence.append(
                f"gradient norm {number(before)} in {span(parts[0])}, {number(after)} in {span(parts[1])} (median)"
            )
    if any("TooManySkippedSteps" in f"{a.detail}{a.error.text if a.error else ''}" for a in run.attempts):
        evidence.append("the run ended for it (faults.max_skipped_steps)")
        severe = True
    if not evidence:
        return None
    optimizer = run.config.optimizer
    settings = [f"optimizer.lr={number(optimizer.lr / 10)}"]
    if optimizer.clip_grad == 0.0 or optimizer.clip_grad > CLIP_GRAD:
        settings.insert(0, f"optimizer.clip_grad={CLIP_GRAD}")
    if half:
        settings[:0] = [
            "model.dtype=bfloat16",
            f"optimizer.initial_loss_scale={number(optimizer.initial_loss_scale / 64)}",
        ]
    return Symptom(
        "exploding_gradients",
        "problem" if severe else "warning",
        tuple(evidence),
        "too large steps, numbers beyond what the precision holds, or rewards of very different size",
        (*settings, "optimizer.grad_reduce_in_fp32=true", "model.dtype=float32"),
        ("reward, gap_max and entropy in metrics.jsonl in the steps before",),
    )


def unbalanced_experts(run: Evidence) -> Symptom | None:
    """Some experts get far more tokens than others."""
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
    return Symptom(
        "unbalanced_experts",
        "problem" if middle(worst) >= EXPERTS_UNEVEN_HIGH else "warning",
        (
            f"the fullest expert of the worst layer gets {middle(worst):.1f} times the mean (median, {span(worst)})",
            f"tokens per expert at step {step}: least / mean / most {tokens}; {idle:.0f} experts had none",
        ),
        "the router prefers some experts; ranks that hold them compute while the others wait. The losses even that "
        "out; the flex dispatcher does not, but brings tokens to experts on other ranks faster",
        (f"moe.aux_loss_coeff={number(3 * aux) if aux else '0.001'}", "moe.z_loss_coeff=0.001", *flex),
    )


def _some(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"steps {shown}, ..." if len(steps) > 5 else f"step{'s' * (len(steps) > 1)} {shown}"


FINDERS: tuple[Finder, ...] = (
    exploding_gradients,
    growing_gap,
    length_explosion,
    truncation,
    zero_variance_groups,
    reward_absent,
    reward_saturation,
    grader_failures,
    unbalanced_experts,
    inert_clipping,
)
