"""Symptoms of learning: whether there is anything to learn from, and whether training stays stable."""

from __future__ import annotations

from gspo_hpc.config.derived import engine_dtype
from gspo_hpc.diagnose.evidence import ENOUGH, Evidence, ends, mean, middle, percent, span, steps_of
from gspo_hpc.diagnose.excerpts import one_line
from gspo_hpc.diagnose.registry import Finding, symptom
from gspo_hpc.system.text import rounded

# Rewards of a batch that differ by less than a tenth of their mean: of right-or-wrong rewards, 99 % are right.
SATURATED_SPREAD = 0.1
# Completions whose reward function failed. One in fifty is a bug in the function; one in five changes what is learned.
REWARD_FAILURES, REWARD_FAILURES_HIGH = 0.02, 0.2
_FAILURES_SHOWN = 3  # different ones
# Completions cut off at max_response_length are graded without their answer.
TRUNCATED, TRUNCATED_HIGH = 0.1, 0.3
# While a model learns to reason, its answers grow by a few tenths over a quarter of a run. A policy whose answers are
# twice as long and past half of the limit has found out that length pays, or has collapsed.
LENGTH_GROWTH, LENGTH_OF_LIMIT = 2.0, 0.5
# The gap is rounding while the weights are equal, and stays constant. Three times the first value is beyond its noise.
GAP_GROWTH = 3.0
# Below these mean gaps (of log-probs, per token) ratios do not move: float32 sums in another order, and the two decimal
# digits of bfloat16.
GAP_SMALL, GAP_SMALL_16_BIT = 1e-4, 2e-2
# A gradient ten times as long as at first is no longer that of the policy for which the learning rate was chosen.
GRADIENT_GROWTH = 10.0
CLIP_GRAD = 1.0  # nearly all published runs clip to it


@symptom(
    "exploding_gradients",
    severity="warning",
    shows="gradients that are not finite, or a gradient norm ten times that of the first steps",
    change="`optimizer.clip_grad=1.0`, `model.dtype`, `optimizer.initial_loss_scale` (float16), `optimizer.lr`",
)
def exploding_gradients(run: Evidence) -> Finding | None:
    """Find gradients that are not finite, or much larger than at first."""
    skipped = [int(r["step"]) for r in run.records if r.get("skipped")]
    half = run.config.model.dtype == "float16"
    norms = [p for p in run.points("grad_norm") if p[1] > 0.0]
    parts = ends(norms)
    evidence, severe = [], False
    if skipped and not (half and len(skipped) <= 0.05 * len(run.records)):  # loss scaling skips some to find its scale
        evidence.append(
            f"the gradient was not finite in {len(skipped)} of {len(run.records)} steps ({steps_of(skipped)})"
        )
        severe = skipped[-1] >= run.recent[0]["step"]
    if parts is not None:
        before, after = middle(parts[0]), middle(parts[1])
        limit = max(CLIP_GRAD, run.config.optimizer.clip_grad)
        if after > GRADIENT_GROWTH * before and after > limit:
            evidence.append(
                f"the median gradient norm grew from {rounded(before)} in {span(parts[0])} to {rounded(after)} in "
                f"{span(parts[1])}"
            )
    if any("TooManySkippedSteps" in f"{a.detail}{a.error.text if a.error else ''}" for a in run.attempts):
        evidence.append("an attempt ended because of it (faults.max_skipped_steps)")
        severe = True
    if not evidence:
        return None
    optimizer = run.config.optimizer
    settings = [f"optimizer.lr={rounded(optimizer.lr / 10)}"]
    if optimizer.clip_grad == 0.0 or optimizer.clip_grad > CLIP_GRAD:
        settings.insert(0, f"optimizer.clip_grad={CLIP_GRAD}")
    if half:
        settings[:0] = [
            "model.dtype=bfloat16",
            f"optimizer.initial_loss_scale={rounded(optimizer.initial_loss_scale / 64)}",
        ]
    return Finding(
        tuple(evidence),
        "the learning rate is too high, numbers exceed the range of the precision, or rewards differ widely in scale",
        (*settings, "optimizer.grad_reduce_in_fp32=true", "model.dtype=float32"),
        ("metrics.jsonl: compare reward, logprob_gap_max and entropy in the steps before",),
        "problem" if severe else "warning",
    )


