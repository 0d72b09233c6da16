"""Rollouts from engines on the GPUs that train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gspo_hpc.data.prompts import Position
from gspo_hpc.data.records import Group
from gspo_hpc.rollout.generation import Request
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

    def sample(self, cursor: Cursor, start: Position) -> Rollout:
        """Return the rollout that begins at `cursor`, of the prompts from `start`. Collective.

        Groups that an earlier attempt finished with the same weights come from its journal.
        """
        self._require_enough(cursor, start)
        fingerprint = self._weights.sync().fingerprint
        folder = self._folder(cursor.rollout)
        exchange = self._worker.ranks.exchange
        finished, done = exchange.partition_files(
            lambda: [path.name for path in journal.journals(folder)],
            lambda name: journal.read_journal(folder / name, fingerprint),
        )
        weights = SampledBy(fingerprint, cursor.step)
        drawing = self._drawing(cursor.rollout, start)
        drawing.add(carrying.read_finished(start, self._rollouts, exchange) | finished, done)
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

    def _generate(self, request: Request, folder: Path, fingerprint: str) -> Generated:
        """Generate what is requested; this rank's finished groups go into its journal."""
        writer = None
        if self._worker.engine is not None and request.slots:
            rank = self._worker.ranks.rank
            writer = journal.Journal(folder, rank, fingerprint=fingerprint, rollout=request.rollout)
        completions = len(request.slots) * request.samples
        with self._clock.phase("generate"), self._observers.rollout(request.rollout, completions) as progress:
            try:
                generated = self._worker.generate(request, writer, progress)
            finally:
                if writer is not None:
                    writer.close()
        seconds = self._clock.seconds
        seconds["reward_wait"] = seconds.get("reward_wait", 0.0) + generated.seconds_waiting_for_rewards
        return generated
