"""The watch over a rollout's gaps: what the probe cannot see, because it is short and not read from the prefix cache.

Each update measures the gap of the tokens that it trains on, by the length of the prefix that the engine took from its
cache and by position. Where weights that sampled are gone (rollout.max_staleness, unfinished: continue,
in_flight_updates), log-probs of the engine stand for the trainer's, gaps are 0, and the probe alone checks engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gspo_hpc.algorithms.terms.gap_buckets import CACHED_NAMES, POSITION_NAMES
from gspo_hpc.config.derived import gap_limits
from gspo_hpc.config.schema import Config
from gspo_hpc.training.agreement.gap import HARMLESS, Baseline

_FEWEST = 256  # tokens from which a mean is judged
_GROWTH = 5.0  # times the gap elsewhere: so much larger is another cause than rounding
_STALE = "stale prefix cache"
_NO_CACHE = "Set rollout.engine.enable_prefix_caching=false, and report it as a bug"
_RAISE = "If the gap is known to be rounding, raise rollout.probe_mean_gap"

Sums = Mapping[str, tuple[float, float]]  # name -> (sum, count)


class GapMismatch(RuntimeError):
    """Engine and trainer disagree on the log-probs of the tokens of a rollout."""


class RolloutGapMonitor:
    """The limits of a run for the gaps of its updates."""

    def __init__(self, config: Config, baseline: Baseline | None = None) -> None:
        """`baseline` gets the gap of the run's first update, unless it has it."""
        # The gap is of log-probs at the temperature of the rollout, which stretches logits.
        self._allowed = gap_limits(config).mean / min(1.0, config.rollout.temperature or 1.0)
        self._baseline = baseline or Baseline()

    def judge(self, sums: Sums, version: int) -> None:
        """Raise GapMismatch, with the likely cause, if tokens of a rollout have too large a gap.

        `sums` are those of an update; `version` is the number of steps of the weights that sampled.
        """
        total = sums.get("logprob_gap", (0.0, 0.0))
        if total[1] < _FEWEST:
            return
        mean = total[0] / total[1]
        stale = self._stale_places(sums)
        if stale or mean > self._allowed or mean != mean:
            cause, fix = (_STALE, _NO_CACHE) if stale else (self._other_cause(sums), _RAISE)
            raise GapMismatch(
                f"engine and trainer disagree on the tokens of a rollout (weights of step {version}): mean |log-prob "
                f"difference| {mean:.2e} (allowed {self._allowed:g}); {_shown(sums, CACHED_NAMES)}; "
                f"{_shown(sums, POSITION_NAMES)}. Likely cause: {cause}. {fix}"
            )
        if self._baseline.update is None:
            self._baseline.update = mean

    def _stale_places(self, sums: Sums) -> list[str]:
        """Return the lengths of cached prefixes behind which the gap is far larger than without, or than at first."""
        means = _means(sums, CACHED_NAMES)
        plain = means.pop(CACHED_NAMES[0], None)
        usual = plain if plain is not None else self._baseline.update
        if usual is None:
            return []
        most = max(_GROWTH * usual, HARMLESS * self._allowed)
        return [name for name, mean in means.items() if mean > most]

    def _other_cause(self, sums: Sums) -> str:
        means = list(_means(sums, POSITION_NAMES).values())
        if len(means) > 1 and means[0] <= self._allowed and means[-1] > _GROWTH * means[0]:
            return "the gap grows with the position: wrong rotary embeddings (rope_theta, rope scaling) or a wrong mask"
        return (
            "the probe agreed, so weights are the same: engine and trainer compute in different precision, choose "
            "other experts (moe.router_replay) or sample from other distributions"
        )


def _means(sums: Sums, names: Sequence[str]) -> dict[str, float]:
    """Return the mean gap of each place with enough tokens."""
    found = {name: sums.get(name, (0.0, 0.0)) for name in names}
    return {name: total / count for name, (total, count) in found.items() if count >= _FEWEST}


def _shown(sums: Sums, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {mean:.2e}" for name, mean in _means(sums, names).items()) or "too few tokens"