@symptom(
    "train_inference_mismatch",
    severity="warning",
    shows="log-probs of engine and trainer (`logprob_gap_mean`, `probe_logprob_gap_mean`) differ three times as much "
    "as at first",
    change="`rollout.dtype`, `model.dtype`, `moe.router_replay`, `optimizer.lr`",
)
def train_inference_mismatch(run: Evidence) -> Finding | None:
    """Find a growing difference between the log-probs of engine and trainer for the sampled tokens."""
    sixteen = "float32" not in (run.config.model.dtype, engine_dtype(run.config))
    floor = GAP_SMALL_16_BIT if sixteen else GAP_SMALL
    grown = None
    for key in ("logprob_gap_mean", "probe_logprob_gap_mean"):
        parts = ends([p for p in run.points(key) if p[1] > 0.0])
        if parts is None:
            continue
        before, after = middle(parts[0]), middle(parts[1])
        if after > floor and after > GAP_GROWTH * before:
            grown = grown or (key, parts, before, after)
    if grown is None:
        return None
    key, parts, before, after = grown
    peak = max(run.points("logprob_gap_max"), key=lambda p: p[1], default=None)
    largest = "" if peak is None else f"; the largest difference was {rounded(peak[1])} at step {peak[0]}"
    settings = ["rollout.dtype=float32", "model.dtype=float32"]
    if run.points("experts/imbalance"):
        settings.insert(0, "moe.router_replay=auto")
    return Finding(
        (
            f"{key} went from {before:.1e} in {span(parts[0])} to {after:.1e} in {span(parts[1])} (median difference "
            f"of log-probs per token){largest}",
        ),
        "engine and trainer round differently, and the policy has become sensitive to it: its distributions are very "
        "sharp, its weights are large, or its router chooses other experts",
        (*settings, f"optimizer.lr={rounded(run.config.optimizer.lr / 10)}"),
        severity="problem" if after > 10 * floor else "warning",
    )


@symptom(
    "length_explosion",
    severity="problem",
    shows="completions are twice as long as at first and longer than half of the limit, and whether reward grew with "
    "them",
    change="`optimizer.lr`, `algorithm.kl_beta`, a reward term for length",
)
def length_explosion(run: Evidence) -> Finding | None:
    """Find completions that become much longer."""
    parts, limit = ends(run.points("response_length")), run.config.rollout.max_response_length
    if parts is None:
        return None
    before, after = mean(parts[0]), mean(parts[1])
    if after < LENGTH_GROWTH * before or after < LENGTH_OF_LIMIT * limit:
        return None
    rewards = ends(run.points("reward"))
    paid = rewards is not None and mean(rewards[1]) > mean(rewards[0])
    went = "" if rewards is None else f"; reward went from {mean(rewards[0]):.3f} to {mean(rewards[1]):.3f}"
    return Finding(
        (
            f"a completion had {rounded(before)} tokens on average in {span(parts[0])} and {rounded(after)} in "
            f"{span(parts[1])} (limit {limit}){went}",
        ),
        "longer answers earn more reward, whatever they say" if paid else "the policy no longer ends its answers",
        (f"optimizer.lr={rounded(run.config.optimizer.lr / 10)}", "algorithm.kl_beta=0.001"),
        (
            "reward.functions: add a term for length (a reward function is given response_length)",
            "samples.jsonl: read the long completions",
        ),
        "warning" if paid else "problem",
    )


