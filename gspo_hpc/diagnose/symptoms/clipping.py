"""Symptoms of the clip range: whether ratios ever leave it, and whether nearly all do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gspo_hpc.config.constants import OVERCLIPPED
from gspo_hpc.config.derived import (
    every_ratio_is_one,
    old_logprobs_are_the_engines,
    older_weights_sample,
    ratios_are_bounded,
    rewards_count,
    updates_per_rollout,
)
from gspo_hpc.diagnose.evidence import ENOUGH, Evidence, Point, mean, percent, span, steps_of
from gspo_hpc.diagnose.registry import Finding, symptom
from gspo_hpc.diagnose.updates import later_updates, newer
from gspo_hpc.system.text import rounded

# Published GSPO runs clip about 0.15 of their ratios. Above nine tenths an update hardly has a gradient.
OVERCLIPPED_HIGH = 0.9
# What a range that is offered is to clip of the run's ratios, as published runs do; and what fewer updates are to clip.
_USUAL_CLIPPED, _FEW_CLIPPED = 0.15, 0.35
_MOST_CLIPPED = 0.99  # of which the distances of ratios can still be told
_WIDEST = 0.9  # below 1, where nothing would be clipped


@symptom(
    "clipping_never_active",
    severity="warning",
    shows="there is one update per rollout (a note), or no ratio ever leaves the clip range",
    change="`batch.steps_per_generation`, `optimizer.lr`, `algorithm.clip_high`",
)
def clipping_never_active(run: Evidence) -> Finding | None:
    """Find a clip range that never has an effect."""
    clip = run.config.algorithm
    if not rewards_count(run.config):  # a teacher is the only signal, and has no clip range
        return None
    if every_ratio_is_one(run.config):
        if len(run.records) < ENOUGH:
            return None
        return Finding(
            ("there is 1 update per rollout, so every ratio is 1 and the clip range has no effect",),
            "the policy that is updated is the one that sampled; that is fine if intended, but uses each rollout once",
            ("batch.steps_per_generation=4",),
            severity="note",
        )
    if not ratios_are_bounded(run.config):
        return None
    later = later_updates(run)
    clipped, moved = run.points("clip_fraction", later), run.points("ratio_deviation_max", later)
    if len(clipped) < ENOUGH or not moved or any(n > 0.0 for _, n in clipped):
        return None
    largest = max(n for _, n in moved)
    return Finding(
        (
            f"no ratio was clipped{_which(run)}, {span(clipped)}: the largest |ratio - 1| was "
            f"{rounded(largest)}, the range is -{clip.clip_low:g} to +{clip.clip_high:g}",
        ),
        "updates are too small for the clip range to matter: the policy hardly moves within a rollout",
        (f"optimizer.lr={rounded(3 * run.config.optimizer.lr)}", f"algorithm.clip_high={largest / 2:.1g}"),
    )


@symptom(
    "overclipping",
    severity="warning",
    shows="half of the ratios or more are clipped in later updates of rollouts, or in all where older weights sample",
    change="`optimizer.lr`, `algorithm.clip_low`, `clip_high`, `batch.steps_per_generation`, `rollout.max_staleness`",
)
def overclipping(run: Evidence) -> Finding | None:
    """Find updates that are mostly thrown away because the policy left the clip range in the updates before."""
    later = later_updates(run)
    clipped = run.points("clip_fraction", later)
    if len(clipped) < ENOUGH or (share := mean(clipped)) < OVERCLIPPED:
        return None
    clip, config = run.config.algorithm, run.config
    lost = [step for step, norm in run.points("grad_norm", later) if norm == 0.0]
    moved = run.points("ratio_deviation_max", later)
    largest = f", and the largest |ratio - 1| of an update {rounded(mean(moved))} on average" if moved else ""
    evidence = [
        f"{percent(share)} of the ratios were clipped{_which(run)}, {span(clipped)}; the range is "
        f"-{clip.clip_low:g} to +{clip.clip_high:g}{largest}"
    ]
    if lost:
        evidence.append(f"in {len(lost)} of these {len(clipped)} updates the gradient was exactly 0 ({steps_of(lost)})")
    wider = _wider(run, later, share)
    low, high = min(_WIDEST, wider * clip.clip_low), wider * clip.clip_high  # on both sides, or one clips all the same
    settings = [f"algorithm.clip_low={low:.2g} algorithm.clip_high={high:.2g}"]
    settings += _fewer_updates(run, later)
    if updates_per_rollout(config.batch) > 1 or older_weights_sample(config):  # else no update made the distance
        settings.append(f"optimizer.lr={config.optimizer.lr / wider:.2g}")
    settings += newer(run)
    if old_logprobs_are_the_engines(config):
        cause = "the policy that is updated is far from what sampled: from older weights, or from the engine's numbers"
    else:
        cause = "the first update of a rollout already moves the policy out of the clip range"
    return Finding(
        tuple(evidence),
        f"{cause}, so updates change little and most of what was generated is thrown away",
        tuple(settings),
        severity="problem" if share >= OVERCLIPPED_HIGH else "warning",
    )


def _wider(run: Evidence, later: list[Mapping[str, Any]], share: float) -> float:
    """Return how many times as wide a clip range clips a usual share of the ratios that a run has had.

    Distances from 1 are taken to be distributed exponentially: their mean follows from the share beyond the range, and
    from the largest one among as many as an update has. The wider estimate counts, for most ratios far beyond the range
    say only that it is far too narrow. Distances above 1 have a heavier tail, and their largest says nothing.
    """
    clip, batch = run.config.algorithm, run.config.batch
    usual = -math.log(_USUAL_CLIPPED)
    found = usual / -math.log(min(share, _MOST_CLIPPED))
    largest = run.points("ratio_deviation_max", later)
    if largest and clip.clip_low + clip.clip_high > 0.0 and mean(largest) < 1.0:
        ratios = batch.global_batch_size or 1
        if getattr(clip, "ratio", "sequence") != "sequence" and (lengths := run.points("response_length", later)):
            ratios *= max(1, round(mean(lengths)))
        expected = mean(largest) * usual / math.log(max(2, ratios))
        found = max(found, expected / ((clip.clip_low + clip.clip_high) / 2))
    return found


def _fewer_updates(run: Evidence, later: list[Mapping[str, Any]]) -> list[str]:
    """Return the most updates of a rollout of which less than half of the ratios are clipped by far, as settings.

    That follows from what each update of the run's rollouts clipped: with fewer of them, the last ones are left out.
    """
    batch, clipped = run.config.batch, dict[int, list[Point]]()
    for record in later:
        clipped.setdefault(int(record["update"]), []).extend(run.points("clip_fraction", [record]))
    most, points = 1, list[Point]()
    for update in sorted(clipped):
        points += clipped[update]
        if points and mean(points) >= _FEW_CLIPPED:
            if update == 0:
                return []
            break
        most = update + 1
    if most >= updates_per_rollout(batch):
        return []
    steps, rounds = max(1, most // batch.num_iterations), min(most, batch.num_iterations)
    settings = [f"batch.num_iterations={rounds}"] if rounds < batch.num_iterations else []
    if batch.steps_per_generation and batch.steps_per_generation > steps:
        settings.append(f"batch.steps_per_generation={steps}")
    elif batch.generation_batch_size and batch.global_batch_size and updates_per_rollout(batch) > steps:
        settings.append(f"batch.generation_batch_size={steps * batch.global_batch_size}")
    return [" ".join(settings)] if settings else []


def _which(run: Evidence) -> str:
    return "" if old_logprobs_are_the_engines(run.config) else " in the later updates of rollouts"
