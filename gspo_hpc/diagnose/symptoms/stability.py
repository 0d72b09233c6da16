"""Symptoms of a policy that runs away, and of estimates that rest on few of the samples."""

from __future__ import annotations

from gspo_hpc.config.constants import COLLAPSED, FEW_EFFECTIVE, LARGE_UPDATE, OVERCLIPPED, RUNAWAY_KL
from gspo_hpc.config.derived import engine_dtype, updates_per_rollout
from gspo_hpc.diagnose.evidence import ENOUGH, Evidence, ends, mean, middle, percent, span
from gspo_hpc.diagnose.registry import Finding, symptom
from gspo_hpc.diagnose.updates import later_updates, newer
from gspo_hpc.system.text import rounded

# A tenth of the samples, or corrected terms of nine in ten: hardly anything of a rollout is left.
FEW_EFFECTIVE_LOW, OVERCORRECTED_HIGH = 0.1, 0.9
# A weight of the bonus in the middle of those that recipes have, which is small beside advantages of 1.
_BONUS = 0.001
_KL_BETA = 0.001  # the least weight of the KL term that recipes have


@symptom(
    "entropy_collapse",
    severity="warning",
    shows="the entropy of the policy is a twentieth of what it was at first, or less; a note where the reward is the "
    "best so far",
    change="`algorithm.entropy_coef`, `algorithm.clip_high`, `rollout.temperature`, `optimizer.lr`",
)
def entropy_collapse(run: Evidence) -> Finding | None:
    """Find a policy that hardly explores any more."""
    parts = ends(run.points("entropy"))
    if parts is None:
        return None
    # It is measured on groups that differ, and where hardly any does, those few can have much: steps without any count
    # as low, too, if it was low in any.
    before = middle(parts[0])
    low = [point for point in run.points("entropy", run.recent) if point[1] < COLLAPSED * before]
    lost = len(low) + sum(bool(record.get("empty")) for record in run.recent)
    if not low or 2 * lost < len(run.recent):
        return None
    config, rewards = run.config, ends(run.points("reward"))
    best = max((n for _, n in run.points("reward")), default=0.0)
    learned = rewards is not None and mean(rewards[1]) > max(mean(rewards[0]), 0.9 * best)
    went = "" if rewards is None else f"; reward went from {mean(rewards[0]):.3f} to {mean(rewards[1]):.3f}"
    settings = [] if config.algorithm.entropy_coef else [f"algorithm.entropy_coef={_BONUS}"]
    if config.rollout.temperature < 1.0:
        settings.append("rollout.temperature=1.0")
    if config.algorithm.clip_high <= config.algorithm.clip_low and updates_per_rollout(config.batch) > 1:
        settings.append(f"algorithm.clip_high={rounded(1.4 * config.algorithm.clip_low)}")  # DAPO: 0.28 beside 0.2
    return Finding(
        (
            f"the entropy was {rounded(before)} nats a token in {span(parts[0])} and {rounded(low[-1][1])} in step "
            f"{low[-1][0]}; in {lost} of {len(run.recent)} steps it was below a twentieth of that, or no group differed"
            f"{went}",
        ),
        "the task is learned, or the policy has stopped trying other answers"
        if learned
        else "the policy gives nearly the same answer each time, so the completions of a group hardly differ and none "
        "is better",
        (*settings, f"optimizer.lr={rounded(config.optimizer.lr / 3)}"),
        ("samples.jsonl: compare the completions of a prompt", "an earlier checkpoint, before the entropy fell"),
        "note" if learned else "warning",
    )


@symptom(
    "runaway_kl",
    "large_updates",
    severity="warning",
    shows="the policy is more than 1 nat a token from the reference model, and farther than at first; or the later "
    "updates of rollouts are made more than 0.05 nats a token away from the policy that sampled",
    change="`algorithm.kl_beta`, `optimizer.lr`, `batch.steps_per_generation`",
)
def runaway_kl(run: Evidence) -> Finding | None:
    """Find a policy that runs away from the reference model, or from the one that sampled."""
    settings = run.config.algorithm
    slower = f"optimizer.lr={rounded(run.config.optimizer.lr / 3)}"
    points = [] if settings.has_teacher else run.points("reference_kl")
    parts = ends(points)
    # A run may be far away within its first steps, so the very first one counts; k3 has a tail, so the middle does.
    if parts is not None and (far := middle(parts[1])) > max(RUNAWAY_KL, points[0][1]):
        rewards = ends(run.points("reward"))
        gained = rewards is not None and mean(rewards[1]) > mean(rewards[0])
        went = "" if rewards is None else f"; reward went from {mean(rewards[0]):.3f} to {mean(rewards[1]):.3f}"
        return Finding(
            (
                f"the divergence from the reference model was {rounded(points[0][1])} nats a token in step "
                f"{points[0][0]} and is {rounded(far)} in {span(parts[1])}{went}",
            ),
            f"the KL term has the weight {settings.kl_beta:g}, which holds too little, or updates are too large",
            (f"algorithm.kl_beta={rounded(max(_KL_BETA, 3 * settings.kl_beta))}", slower),
            ("samples.jsonl: see what earns the reward, and whether it is still language",),
            "warning" if gained else "problem",
        )
    moved = run.points("approx_kl", later_updates(run))
    if len(moved) < ENOUGH or mean(moved) <= LARGE_UPDATE:
        return None
    steps = run.config.batch.steps_per_generation or 1
    fewer = [f"batch.steps_per_generation={steps // 2}"] if steps > 1 else []
    return Finding(
        (
            f"later updates of a rollout are made {rounded(mean(moved))} nats a token away from the policy that "
            f"sampled it, {span(moved)}",
        ),
        "the policy moves so far within a rollout that its samples say little about it",
        (slower, *fewer, *newer(run)),
        name="large_updates",
    )