@symptom(
    "truncation",
    severity="warning",
    shows="a tenth of the completions or more is cut off",
    change="`rollout.max_response_length`, `rollout.truncated`",
)
def truncation(run: Evidence) -> Finding | None:
    """Find completions that were cut off at the length limit."""
    points = run.points("truncated_fraction", run.recent)
    if len(points) < ENOUGH or mean(points) < TRUNCATED:
        return None
    limit = run.config.rollout.max_response_length
    lengths = run.points("response_length", run.recent)
    return Finding(
        (
            f"{percent(mean(points))} of the completions were cut off at {limit} tokens in {span(points)}"
            + (f"; their mean length is {rounded(mean(lengths))}" if lengths else ""),
        ),
        "answers do not fit into rollout.max_response_length, or the model does not end them",
        (f"rollout.max_response_length={2 * limit}", "rollout.truncated=mask"),
        ("samples.jsonl: see whether answers are long, or continue after they are complete",),
        "problem" if mean(points) >= TRUNCATED_HIGH else "warning",
    )


@symptom(
    "reward_always_zero",
    severity="problem",
    shows="the reward of every completion was 0",
    change="the prompts, the reward functions",
)
def reward_always_zero(run: Evidence) -> Finding | None:
    """Find a run in which no completion ever earned a reward."""
    rewards = run.points("reward")
    if len(rewards) < ENOUGH or any(n != 0.0 for _, n in rewards + run.points("reward_std")):
        return None
    return Finding(
        (f"the reward of every completion was 0, {span(rewards)}",),
        "the prompts are too hard for the model, or the reward function does not find the answer in the completions",
        (),
        (
            "samples.jsonl: read the completions, and see whether the reward function finds their answers",
            "data.train: start with easier prompts",
        ),
    )


@symptom(
    "reward_saturation",
    severity="warning",
    shows="rewards hardly differ, and are near the best seen",
    change="the prompts, the reward functions",
)
def reward_saturation(run: Evidence) -> Finding | None:
    """Find rewards that are nearly all at the best value seen."""
    rewards, spreads = run.points("reward", run.recent), run.points("reward_std", run.recent)
    if len(rewards) < ENOUGH or len(spreads) < ENOUGH:
        return None
    level, spread = mean(rewards), mean(spreads)
    best = max(n for _, n in run.points("reward"))
    if level <= 0.0 or spread > SATURATED_SPREAD * level or level < 0.9 * best:
        return None
    return Finding(
        (f"the mean reward is {rounded(level)} with a standard deviation of {rounded(spread)} in {span(rewards)}",),
        "the task is learned, or the reward function gives nearly all answers full marks, so advantages are noise or 0",
        (),
        (
            "data.train: use harder prompts",
            "reward.functions: tell good answers from better ones",
            "samples.jsonl: read whether the best rewards are deserved",
        ),
        "problem" if spread == 0.0 else "warning",
    )


@symptom(
    "reward_function_failures",
    severity="warning",
    shows="the completions whose reward function failed, and why",
    change="the reward function; `reward.timeout` if it was too slow",
)
def reward_function_failures(run: Evidence) -> Finding | None:
    """Find completions whose reward function raised, timed out, or returned no number."""
    points = run.points("failures", run.recent)
    size = run.config.batch.global_batch_size
    failed = sum(n for _, n in points)
    if not points or not size or failed < REWARD_FAILURES * size * len(points):
        return None
    share, timeout = failed / (size * len(points)), run.config.reward.timeout
    known = sorted(run.reward_failures.items(), key=lambda pair: -pair[1])
    late = not known or any("(reward.timeout)" in text for text, _ in known)
    return Finding(
        (
            f"reward functions failed for {percent(share)} of the completions ({failed:.0f} in {span(points)})",
            *(f"{count} x {one_line(text)}" for text, count in known[:_FAILURES_SHOWN]),
        ),
        f"a reward function raises, takes too long (reward.timeout is {rounded(timeout)} s), or returns no number",
        (f"reward.timeout={rounded(3 * timeout)}",) if late else (),
        (
            "the console or the job's log names the function that failed, and why",
            "samples.jsonl: the field failure of a completion has the error",
        ),
        "problem" if share >= REWARD_FAILURES_HIGH else "warning",
    )
