"""Weights of the KL term and of the entropy bonus that follow targets from one optimizer step to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gspo_hpc.algorithms.objective import Objective

_LARGEST_ERROR = 0.2  # of the divergence from its target, as a share of it: one step changes the weight little
_RATE = 0.1  # of the KL weight: a step changes it by 2 % at most
_ENTROPY_STEP = 0.005  # what a step changes the weight of the bonus by
_LARGEST_BONUS = 1.0

Sums = Mapping[str, tuple[float, float]]  # name -> (sum, count), over the whole global batch


@dataclass(frozen=True)
class AdaptiveWeights:
    """The weights of the next step. They follow from the steps before, and are saved with checkpoints."""

    kl_beta: float
    entropy_coef: float

    @classmethod
    def first(cls, objective: Objective) -> AdaptiveWeights | None:
        """Return the weights that a run begins with; None where both are fixed."""
        if not objective.kl_target and not objective.entropy_target:
            return None
        return cls(objective.kl_beta, objective.entropy_coef)

    def of(self, objective: Objective) -> Objective:
        """Return the objective with these weights."""
        return replace(objective, kl_beta=self.kl_beta, entropy_coef=self.entropy_coef)

    def after(self, objective: Objective, sums: Sums) -> AdaptiveWeights:
        """Return the weights after an update with these sums: nearer to what meets the targets.

        The KL weight is multiplied by 1 + 0.1 e, e the relative distance of the divergence from its target, at most
        0.2; the weight of the bonus moves by 0.005 up where the entropy is below its target, else down, within 0 and 1.
        """
        beta, bonus = self.kl_beta, self.entropy_coef
        if objective.kl_target and (mean := _mean(sums, "reference_kl")) is not None:
            error = mean / objective.kl_target - 1.0
            beta *= 1.0 + _RATE * min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        if objective.entropy_target and (mean := _mean(sums, "entropy")) is not None:
            step = _ENTROPY_STEP if mean < objective.entropy_target else -_ENTROPY_STEP
            bonus = min(max(bonus + step, 0.0), _LARGEST_BONUS)
        return AdaptiveWeights(beta, bonus)

    def to_dict(self) -> dict[str, float]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AdaptiveWeights:
        """Return what :meth:`to_dict` gave. Raises KeyError, TypeError or ValueError for other values."""
        return cls(float(values["kl_beta"]), float(values["entropy_coef"]))


def _mean(sums: Sums, name: str) -> float | None:
    """Return a mean that is a number; None without one."""
    total, count = sums.get(name, (0.0, 0.0))
    mean = total / count if count else float("nan")
    return mean if mean - mean == 0.0 else None
