"""Rollouts from engines on GPUs of their own, which may be ahead of training.

Rollout k is sampled by the weights that training on the rollouts before k - S has made, S = rollout.max_staleness: a
pure function of its number, so a run that is killed samples again what it would have sampled. Before training on
rollout k, the engines have finished all rollouts up to k + S - 1; they get the current weights, and begin rollout
k + S while rollout k is trained on.

The weights that sample ahead are gone once training has changed them. So a checkpoint is made only when everything that
they sample is in the journals (:meth:`settle`).

With rollout.dynamic_sampling, data.no_resampling_pass_rate or data.curriculum_floor, the prompts with which a rollout
begins are known once the one before it has its groups. Its first round is sampled while training goes on, and further
rounds, if it needs any, before engines get other weights. Engines get other weights only when they have sampled all
that they were asked for, so a rollout waits for rewards alone.

With rollout.in_flight_updates they do not wait: they get the current weights in the middle of the rollout that they
sample, as soon as training has made them. Which weights sampled a token is then the clock's choice, and the journals
tell it. What is missing of a rollout is sampled by whatever weights are there, so a checkpoint waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gspo_hpc.data.prompts import Position
from gspo_hpc.rollout.drawing import Drawing, decides_next
from gspo_hpc.rollout.timing import added_up
from gspo_hpc.rollout.worker import Interrupted
from gspo_hpc.runs import journal
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.checkpoint_state import SampledBy
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.progress import Rollout
from gspo_hpc.training.recipe import PromptData, Recipe
from gspo_hpc.training.sampling import carrying
from gspo_hpc.training.sampling.base import Sampler
from gspo_hpc.training.serving.engines import Call, RemoteEngines
from gspo_hpc.training.serving.weights import RemoteWeights
from gspo_hpc.training.telemetry.step_clock import StepClock


@dataclass
class _Begun:
    """A rollout that engines sample, or have sampled, and that is not used yet."""

    number: int
    start: Position  # of its first prompt
    weights: SampledBy
    drawing: Drawing  # with the groups that were read
    call: Call | None = None  # the newest round that engines were asked for, until its groups are read
    engines: list[Mapping[str, float]] = field(default_factory=list)  # metrics of the engines, by round
    unfinished: dict[str, int] = field(default_factory=dict)  # files of groups that later rollouts go on with
    end: Position | None = None  # once it is known


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
        self._in_flight = recipe.config.rollout.in_flight_updates
        self._newest = SampledBy("", 0)  # the weights that engines have

    def sample(self, cursor: Cursor, start: Position) -> Rollout:
        """Return the rollout that begins at `cursor`, and have the engines begin the next ones. Collective."""
        self._require_enough(cursor, start)
        if self._in_flight:
            self._give_weights(cursor)
        for begun in self._begun.values():
            if begun.number == cursor.rollout or self._decided:
                self._finish(begun)
        self._give_weights(cursor)
        staleness = self._recipe.config.rollout.max_staleness
        last = min(cursor.rollout + staleness, self._recipe.num_rollouts - 1)
        begin = start
        for number in range(cursor.rollout, last + 1):
            if not self._has_enough(begin):
                break  # the run ends once those before it are trained on
            if number not in self._begun:
                has_its_weights = max(0, number - staleness) >= cursor.rollout
                known = None if has_its_weights else self._sampled_by.get(number)
                self._begun[number] = self._begin(number, begin, known)
            if number < last:
                begin = self._end(self._begun[number])
        used = self._begun[cursor.rollout]
        self._finish(used)
        del self._begun[cursor.rollout]
        # A stop in its first update makes a checkpoint in which this rollout is still to be used.
        later = {number: one for number, one in self._sampled_by.items() if number > cursor.rollout}
        self._sampled_by = later | {cursor.rollout: used.weights}
        self._remark(cursor, used.drawing.state)
        after = self._end(used)
        metrics = added_up(used.engines) | used.drawing.metrics() | self._data_metrics(cursor, start, after)
        chosen, version = used.drawing.chosen(), used.weights.version
        if self._in_flight:
            version = carrying.newest_weights(chosen, self._ranks.exchange, version)
        return self._rollout(cursor, chosen, after, metrics, version)

    def _give_weights(self, cursor: Cursor) -> None:
        synced = self._remote_weights.sync(cursor.step, in_flight=self._in_flight)
        self._newest = SampledBy(synced.fingerprint, cursor.step)

    @property
    def _decided(self) -> bool:
        return decides_next(self._recipe.config)

    def is_settled(self, cursor: Cursor) -> bool:
        """Wait for all that older weights sample; return False if it was stopped. Collective.

        Between the updates of a rollout that is everything: a resumed run begins nothing before the next rollout, and
        by then its weights have changed.
        """
        if self._in_flight:
            return True
        begins = cursor.update == 0
        older = [
            one
            for one in self._begun.values()
            if not (begins and self._remote_weights.has_weights(one.weights.fingerprint))
        ]
        if self._decided:
            try:
                for one in older:
                    self._finish(one)
            except Interrupted:
                return False
        return not any(one.call is not None and self._engines.wait(one.call).stopped for one in older)

    def ahead(self) -> dict[int, SampledBy]:
        """See Sampler."""
        return self._sampled_by | {number: begun.weights for number, begun in self._begun.items()}

    def _begin(self, number: int, start: Position, known: SampledBy | None) -> _Begun:
        """Have the engines sample what is missing of a rollout with the newest weights, which they have.

        `known` are older weights that have sampled it; RuntimeError if they left it unfinished.
        """
        weights = known or self._newest
        folder = self._folder(number)
        whole = journal.scored if self._recipe.config.reward.scored else journal.journals
        own, done = self._engines.ranks.exchange.partition_files(
            lambda: [path.name for path in whole(folder)],
            lambda name: journal.read_journal(folder / name, weights.fingerprint),
        )
        begun = _Begun(number, start, weights, self._drawing(number, start))
        begun.drawing.add(carrying.read_finished(start, self._rollouts, self._engines.ranks.exchange) | own, done)
        state = begun.drawing.state
        if state.todo and weights.fingerprint != self._newest.fingerprint and not self._in_flight:
            raise RuntimeError(
                f"{folder}: {len(state.todo)} of {state.drawn} groups are missing, and the weights that sampled the "
                "others are gone. Restore the files of this folder, or resume from a checkpoint whose journals are "
                "whole"
            )
        self._ask(begun)
        return begun

    def _ask(self, begun: _Begun) -> None:
        """Have the engines, which have its weights, sample the next round of a rollout, if it has any."""
        if begun.drawing.state.todo:
            weights = self._newest if self._in_flight else begun.weights
            request = self._request(begun.number, begun.start, begun.drawing, weights)
            begun.call = self._engines.start(request, self._folder(begun.number), begun.weights.fingerprint)

    def _finish(self, begun: _Begun) -> None:
        """Wait until a rollout has all its groups, and read this rank's. Raises Interrupted if it was stopped."""
        while (call := begun.call) is not None:
            completions = len(call.request.slots) * call.request.samples
            with self._clock.phase("generate"), self._observers.rollout(begun.number, completions) as progress:
                answer = self._engines.wait(call, progress)
            answer.require_whole()
            seconds = self._clock.seconds
            seconds["reward_wait"] = seconds.get("reward_wait", 0.0) + answer.waited
            begun.drawing.add(self._engines.read(call, answer), call.request.slots)
            begun.engines.append(answer.engines)
            begun.unfinished |= answer.unfinished
            begun.call = None
            self._ask(begun)

    def _end(self, begun: _Begun) -> Position:
        """Return where the prompts of the next rollout begin."""
        if not self._decided:
            return self._data.take(begun.start, self._limits.wanted)[1]
        if begun.end is None:
            self._finish(begun)
            begun.end = self._next(begun.number, begun.start, begun.drawing, begun.weights, begun.unfinished)
        return begun.end
