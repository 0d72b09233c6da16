"""Rollouts from engines on GPUs of their own, which may be ahead of training.

Rollout k is sampled by the weights that training on the rollouts before k - S has made, S = rollout.max_staleness: a
pure function of its number, so a run that is killed samples again what it would have sampled. Before training on
rollout k, the engines have finished all rollouts up to k + S - 1; they get the current weights, and begin rollout
k + S while rollout k is trained on.

The weights that sample ahead are gone once training has changed them. So a checkpoint is made only when everything that
they sample is in the journals (:meth:`settle`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.data.prompts import Position
from gspo_hpc.rollout.worker import Interrupted
from gspo_hpc.runs import journal
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.checkpoint_state import SampledBy
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.phases import Sampler
from gspo_hpc.training.progress import Rollout
from gspo_hpc.training.recipe import PromptData, Recipe
from gspo_hpc.training.serving.engines import Call, RemoteEngines, sizes
from gspo_hpc.training.serving.weights import RemoteWeights
from gspo_hpc.training.telemetry.step_clock import StepClock


@dataclass(frozen=True)
class _Begun:
    """A rollout that engines sample, or have sampled, and that is not used yet."""

    weights: SampledBy
    call: Call | None  # None: an earlier attempt had finished it
    after: Position  # where the prompts of the next rollout begin


class RemoteSampler(Sampler):
    """The generation of rollouts on GPUs of their own."""

    def __init__(
        self,
        recipe: Recipe,
        data: PromptData,
        engines: RemoteEngines,
        weights: RemoteWeights,
        rollouts: Path,  # folder of the journals
        observers: StepObserver,
        clock: StepClock,
        ahead: Mapping[int, SampledBy],
    ) -> None:
        """`ahead`: the weights that sampled rollouts which a checkpoint has not used up."""
        super().__init__(recipe, data, engines.ranks, rollouts, observers, clock)
        self._engines, self._remote_weights = engines, weights
        self._sampled_by, self._begun = dict(ahead), dict[int, _Begun]()

    def sample(self, cursor: Cursor) -> Rollout:
        """Return the rollout that begins at `cursor`, and have the engines begin the next ones. Collective."""
        if cursor.rollout in self._begun:
            self._wait_for(cursor.rollout)
        current = SampledBy(self._remote_weights.sync().fingerprint, cursor.step)
        staleness = self._recipe.config.rollout.max_staleness
        start = Position(cursor.epoch, cursor.offset)
        for number in range(cursor.rollout, min(cursor.rollout + staleness + 1, self._recipe.num_rollouts)):
            if number not in self._begun:
                has_its_weights = max(0, number - staleness) >= cursor.rollout
                known = None if has_its_weights else self._sampled_by.get(number)
                self._begun[number] = self._begin(number, start, current, known)
            start = self._begun[number].after
        metrics = self._wait_for(cursor.rollout)
        folder = self._folder(cursor.rollout)
        used = self._begun.pop(cursor.rollout)
        # A stop in its first update makes a checkpoint in which this rollout is still to be used.
        later = {number: one for number, one in self._sampled_by.items() if number > cursor.rollout}
        self._sampled_by = later | {cursor.rollout: used.weights}
        # What engines have just written may not be listed on this node yet.
        written = {} if used.call is None else self._engines.wait(used.call).files
        listed = self._engines.from_rank_0(lambda: sizes(journal.journals(folder))) | written
        own = self._engines.read(folder, used.weights.fingerprint, listed, self._recipe.num_rollout_prompts)
        return self._rollout(cursor, own.values(), used.after, metrics, used.weights.version)

    def is_settled(self, cursor: Cursor) -> bool:
        """Wait for all that older weights sample; return False if it was stopped. Collective.

        Between the updates of a rollout that is everything: a resumed run begins nothing before the next rollout, and
        by then its weights have changed.
        """
        begins = cursor.update == 0
        older = (
            one
            for one in self._begun.values()
            if not (begins and self._remote_weights.has_weights(one.weights.fingerprint))
        )
        return not any(one.call is not None and self._engines.wait(one.call).stopped for one in older)

    def _wait_for(self, number: int) -> Mapping[str, float]:
        """Wait for a rollout that was begun; return metrics of the engines. Raises Interrupted if it was stopped."""
        call = self._begun[number].call
        if call is None:
            return {}
        completions = len(call.request.slots) * call.request.samples
        with self._clock.phase("generate"), self._observers.rollout(number, completions) as progress:
            answer = self._engines.wait(call, progress)
        if answer.stopped:
            raise Interrupted
        self._clock.seconds["reward_wait"] = answer.waited
        return answer.engines

    def ahead(self) -> dict[int, SampledBy]:
        """See Sampler."""
        return self._sampled_by | {number: begun.weights for number, begun in self._begun.items()}

    def _begin(self, number: int, start: Position, current: SampledBy, known: SampledBy | None) -> _Begun:
        """Have the engines, which have the `current` weights, sample what is missing of a rollout.

        `known` are older weights that have sampled it; RuntimeError if they left it unfinished.
        """
        count = self._recipe.num_rollout_prompts
        prompts, after = self._data.take(start, count)
        weights = known or current
        fingerprint = weights.fingerprint
        folder = self._folder(number)
        _, done = self._engines.ranks.exchange.partition_files(
            lambda: [path.name for path in journal.journals(folder)],
            lambda name: journal.read_journal(folder / name, fingerprint),
        )
        todo = [slot for slot in range(count) if slot not in done]
        if todo and fingerprint != current.fingerprint:
            raise RuntimeError(
                f"{folder}: {len(todo)} of {count} groups are missing, and the weights that sampled the others are "
                "gone. Restore the files of this folder, or resume from a checkpoint whose journals are whole"
            )
        call = self._engines.start(self._request(todo, prompts, number), folder, fingerprint) if todo else None
        return _Begun(weights, call, after)
