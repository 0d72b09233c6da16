"""Remarks below the rows of the console: what went wrong in a step, and what makes further steps a waste.

Most of it is said once, when it happens for the first time. The thresholds are those of `gspo-hpc diagnose`, which
names the settings that help.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from gspo_hpc.config.constants import (
    COLLAPSED,
    FEW_EFFECTIVE,
    INERT_UPDATES,
    LARGE_UPDATE,
    LOST_TEACHER,
    NEAR_TEACHER,
    OVERCLIPPED,
    RUNAWAY_KL,
    ZERO_VARIANCE,
)
from gspo_hpc.config.derived import old_logprobs_are_the_engines, ratios_are_bounded, rewards_count
from gspo_hpc.config.schema import Config
from gspo_hpc.system.text import rounded
from gspo_hpc.training.telemetry.numbers import number, short

Record = Mapping[str, Any]
_WINDOW = 4  # updates that are judged together: the groups of one are few


class Remarks:
    """The remarks of one run, step by step. Without its config those that depend on it are left out."""

    def __init__(self, config: Config | None = None) -> None:
        self._config = config
        self._told: set[str] = set()  # what is explained once; after that the mark in its column is enough
        self._restarts = 0.0
        self._first_entropy: float | None = None
        self._first_divergence: float | None = None  # from the reference or the teacher
        self._unclipped, self._farthest = 0, 0.0  # later updates so far, and their largest |ratio - 1|
        self._entropies: deque[float | None] = deque(maxlen=_WINDOW)  # None: of no group; inf: not low
        self._equal_groups: deque[float] = deque(maxlen=_WINDOW)
        self._effective: deque[float] = deque(maxlen=_WINDOW)
        self._corrected: deque[float] = deque(maxlen=_WINDOW)

    def of(self, record: Record) -> str:
        """Return what is to be said of a step; empty for nothing."""
        return "; ".join(
            remark
            for find in (
                *(self._failures, self._signal, self._clipping, self._collapse),
                *(self._divergence, self._weights, self._deaths),
            )
            for remark in find(record)
        )

    def _failures(self, record: Record) -> Iterator[str]:
        if record.get("skipped"):
            yield "the gradient was not finite, so the step was skipped"
        if failures := record.get("failures"):
            yield f"a reward function failed for {failures} completion{'s' if failures != 1 else ''}"

    def _signal(self, record: Record) -> Iterator[str]:
        """Yield that nothing, or little, can be learnt from the groups."""
        if record.get("empty") and self._tell("no signal"):
            yield "in every group of this update all completions had the same reward (marked !), so nothing was learnt"
            self._tell("little signal")
        equal, groups = number(record, "zero_variance_groups"), self._groups_of_update()
        if equal is None or not groups:
            return
        self._equal_groups.append(equal / groups)
        if len(self._equal_groups) < _WINDOW:
            return
        share = statistics.fmean(self._equal_groups)
        if share >= ZERO_VARIANCE and self._tell("little signal"):
            yield (
                f"in {share:.0%} of the groups of the last {_WINDOW} updates all completions had the same reward, so "
                "they teach nothing"
            )

    def _clipping(self, record: Record) -> Iterator[str]:
        """Yield that nearly all ratios were clipped, or that none ever is."""
        clipped = number(record, "clip_fraction")
        if is_overclipped(clipped) and self._tell("overclipping"):
            yield f"{clipped:.0%} of the ratios were clipped (marked !), so most of this update is lost"
        if clipped:
            self._tell("inert")
        if clipped is None or not self._can_be_clipped(record):
            return
        self._unclipped += 1
        self._farthest = max(self._farthest, number(record, "ratio_deviation_max") or 0.0)
        if self._unclipped >= INERT_UPDATES and self._tell("inert"):
            assert self._config is not None
            clip = self._config.algorithm
            yield (
                f"no ratio was clipped in {self._unclipped} updates: the largest |ratio - 1| was "
                f"{rounded(self._farthest)}, the range is -{clip.clip_low:g} to +{clip.clip_high:g}, and has no effect"
            )

    def _collapse(self, record: Record) -> Iterator[str]:
        """Yield that hardly any entropy is left of what there was at first.

        It is measured on groups that differ, and where hardly any does, these few can have much: so updates without
        any count as low, too, once it was seen to be low.
        """
        entropy = number(record, "entropy")
        if entropy is not None and self._first_entropy is None:
            self._first_entropy = entropy
        if self._first_entropy is None or (entropy is None and not record.get("empty")):
            return
        if entropy is None or entropy >= COLLAPSED * self._first_entropy:
            self._entropies.append(None if entropy is None else math.inf)
        else:
            self._entropies.append(entropy)
        low = [one for one in self._entropies if one is not None and one < math.inf]
        high = sum(one == math.inf for one in self._entropies)
        if not low or len(self._entropies) < _WINDOW or 2 * high > _WINDOW or not self._tell("collapse"):
            return
        fell = f"the entropy fell from {rounded(self._first_entropy)} to {rounded(low[-1])} nats"
        if "reward_std" in record and (record["reward_std"] or 0.0) == 0.0:
            yield f"{fell} and all rewards are equal: the policy has collapsed, or the task is learned"
        else:
            yield f"{fell}: the policy hardly explores any more"

    def _divergence(self, record: Record) -> Iterator[str]:
        """Yield that the policy runs away: from its teacher, the reference model, or the policy that sampled."""
        moved = number(record, "approx_kl")
        if moved is not None and moved > LARGE_UPDATE and self._tell("large updates"):
            yield (
                f"this update was made {short(moved)} nats a token away from the policy that sampled: updates are too "
                "large"
            )
        divergence = number(record, "reference_kl") if self._config is not None else None
        if divergence is None or self._config is None:
            return
        if self._first_divergence is None:
            self._first_divergence = divergence
        first = self._first_divergence
        if self._config.algorithm.has_teacher:
            if divergence > max(LOST_TEACHER * first, NEAR_TEACHER) and self._tell("away"):
                yield f"the divergence from the teacher was {short(first)} at first: the policy moves away from it"
        elif divergence > max(first, RUNAWAY_KL) and self._tell("away"):
            yield (
                f"the policy is {short(divergence)} nats a token from the reference model ({short(first)} at first): "
                "it runs away"
            )

    def _weights(self, record: Record) -> Iterator[str]:
        """Yield that the ratios of trainer and engine leave hardly anything to estimate from.

        A single token can take the effective size of one update to a fifth, so the middle of some updates counts.
        """
        effective, corrected = number(record, "logprob_gap_effective"), number(record, "correction_fraction")
        if effective is not None:
            self._effective.append(effective)
        if corrected is not None:
            self._corrected.append(corrected)
        if len(self._effective) == _WINDOW and (middle := statistics.median(self._effective)) < FEW_EFFECTIVE:
            if self._tell("weights"):
                yield (
                    f"trainer and engine differ so much that the tokens of the last {_WINDOW} updates count as "
                    f"{middle:.0%} of them (logprob_gap_effective)"
                )
        if len(self._corrected) == _WINDOW and is_overclipped(share := statistics.fmean(self._corrected)):
            if self._tell("correction"):
                yield (
                    f"the correction of the gap bounded or dropped {share:.0%} of the terms of the last {_WINDOW} "
                    "updates"
                )

    def _deaths(self, record: Record) -> Iterator[str]:
        restarts = number(record, "engine_restarts") or 0.0
        if restarts > self._restarts:
            yield "an engine died and was restarted"
        self._restarts = restarts

    def _groups_of_update(self) -> int:
        """Return how many groups an update has; 0 where it is not known, or rewards are no signal."""
        if self._config is None or not rewards_count(self._config):
            return 0
        batch = self._config.batch
        return (batch.global_batch_size or 0) // (batch.num_generations or 1)

    def _can_be_clipped(self, record: Record) -> bool:
        """Return whether ratios of this update are not all 1, and have a range that should stop some of them."""
        if self._config is None or not ratios_are_bounded(self._config) or not rewards_count(self._config):
            return False
        return bool(record.get("update")) or old_logprobs_are_the_engines(self._config)

    def _tell(self, what: str) -> bool:
        """Return whether this is said for the first time."""
        new = what not in self._told
        self._told.add(what)
        return new


def is_overclipped(fraction: float | None) -> bool:
    """Return whether so many ratios were clipped that most of the update is lost."""
    return fraction is not None and fraction >= OVERCLIPPED
