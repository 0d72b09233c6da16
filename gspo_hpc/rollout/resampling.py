"""Dynamic sampling (DAPO, arXiv 2503.14476): groups without signal are replaced by groups of further prompts.

A rollout draws prompts in the order of the data, and numbers its draws from 0; these are the slots of their groups. It
trains on the first groups with signal, as many as it is to have. The last of them ends the rollout: the next one begins
with the prompt after it, whatever was drawn beyond. So what is trained on, and which prompts are used up, follow from
the order of the data and the rewards alone, and neither from the clock nor from how many prompts are drawn at once.

Where a rollout does not wait for all that it draws (rollout.unfinished), it ends with the first groups that it has
enough of, and which these are is the clock's choice. The journal has it, so a run that is killed makes it once.

Prompts are drawn in rounds, and how many a round has follows from the rewards before it. All groups of a round are in
the journal before the next one begins, so a rollout that is killed in any round goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from gspo_hpc.config.schema import Rollout

_MOST_FACTOR = 4  # by which a round may be larger than what is missing: the first groups of a rollout may mislead


class Starved(ValueError):
    """A rollout drew all prompts that it may, and none of their groups has signal."""


@dataclass(frozen=True)
class DrawLimits:
    """The groups that a rollout is to have, and the prompts that it may draw for them."""

    wanted: int
    most: int  # prompts of all rounds
    first: int  # prompts of the first round
    waits: bool = True  # for all that is drawn; else a rollout ends when it has enough
    open: int | None = None  # groups that may be sampled at once, or wait for a rollout; None: any number

    def __post_init__(self) -> None:
        assert 1 <= self.wanted <= self.first <= self.most, self

    @classmethod
    def of(cls, rollout: Rollout, wanted: int) -> DrawLimits:
        """Return the limits of rollouts of `wanted` groups.

        Without dynamic sampling they draw these alone, or where a rollout does not wait for all what it draws at first.
        """
        waits = rollout.unfinished == "wait"
        if not rollout.dynamic_sampling and waits:
            return cls(wanted, wanted, wanted)
        first = math.ceil(wanted * Fraction(str(rollout.oversampling_factor)))  # 1.1 is 11/10
        most = wanted * rollout.max_num_gen_batches if rollout.dynamic_sampling else first
        # As many as are trained on in the rollouts that a group may be carried into: then the oldest always find room.
        held = wanted * (1 + rollout.max_continuations) if rollout.unfinished == "continue" else None
        return cls(wanted, most, min(first, most), waits, held)

    def with_carried(self, groups: int) -> DrawLimits:
        """Return the limits of a rollout that so many groups are carried into."""
        return replace(self, first=max(self.first, groups), most=max(self.most, groups))

    def window(self, prompts: int) -> int:
        """Return the window of the order of so many prompts, see :class:`gspo_hpc.data.prompts.PromptStream`.

        A rollout draws none of them twice, where there are enough: the rest of an epoch must leave room for a shuffle.
        """
        return max(self.wanted, min(self.most, prompts // 2))


@dataclass(frozen=True)
class Draws:
    """The state of a rollout's draws: what is to be sampled next, or else what is trained on."""

    drawn: int  # prompts of all rounds so far
    rounds: int
    todo: tuple[int, ...]  # slots that are not finished, of the newest round; empty: the rollout is complete
    chosen: tuple[int, ...] = ()  # slots to train on, ascending, as many as wanted
    used: int = 0  # prompts that are used up: the next rollout begins behind them
    filled: int = 0  # chosen groups without signal, which stand in for those that were not found


def draws(signal: Mapping[int, bool], limits: DrawLimits, required: frozenset[int] = frozenset()) -> Draws:
    """Return where a rollout stands, of whose finished groups `signal` says whether they have one, by slot.

    Where `limits.most` prompts do not have enough groups with signal, the first of the others are chosen as well. A
    rollout that does not wait for all that it draws is complete once it has enough, and the `required` slots are
    finished; all that it drew is used up then.
    """
    drawn, rounds = limits.first, 1
    while True:
        todo = tuple(slot for slot in range(drawn) if slot not in signal)
        found = [slot for slot in range(drawn) if signal.get(slot)]
        missing = limits.wanted - len(found)
        if todo and (limits.waits or missing > 0 or not required <= signal.keys()):
            return Draws(drawn, rounds, todo)
        if missing <= 0:
            chosen = found[: limits.wanted]
            return Draws(drawn, rounds, (), tuple(chosen), chosen[-1] + 1 if limits.waits else drawn)
        if drawn == limits.most:
            others = [slot for slot in range(drawn) if not signal[slot]][:missing]
            return Draws(drawn, rounds, (), tuple(sorted(found + others)), drawn, len(others))
        drawn, rounds = min(limits.most, drawn + _next_round(limits, missing, len(found), drawn)), rounds + 1


def _next_round(limits: DrawLimits, missing: int, found: int, drawn: int) -> int:
    """Return the prompts of the next round: as many as lack, divided by the share of groups with signal so far."""
    most = _MOST_FACTOR * missing
    if limits.open is not None:
        most = min(most, limits.open - found)
    return min(most, missing * drawn // found) if found else most
