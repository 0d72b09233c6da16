"""Rollouts from engines on the GPUs that train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from gspo_hpc.data.prompts import Position
from gspo_hpc.data.records import Group
from gspo_hpc.policy.process_groups import any_rank
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.scoring import Keep, keep_nowhere
from gspo_hpc.rollout.timing import added_up
from gspo_hpc.rollout.worker import Generated, RolloutWorker
from gspo_hpc.runs import journal
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.checkpoint_state import SampledBy
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.progress import Rollout
from gspo_hpc.training.recipe import PromptData, Recipe
from gspo_hpc.training.sampling import carrying
from gspo_hpc.training.sampling.base import Sampler
from gspo_hpc.training.sampling.scored import ScoredCompletions, read_by_owners
from gspo_hpc.training.sync import EngineWeights
from gspo_hpc.training.telemetry.step_clock import StepClock


class ColocatedSampler(Sampler):
    """The generation of rollouts by engines on the GPUs that train."""

    def __init__(
        self,
        recipe: Recipe,
        data: PromptData,
        worker: RolloutWorker,
        weights: EngineWeights,
        rollouts: Path,  # folder of the journals
        observers: StepObserver,
        clock: StepClock,
    ) -> None:
        super().__init__(recipe, data, worker.ranks, rollouts, observers, clock)
        self._worker, self._weights = worker, weights
        self._completions = ScoredCompletions(worker, weights, clock)

    def sample(self, cursor: Cursor, start: Position) -> Rollout:
        """Return the rollout that begins at `cursor`, of the prompts from `start`. Collective.

        Groups that an earlier attempt finished with the same weights come from its journal.
        """
        self._require_enough(cursor, start)
        fingerprint = self._weights.sync().fingerprint
        folder = self._folder(cursor.rollout)
        finished, done = self._finished(cursor.rollout, folder, fingerprint)
        weights = SampledBy(fingerprint, cursor.step)
        drawing = self._drawing(cursor.rollout, start)
        drawing.add(carrying.read_finished(start, self._rollouts, self._worker.ranks.exchange) | finished, done)
        engines, unfinished = list[Mapping[str, float]](), dict[int, Group]()
        while todo := drawing.state.todo:
            fresh = self._generate(self._request(cursor.rollout, start, drawing, weights), folder, fingerprint)
            drawing.add(fresh.own, todo)
            engines.append(fresh.engines)
            unfinished |= fresh.unfinished
        self._weights.sleep()
        self._remark(cursor, drawing.state)
        rank = self._worker.ranks.rank
        written = carrying.write(folder, rank, unfinished.values(), fingerprint, cursor.rollout, "unfinished")
        after = self._next(cursor.rollout, start, drawing, weights, written)
        metrics = added_up(engines) | drawing.metrics() | self._data_metrics(cursor, start, after)
        return self._rollout(cursor, drawing.chosen(), after, metrics, cursor.step)

    def _finished(self, rollout: int, folder: Path, fingerprint: str) -> tuple[dict[int, Group], set[int]]:
        """Return this rank's share of the groups that an earlier attempt finished, by slot, and the slots of all.

        Those that reward models have not scored yet are scored now. Collective.
        """
        with_scores = set[int]()  # slots of the files that this rank reads

        def read(name: str) -> dict[int, Group]:
            groups = journal.read_journal(folder / name, fingerprint) if name else {}
            with_scores.update(groups if name.endswith(".scored") else ())
            return groups

        ranks = self._worker.ranks

        def listed() -> list[str]:
            names = [path.name for path in (*journal.scored(folder), *journal.journals(folder))]
            return names if self._worker.models is None else read_by_owners(names, self._recipe.config)

        own, slots = ranks.exchange.partition_files(listed, read)
        # A slot is taken from the first file that has it, so from one with scores wherever there is any.
        rest = {slot: group for slot, group in own.items() if slot not in with_scores}
        if self._worker.models is not None and any_rank(bool(rest), ranks.device):
            with self._keeping(rollout, folder, fingerprint) as keep:
                own |= self._completions.score(rest, keep)
        return own, slots

    @contextlib.contextmanager
    def _keeping(self, rollout: int, folder: Path, fingerprint: str) -> Iterator[Keep]:
        """Give the function that writes a group with its scores to disk."""
        if self._worker.models is None or self._worker.engine is None:
            yield keep_nowhere
            return
        rank = self._worker.ranks.rank
        writer = journal.Journal(folder, rank, fingerprint=fingerprint, rollout=rollout, kind="scored")
        try:
            yield lambda group: writer.append([group])
        finally:
            writer.close()

    def _generate(self, request: Request, folder: Path, fingerprint: str) -> Generated:
        """Generate what is requested; this rank's finished groups go into its journal."""
        writer = None
        if self._worker.engine is not None and request.slots:
            rank = self._worker.ranks.rank
            writer = journal.Journal(folder, rank, fingerprint=fingerprint, rollout=request.rollout)
        completions = len(request.slots) * request.samples
        keeping = self._keeping(request.rollout, folder, fingerprint)
        with keeping as keep, self._observers.rollout(request.rollout, completions) as progress:
            try:
                generated = self._completions.generate(request, writer, progress, keep)
            finally:
                if writer is not None:
                    writer.close()
        seconds = self._clock.seconds
        seconds["reward_wait"] = seconds.get("reward_wait", 0.0) + generated.seconds_waiting_for_rewards
        return generated
