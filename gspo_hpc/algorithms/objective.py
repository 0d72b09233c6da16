"""The objective that a run optimises, composed from named terms, and what contradicts or defeats it.

An algorithm is one file beside this one, such as gspo.py: a class derived from :class:`SequenceRatio` or
:class:`TokenRatio` with its name, its paper and its defaults. It may add keys, contradictions and warnings of its own,
and an :class:`Objective` of its own that replaces some of the terms. Settings are read on login nodes: torch is
imported inside the methods that compute, which only the loss calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from gspo_hpc.config.algorithm import Aggregation, AlgorithmSettings
from gspo_hpc.config.derived import updates_per_rollout
from gspo_hpc.config.schema import Config

if TYPE_CHECKING:
    from gspo_hpc.algorithms.terms.aggregation import Samples, Tensor
    from gspo_hpc.algorithms.terms.clipping import Clipped
    from gspo_hpc.algorithms.terms.ratios import Ratios

Ratio = Literal["sequence", "sequence_token", "token"]


@dataclass(frozen=True)
class Objective:
    """A composed objective: nothing is left to defaults.

    The methods are its terms, in the order in which the loss calls them. An algorithm that needs another term derives
    from this class and replaces the method. Shapes: see :mod:`gspo_hpc.algorithms.terms`.
    """

    ratio: Ratio  # one per sequence; the same with a gradient per token; one per token
    clip_low: float  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float
    aggregation: Aggregation  # mean over sequences (of means over their tokens), or over all tokens of the batch
    normalize_advantage: bool  # divide by the group's standard deviation
    kl_beta: float  # weight of the KL term against the reference model

    def ratios(self, current: Tensor, old: Tensor, advantages: Tensor, samples: Samples) -> Ratios:
        """Return the importance ratios from log-probs [R] of both policies and advantages [S]."""
        from gspo_hpc.algorithms.terms.ratios import RATIOS

        return RATIOS[self.ratio](current, old, advantages, samples)

    def policy_terms(self, ratios: Ratios) -> Clipped:
        """Return the policy term [U] of each ratio, to be minimised."""
        from gspo_hpc.algorithms.terms.clipping import clipped_terms

        return clipped_terms(ratios.log_ratio, ratios.advantages, self.clip_low, self.clip_high)

    def correction(self, gap: Tensor, samples: Samples) -> Tensor | None:
        """Return weights [U] of the policy terms, without gradient; None for no correction.

        `gap` [R] is log pi_old - log pi_old as the engine saw it, by which off-policy corrections weigh or drop tokens.
        """
        return None

    def aggregate(self, values: Tensor, samples: Samples) -> Tensor:
        """Return per-token values [R] as one value per sample [S], which the loss sums."""
        from gspo_hpc.algorithms.terms.aggregation import aggregate

        return aggregate(values, samples, self.aggregation)

    def kl(self, log_ratio: Tensor) -> Tensor:
        """Return the KL term [R] from log pi_ref - log pi [R], before `kl_beta`."""
        from gspo_hpc.algorithms.terms.kl import k3

        return k3(log_ratio)

    def denominator(self, completions: int, tokens: int) -> int:
        """Return what the sum over the global batch is divided by: its completions, or their tokens."""
        return tokens if self.aggregation == "token" else completions


class Algorithm(AlgorithmSettings):
    """Base class of all algorithms."""

    ratio: ClassVar[Ratio]

    def objective(self) -> Objective:
        """Return the terms of the objective."""
        return Objective(
            self.ratio, self.clip_low, self.clip_high, self.aggregation, self.normalize_advantage, self.kl_beta
        )

    def contradictions(self) -> list[str]:
        """Return the reasons, one line each, for which these settings make no objective."""
        return []

    def warnings(self) -> list[str]:
        """Return the settings, one line each, that are allowed but defeat the objective."""
        return []


class SequenceRatio(Algorithm):
    """Base class of algorithms whose importance ratio belongs to a whole sequence."""

    def contradictions(self) -> list[str]:
        """Refuse a mean over tokens."""
        if self.aggregation == "sequence":
            return []
        return [
            f"algorithm.aggregation token contradicts algorithm.name {self.name}: its ratio belongs to a whole "
            "sequence, and a mean over all tokens would weigh sequences by their length; use aggregation sequence, "
            "or name grpo"
        ]

    def warnings(self) -> list[str]:
        """Warn of a clip range for single tokens."""
        widest = max(self.clip_low, self.clip_high)
        low, high = (type(self).model_fields[name].default for name in ("clip_low", "clip_high"))
        if widest < 0.05:
            return []
        return [
            f"a clip range of {widest:g} is made for ratios of single tokens (GRPO): the ratio of a sequence is a mean "
            f"over its tokens and hardly ever gets there; {self.name} has {low:g}/{high:g}"
        ]


class TokenRatio(Algorithm):
    """Base class of algorithms with one importance ratio per token."""

    ratio: ClassVar[Literal["token"]] = "token"

    def warnings(self) -> list[str]:
        """Warn of a clip range for whole sequences."""
        narrowest = min(self.clip_low, self.clip_high)
        if narrowest >= 0.01:
            return []
        return [
            f"a clip range of {narrowest:g} is made for ratios of whole sequences (GSPO): with one ratio per token it "
            "clips nearly everything; grpo has 0.2/0.2"
        ]


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
    if updates_per_rollout(config.batch) == 1:
        found.append(
            "clipping is inert: one update per rollout (steps_per_generation 1, num_iterations 1) leaves every ratio "
            "at 1; the GSPO paper makes 4 (batch.steps_per_generation: 4)"
        )
    return found + (config.algorithm.warnings() if isinstance(config.algorithm, Algorithm) else [])
