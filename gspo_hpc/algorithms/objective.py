"""The objective that a run optimises, composed from named terms, and what contradicts or defeats it.

An algorithm is one file beside this one, such as gspo.py: a class derived from :class:`SequenceRatio` or
:class:`TokenRatio` with its name, its paper and its defaults. It may add keys, contradictions and warnings of its own,
and an :class:`Objective` of its own that replaces some of the terms. Settings are read on login nodes: torch is
imported inside the methods that compute, which only the loss calls.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from gspo_hpc.algorithms import combinations
from gspo_hpc.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSettings,
    Correction,
    KlEstimator,
    KlPlacement,
    Ratio,
    RatioOf,
    TrustRegion,
)
from gspo_hpc.config.derived import every_ratio_is_one, rewards_count
from gspo_hpc.config.schema import Config

if TYPE_CHECKING:
    from gspo_hpc.algorithms.terms.aggregation import Samples, Tensor
    from gspo_hpc.algorithms.terms.clipping import Clipped
    from gspo_hpc.algorithms.terms.ratios import Ratios


class BatchSize(NamedTuple):
    """The size of a global batch: what counts in it, and the longest response that it could have."""

    completions: int
    tokens: int
    prompts: int
    max_response_length: int


@dataclass(frozen=True)
class Objective:
    """A composed objective: nothing is left to defaults.

    The methods are its terms, in the order in which the loss calls them. An algorithm that needs another term derives
    from this class and replaces the method. Shapes: see :mod:`gspo_hpc.algorithms.terms`.
    """

    ratio: Ratio  # one per sequence; the same with a gradient per token; one per token
    clip_low: float  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float
    aggregation: Aggregation  # what the loss is a mean over
    normalize_advantage: bool  # divide by the group's standard deviation
    kl_beta: float  # weight of the KL term against the reference model
    trust_region: TrustRegion = "clip"
    dual_clip: float = 0.0  # bound of ratios with a negative advantage; 0: none
    weight_max: float = 20.0  # of a token that a mask keeps
    gate_positive: float = 1.0  # temperatures of the gate by the sign of the advantage
    gate_negative: float = 1.05
    advantage: Advantage = "group"
    correction_kind: Correction = "none"
    correction_low: float = 0.5
    correction_high: float = 5.0
    sequence_mask: float = 0.0  # 0: none
    kl_estimator: KlEstimator = "k3"
    kl_placement: KlPlacement = "loss"
    entropy_coef: float = 0.0  # weight of the entropy bonus
    kl_target: float = 0.0  # what kl_beta follows; 0: it is fixed
    entropy_target: float = 0.0  # what entropy_coef follows; 0: it is fixed

    @property
    def moves_all(self) -> bool:
        """True where completions without an advantage have a gradient, too."""
        return self.loss_kl_beta > 0 or self.entropy_coef > 0 or self.entropy_target > 0

    @property
    def loss_kl_beta(self) -> float:
        """The weight of the KL term in the loss; 0 where it is in the reward."""
        return self.kl_beta if self.kl_placement == "loss" else 0.0

    @property
    def by_sequence(self) -> bool:
        """True where there is one policy term per sequence."""
        return self.ratio == "sequence" or self.trust_region == "geometric"

    def ratios(self, current: Tensor, old: Tensor, advantages: Tensor, samples: Samples) -> Ratios:
        """Return the importance ratios from log-probs [R] of both policies and advantages [S]."""
        from gspo_hpc.algorithms.terms.ratios import RATIOS, geometric_ratio

        if self.trust_region == "geometric":
            return geometric_ratio(current, old, advantages, samples, self.clip_low, self.clip_high)
        found = RATIOS[self.ratio](current, old, advantages, samples)
        if self.trust_region == "mask":
            return found._replace(change=current.detach().exp() - old.exp())
        return found

    def policy_terms(self, ratios: Ratios) -> Clipped:
        """Return the policy term [U] of each ratio, to be minimised."""
        from gspo_hpc.algorithms.terms import clipping

        log_ratio, advantages = ratios.log_ratio, ratios.advantages
        if ratios.bounded is not None:
            return clipping.Clipped(-log_ratio.exp() * advantages, *ratios.bounded)
        if ratios.change is not None:
            bounds = (self.clip_low, self.clip_high, self.weight_max)
            return clipping.masked_terms(log_ratio, advantages, ratios.change, *bounds)
        if self.trust_region == "weight":
            return clipping.weighted_terms(log_ratio, advantages, self.clip_low, self.clip_high)
        if self.trust_region == "gate":
            return clipping.gated_terms(log_ratio, advantages, self.gate_positive, self.gate_negative)
        return clipping.clipped_terms(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def correction(self, gap: Tensor, samples: Samples) -> Tensor | None:
        """Return weights [U] of the policy terms, without gradient; None for no correction.

        `gap` [R] is log pi_old - log pi_old as the engine saw it, by which off-policy corrections weigh or drop tokens.
        Where there is one term per sequence, its ratio is the exponential of the mean gap.
        """
        from gspo_hpc.algorithms.terms import corrections

        low, high = self.correction_low, self.correction_high
        if self.correction_kind == "rejection":
            kept = corrections.accepted(gap, samples, low, high)
            return kept if self.by_sequence else samples.at_tokens(kept)
        log_rho = samples.sum(gap) / samples.lengths if self.by_sequence else gap
        if self.correction_kind == "truncated":
            return corrections.truncated(log_rho, high)
        return corrections.masked(log_rho, low, high) if self.correction_kind == "masked" else None

    def kept(self, moved: Tensor, advantages: Tensor, samples: Samples) -> Tensor | None:
        """Return 1 [U] for policy terms that stay and 0 for others; None where all stay.

        `moved` [R] is log pi_engine - log pi, without gradient; advantages [S].
        """
        from gspo_hpc.algorithms.terms.corrections import drifted_away

        if not self.sequence_mask:
            return None
        stays = drifted_away(moved, advantages, samples, self.sequence_mask)
        return stays if self.by_sequence else samples.at_tokens(stays)

    def aggregate(self, values: Tensor, samples: Samples) -> Tensor:
        """Return per-token values [R] as one value per sample [S], which the loss sums."""
        from gspo_hpc.algorithms.terms.aggregation import aggregate

        return aggregate(values, samples, self.aggregation)

    def kl(self, log_ratio: Tensor) -> Tensor:
        """Return the KL term [R] from log pi_ref - log pi [R], before `kl_beta`."""
        from gspo_hpc.algorithms.terms.kl import ESTIMATORS

        return ESTIMATORS["k3" if self.kl_estimator == "unbiased" else self.kl_estimator](log_ratio)

    def denominator(self, size: BatchSize) -> int:
        """Return what the sum over the global batch is divided by."""
        if self.aggregation == "fixed_length":
            return size.completions * size.max_response_length
        return {"sequence": size.completions, "token": size.tokens, "prompt": size.prompts}[self.aggregation]


class Algorithm(AlgorithmSettings):
    """Base class of all algorithms."""

    def objective(self) -> Objective:
        """Return the terms of the objective."""
        names = {field.name: field.name for field in fields(Objective)} | {"correction_kind": "correction"}
        return Objective(**{name: getattr(self, setting) for name, setting in names.items()})

    def contradictions(self) -> list[str]:
        """Return the reasons, one line each, for which these settings make no objective."""
        return list(combinations.contradictions(self))

    def warnings(self) -> list[str]:
        """Return the settings, one line each, that are allowed but defeat the objective."""
        return list(combinations.warnings(self))

    def notes(self) -> list[str]:
        """Return what nobody has published about these settings, one line each."""
        return list(combinations.notes(self))


class SequenceRatio(Algorithm):
    """Base class of algorithms whose importance ratio belongs to a whole sequence."""

    ratio: RatioOf = "sequence"


class TokenRatio(Algorithm):
    """Base class of algorithms with one importance ratio per token."""

    ratio: RatioOf = "token"


def is_known(settings: AlgorithmSettings) -> bool:
    """Return whether the terms are known: not of an algorithm in a user's file that was not run."""
    return isinstance(settings, Algorithm)


