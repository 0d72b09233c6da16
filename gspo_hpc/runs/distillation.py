"""Describe what a run distils from, and how near it came, for console, status, report and diagnose alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_hpc.config.derived import rewards_count
from gspo_hpc.config.schema import Config
from gspo_hpc.runs import learning


@dataclass(frozen=True)
class Distillation:
    """The teacher of a run, and the divergence from it over the first and the latest tenth of the rollouts."""

    teacher: str
    alone: bool  # whether no reward has a part in what is learnt
    weight: float  # algorithm.kl_beta
    divergences: tuple[float, ...]  # in nats a token: the first and the latest; one of a single rollout, or none

    @property
    def latest(self) -> float | None:
        """Return the latest divergence; None before the first step."""
        return self.divergences[-1] if self.divergences else None

    @property
    def words(self) -> str:
        """Return what it distils from, and how the divergence went, as a phrase after "distils"."""
        signal = "alone" if self.alone else f"beside rewards, with the weight {self.weight:g}"
        if not self.divergences:
            return f"from {self.teacher} {signal}"
        return f"from {self.teacher} {signal}: {self.course}"

    @property
    def course(self) -> str:
        """Return how the divergence went; empty before the first step."""
        if len(self.divergences) == 2:
            return learning.towards_teacher(*self.divergences)
        return "".join(f"divergence from the teacher {one:.4f} nats a token" for one in self.divergences)


def of_run(config: Config | None, records: Sequence[Mapping[str, Any]]) -> Distillation | None:
    """Return what a run distils from, by its config and the records of metrics.jsonl; None without a teacher."""
    if config is None or not config.algorithm.has_teacher:
        return None
    settings = config.algorithm
    return Distillation(
        str(settings.teacher), not rewards_count(config), settings.kl_beta, learning.divergences(records)
    )
