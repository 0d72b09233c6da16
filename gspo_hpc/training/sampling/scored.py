"""Completions that functions have graded, and then reward models: what generates is put to sleep for these."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Group
from gspo_hpc.evaluation.evaluate import CompletionSource
from gspo_hpc.exchange.peers import engine_place
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.generation import ProgressCallback, Request, ignore_progress
from gspo_hpc.rollout.scoring import Keep, keep_nowhere
from gspo_hpc.rollout.worker import Generated, Interrupted, RolloutWorker
from gspo_hpc.runs.journal import Journal
from gspo_hpc.training.telemetry.step_clock import StepClock


class SleepingEngines(Protocol):
    """The policy's engines, which leave the GPUs' memory to those of reward models."""

    def sync(self) -> object:
        """Wake the engines, with the current weights. Collective."""

    def sleep(self) -> None:
        """Put all engines to sleep, and return when all have left the memory. Collective."""


class ScoredCompletions:
    """Completions with their whole rewards, whether or not there are reward models.

    `clock` gets the seconds of generation and of scores; without one, they are part of what calls this.
    """

    def __init__(self, worker: RolloutWorker, engines: SleepingEngines, clock: StepClock | None = None) -> None:
        self._worker, self._engines, self._clock = worker, engines, clock

    @property
    def ranks(self) -> Ranks:
        """The place of this rank."""
        return self._worker.ranks

    def generate(
        self,
        request: Request,
        journal: Journal | None = None,
        progress: ProgressCallback = ignore_progress,
        keep: Keep = keep_nowhere,
    ) -> Generated:
        """Sample and grade completions of every prompt, as :meth:`RolloutWorker.generate` does. Collective.

        `keep` is called with each group once reward models have scored it. Where there are any, engines sleep then.
        """
        if self._worker.models is not None:
            self._engines.sync()  # they sleep if something was scored since
        with self._phase("generate"):
            generated = self._worker.generate(request, journal, progress)
        if self._worker.models is None:
            return generated
        return replace(generated, own=self.score(generated.own, keep))

    def generate_into(self, request: Request, journal: Journal) -> Generated:
        """Sample and grade completions, and write each group to `journal` once it has its whole rewards. Collective."""
        if self._worker.models is None:
            return self.generate(request, journal)
        return self.generate(request, keep=lambda group: journal.append([group]))

    def score(self, groups: Mapping[int, Group], keep: Keep = keep_nowhere) -> dict[int, Group]:
        """Return groups that this rank holds with the scores of reward models. Collective.

        Raises Interrupted, on all ranks, if a stop is requested meanwhile.
        """
        models = self._worker.models
        assert models is not None
        self._engines.sleep()
        with self._phase("reward_model"):
            scored, whole = models.score(groups, keep)
        if not whole:
            raise Interrupted
        return scored

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._clock is None else self._clock.phase(name)


def with_scores_of_models(source: CompletionSource, engines: SleepingEngines) -> CompletionSource:
    """Return a source of completions as evaluations take them: where this rank's engines sample, with all rewards."""
    return ScoredCompletions(source, engines) if isinstance(source, RolloutWorker) else source


def read_by_owners(names: Sequence[str], config: Config) -> list[str]:
    """Return names of files with empty ones between them, so that ranks which own engines read the files in turn.

    The ranks are those that generate. What a file has no scores of is scored by the rank that read it.
    """
    placed, per_node = list[str](), config.gpus_per_engine_node
    if config.rollout.mode == "server" and not config.cluster.generation_nodes:
        per_node -= config.training_gpus_per_node
    for name in names:
        while engine_place(config, len(placed) % per_node) != 0:
            placed.append("")
        placed.append(name)
    return placed
