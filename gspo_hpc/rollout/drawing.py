"""The groups that a rollout draws, round by round, and what their rewards decide about the prompts of the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gspo_hpc.config.schema import Config
from gspo_hpc.data.carried import Enough
from gspo_hpc.data.records import Group
from gspo_hpc.data.retired import Retirement, retirements
from gspo_hpc.data.table import GroupTable
from gspo_hpc.rollout.resampling import DrawLimits, draws


def decides_next(config: Config) -> bool:
    """Return True if what becomes of a rollout's groups decides which prompts the next one has."""
    return config.rollout.dynamic_sampling or pass_rates_decide(config) or config.rollout.unfinished != "wait"


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

    def __init__(
        self,
        limits: DrawLimits,
        config: Config,
        judge: Callable[[Iterable[Group]], Judged],
        required: frozenset[int] = frozenset(),
    ) -> None:
        """`judge` says what is known of the groups that all ranks give it; it is collective.

        `required`: slots that the rollout waits for in any case.
        """
        self._limits, self._config, self._judge, self._required = limits, config, judge, required
        self._own: dict[int, Group] = {}
        self._signals: dict[int, bool] = {}
        self._pass_rates: dict[int, float] = {}
        self._tokens: Counter[int] = Counter()  # of completions, by slot
        self.state = draws({}, limits, required)

    def add(self, own: Mapping[int, Group], slots: Iterable[int]) -> None:
        """Add finished groups, of which this rank holds `own`. Collective where they decide about the next rollout.

        `slots` are those of all ranks, where that is known without asking them: where a rollout waits for all groups.
        Without dynamic sampling, every group is taken as it is.
        """
        self._own |= own
        judged = self._judge(own.values()) if decides_next(self._config) else None
        if judged is not None:
            self._pass_rates |= judged.pass_rates
            slots = judged.table.slots
        if judged is not None and self._config.rollout.dynamic_sampling:
            self._signals |= judged.signals
            for slot, tokens in judged.table.rows[["slot", "sampled_len"]].tolist():
                self._tokens[slot] += tokens
        else:
            self._signals |= dict.fromkeys(slots, True)
        self.state = draws(self._signals, self._limits, self._required)

    def enough(self) -> Enough | None:
        """Return the groups with which the next call of generation ends; None: with all that it is asked for."""
        if self._limits.waits:
            return None
        missing = max(0, self._limits.wanted - sum(self._signals.values()))
        required = self._required - self._signals.keys()
        return Enough(missing, required, self._config.rollout.dynamic_sampling)

    def spare(self) -> list[Group]:
        """Return this rank's finished groups with signal that are not trained on, once nothing is left to sample."""
        chosen = frozenset(self.state.chosen)
        return [group for slot, group in self._own.items() if self._signals[slot] and slot not in chosen]

    def is_over(self, slot: int) -> bool:
        """Tell whether a group of the rollout is trained on, or has nothing to learn from."""
        return slot in self.state.chosen or not self._signals.get(slot, True)

    def chosen(self) -> list[Group]:
        """Return this rank's groups that are trained on, once nothing is left to be sampled.

        Where a rollout does not wait for all groups, they get slots of their own, for those that it was given stand in
        front: their older tokens, and the longer answers, would make up the first update.
        """
        chosen = self.state.chosen
        if self._limits.waits:
            return [self._own[slot] for slot in chosen if slot in self._own]
        mixed = np.argsort(np.random.PCG64(len(chosen)).random_raw(len(chosen)), kind="stable").tolist()
        slots = dict(zip(chosen, mixed, strict=True))
        return [replace(self._own[slot], slot=slots[slot]) for slot in chosen if slot in self._own]

    def retirements(self, prompts: Sequence[int], rollout: int) -> list[Retirement]:
        """Return what the finished rollout retires of the prompts that it used up, given by slot."""
        return retirements(self._pass_rates, prompts, rollout, self._config.data.no_resampling_pass_rate)

    def pass_rates(self, prompts: Sequence[int]) -> dict[int, float]:
        """Return the pass rates of the prompts that the finished rollout used up, given by slot; by prompt.

        Without a curriculum there are none.
        """
        if self._config.data.curriculum_floor is None:
            return {}
        known = self._pass_rates
        return {prompt: known[slot] for slot, prompt in enumerate(prompts) if slot in known}

    def metrics(self) -> dict[str, float]:
        """Return the logged metrics of dynamic sampling, and of groups that the rollout left unfinished."""
        unfinished = sum(slot not in self._signals for slot in range(self.state.drawn))
        found: dict[str, float] = {} if self._limits.waits else {"rollout/unfinished_groups": unfinished}
        if not self._config.rollout.dynamic_sampling:
            return found
        state = self.state
        without = sum(not self._signals.get(slot, True) for slot in range(state.drawn))
        extra = sum(self._tokens[slot] for slot in {*range(state.drawn)} - {*state.chosen})
        return found | {
            "rollout/rounds": state.rounds,
            "rollout/prompts_drawn": state.drawn,
            "rollout/prompts_used": state.used,
            "rollout/no_signal_fraction": without / state.drawn,
            "rollout/filled_groups": state.filled,
            "rollout/extra_tokens": extra,
        }