def resolve(settings: AlgorithmSettings) -> Objective:
    """Return the objective of an algorithm's settings. Raises ValueError with every contradiction in them."""
    assert isinstance(settings, Algorithm), type(settings)
    if wrong := settings.contradictions():
        raise ValueError("\n".join(wrong))
    return settings.objective()


def warnings(config: Config) -> list[str]:
    """Return the settings, one line each, that are allowed but defeat the objective.

    Raises ValueError as :func:`resolve` does.
    """
    if is_known(config.algorithm):
        resolve(config.algorithm)
    found: list[str] = []
    if every_ratio_is_one(config) and rewards_count(config):
        found.append(
            "clipping is inert: one update per rollout (steps_per_generation 1, num_iterations 1) leaves every ratio "
            "at 1; the GSPO paper makes 4 (batch.steps_per_generation: 4)"
        )
    if not config.algorithm.has_teacher and (unused := config.parallel.teacher_sizes):
        name, size = next(iter(unused.items()))
        found.append(f"parallel.teacher_{name} ({size}) is of the layout of algorithm.teacher, and there is no teacher")
    return found + (config.algorithm.warnings() if isinstance(config.algorithm, Algorithm) else [])


def notes(config: Config) -> list[str]:
    """Return what nobody has published about a config's objective, one line each."""
    return config.algorithm.notes() if isinstance(config.algorithm, Algorithm) else []
