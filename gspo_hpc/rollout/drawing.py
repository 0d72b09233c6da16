"""The groups that a rollout draws, round by round, and what their rewards decide about the prompts of the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Group
from gspo_hpc.data.retired import Retirement, retirements
from gspo_hpc.data.table import GroupTable
from gspo_hpc.rollout.resampling import DrawLimits, draws


def rewards_decide(config: Config) -> bool:
    """Return True if the rewards of a rollout decide which prompts the next one has."""
    return config.rollout.dynamic_sampling or pass_rates_decide(config)


def pass_rates_decide(config: Config) -> bool:
    """Return True if the pass rates of groups decide which prompts are drawn later: some are retired, or weighed."""
    return config.data.no_resampling_pass_rate is not None or config.data.curriculum_floor is not None


class Judged(NamedTuple):
    """The facts about finished groups that every rank knows."""

    table: GroupTable
    signals: Mapping[int, bool]  # whether a group has anything to learn from, by slot
    pass_rates: Mapping[int, float]  # by slot; empty where they decide nothing


class Drawing:
    """The groups that a rollout has drawn so far, each on the rank that holds it."""

    def __init__(self, limits: DrawLimits, config: Config, judge: Callable[[Iterable[Group]], Judged]) -> None:
        """`judge` says what is known of the groups that all ranks give it; it is collective."""
        self._limits, self._config, self._judge = limits, config, judge
        self._own: dict[int, Group] = {}
        self._signals: dict[int, bool] = {}
        self._pass_rates: dict[int, float] = {}
        self._tokens: Counter[int] = Counter()  # of completions, by slot
        self.state = draws({}, limits)

    def add(self, own: Mapping[int, Group], slots: Iterable[int]) -> None:
        """Add the finished groups of `slots`, of which this rank holds `own`. Collective where rewards decide.

        Without dynamic sampling, every group is taken as it is.
        """
        self._own |= own
        judged = self._judge(own.values()) if rewards_decide(self._config) else None
        if judged is not None:
            self._pass_rates |= judged.pass_rates
        if judged is not None and self._config.rollout.dynamic_sampling:
            self._signals |= judged.signals
            for slot, tokens in judged.table.rows[["slot", "sampled_len"]].tolist():
                self._tokens[slot] += tokens
        else:
            self._signals |= dict.fromkeys(slots, True)
        self.state = draws(self._signals, self._limits)

    def chosen(self) -> list[Group]:
        """Return this rank's groups that are trained on, once nothing is left to be sampled."""
        return [self._own[slot] for slot in self.state.chosen if slot in self._own]

    def retirements(self, prompts: Sequence[int], rollout: int) -> list[Retirement]:
        """Return what the finished rollout retires of the prompts that it used up, given by slot."""
        return retirements(self._pass_rates, prompts, rollout, self._config.data.no_resampling_pass_rate)

    def pass_rates(self, prompts: Sequence[int]) -> dict[int, float]:
        """Return the pass rates of the prompts that the finished rollout used up, given by slot; by prompt.

        Without a curriculum there are none.
        """
        if self._config.data.curriculum_floor is None:
            return {}
        return {prompt: self._pass_rates[slot] for slot, prompt in enumerate(prompts)}

    def metrics(self) -> dict[str, float]:
        """Return the logged metrics of dynamic sampling; empty without it."""
        if not self._config.rollout.dynamic_sampling:
            return {}
        state = self.state
        without = sum(not self._signals[slot] for slot in range(state.drawn))
        extra = sum(self._tokens[slot] for slot in {*range(state.drawn)} - {*state.chosen})
        return {
            "rollout/rounds": state.rounds,
            "rollout/prompts_drawn": state.drawn,
            "rollout/prompts_used": state.used,
            "rollout/no_signal_fraction": without / state.drawn,
            "rollout/filled_groups": state.filled,
            "rollout/extra_tokens": extra,
        }