@symptom(
    "weight_variance",
    severity="warning",
    shows="the ratios of trainer and engine vary so much that the tokens count as half of them or fewer "
    "(`logprob_gap_effective`)",
    change="`rollout.dtype`, `model.dtype`, `algorithm.correction`, `rollout.max_staleness`",
)
def weight_variance(run: Evidence) -> Finding | None:
    """Find weights of trainer over engine whose variance leaves few samples to estimate from."""
    effective = run.points("logprob_gap_effective", run.computed)
    if len(effective) < ENOUGH or (share := mean(effective)) >= FEW_EFFECTIVE:
        return None
    config, outside = run.config, run.points("logprob_gap_outside", run.computed)
    beyond = f", and {percent(mean(outside))} of the tokens have a ratio below 0.5 or above 2" if outside else ""
    settings = [*newer(run), *_equal_dtypes(run)]
    if config.model.dtype != "float32":
        settings.append("rollout.dtype=float32 model.dtype=float32")
    if config.algorithm.correction == "none":
        settings += ["algorithm.correction=truncated", "algorithm.correction=masked"]
    return Finding(
        (
            f"by the ratios of trainer and engine the tokens of an update count as {percent(share)} of them, "
            f"{span(effective)}{beyond}",
        ),
        "the engine samples from another distribution than the trainer's, so a weighted mean rests on few tokens and "
        "an unweighted one is of the wrong policy",
        tuple(settings),
        (
            "logprob_gap_mean and probe_logprob_gap_mean: whether the gap is there after a sync",
            "docs/agreement.md: what makes a gap",
        ),
        "problem" if share < FEW_EFFECTIVE_LOW else "warning",
    )


@symptom(
    "overcorrection",
    severity="warning",
    shows="half of the terms or more are bounded or dropped by `algorithm.correction` or `algorithm.sequence_mask`",
    change="`algorithm.correction_low`, `algorithm.correction_high`, `rollout.dtype`, `rollout.max_staleness`",
)
def overcorrection(run: Evidence) -> Finding | None:
    """Find a correction of the gap that throws most of a rollout away."""
    corrected, config = run.points("correction_fraction", run.computed), run.config
    if len(corrected) < ENOUGH or (share := mean(corrected)) < OVERCLIPPED:
        return None
    settings, kind = config.algorithm, config.algorithm.correction
    low, high = settings.correction_low, settings.correction_high
    wider = {
        "truncated": f"algorithm.correction_high={rounded(3 * high)}",
        "masked": f"algorithm.correction_low={rounded(low / 3)} algorithm.correction_high={rounded(3 * high)}",
        "rejection": f"algorithm.correction_low={rounded(low**3)} algorithm.correction_high={rounded(high**3)}",
    }
    bounds = f"above {high:g}" if kind == "truncated" else f"outside {low:g} to {high:g}"
    what = f"algorithm.correction ({kind}) bounds or drops ratios {bounds}" if kind in wider else ""
    mask = (
        f"algorithm.sequence_mask drops sequences beyond {settings.sequence_mask:g}" if settings.sequence_mask else ""
    )
    return Finding(
        (
            f"{percent(share)} of the terms were bounded or dropped, {span(corrected)}; "
            f"{' and '.join(filter(None, (what, mask)))}",
        ),
        "the gap between engine and trainer, or between the weights that sampled and those that are trained, is wider "
        "than the bounds, so most of what was generated is thrown away",
        (*newer(run), *filter(None, (wider.get(kind),)), *_equal_dtypes(run)),
        ("logprob_gap_mean and logprob_gap_max: how large the gap is", "docs/agreement.md: what makes a gap"),
        "problem" if share >= OVERCORRECTED_HIGH else "warning",
    )


def _equal_dtypes(run: Evidence) -> list[str]:
    """Return the settings with which the engine computes in the trainer's precision, if it does not."""
    dtype = run.config.model.dtype
    return [f"rollout.dtype={dtype}"] if engine_dtype(run.config) != dtype else []
