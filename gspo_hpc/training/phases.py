"""The phases of a step beside its update and the sampling of a rollout: log-prob passes and evaluations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from gspo_hpc.config.derived import old_logprobs_are_the_engines
from gspo_hpc.config.schema import Config
from gspo_hpc.data.table import ShardedGroups
from gspo_hpc.evaluation import evaluate, stored
from gspo_hpc.evaluation.evaluate import CompletionSource
from gspo_hpc.policy.policy import Policy
from gspo_hpc.runs import reader
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training import update
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.recipe import PromptData, Recipe
from gspo_hpc.training.reference import AnyReference, Teacher
from gspo_hpc.training.sampling.scored import with_scores_of_models
from gspo_hpc.training.sync import Synced
from gspo_hpc.training.telemetry.step_clock import StepClock


def refreshes_reference(interval: int, step: int, updates_per_rollout: int) -> bool:
    """Return whether the reference is refreshed after `step` steps, the last of which ended a rollout.

    It is where the rollout has reached a multiple of `interval` steps; 0 stands for never.
    """
    return interval > 0 and step // interval > (step - updates_per_rollout) // interval


class LogprobPasses:
    """The log-prob passes of a rollout, only those that are needed."""

    def __init__(self, recipe: Recipe, policy: Policy, reference: AnyReference | None, clock: StepClock) -> None:
        self._recipe, self._policy, self._reference, self._clock = recipe, policy, reference, clock

    def add(self, groups: ShardedGroups) -> ShardedGroups:
        """Return the groups with the old log-probs and those of the reference. Collective."""
        config, monitor = self._recipe.config, self._clock.monitor
        if isinstance(self._reference, Teacher):  # first, because the trainer is still away
            groups = self._with_reference(groups)
        # Where other weights than these sampled, only the engine knows their log-probs.
        if old_logprobs_are_the_engines(config):
            groups = update.with_engine_logprobs(groups)
        if self._recipe.passes.old_logprobs:
            # The first update of a rollout is made by the policy that sampled it: its ratio is 1 without a pass.
            slots = groups.table.slots
            first = update.minibatch(groups, config, 0).table.slots if config.batch.num_iterations == 1 else []
            # Where the engine's are the old ones, the pass is for the entropies of tokens alone.
            rest = groups.at(slots[len(first) :] if config.algorithm.correction != "bypass" else [])
            with self._clock.phase("old_logprobs"):
                groups = update.with_old_logprobs(self._policy, groups, rest, config, monitor=monitor)
        if self._reference is not None and not isinstance(self._reference, Teacher):
            groups = self._with_reference(groups)
        return groups

    def _with_reference(self, groups: ShardedGroups) -> ShardedGroups:
        """Return the groups with the log-probs of the reference, and with advantages that the KL term changes."""
        config, terms, policy = self._recipe.config, self._recipe.objective, self._policy
        assert self._reference is not None
        with self._clock.phase("reference"):
            groups = self._reference.with_logprobs(policy, groups, config, monitor=self._clock.monitor)
        if terms.kl_placement == "reward":
            return update.with_penalised_advantages(groups, terms, policy.ranks.exchange)
        return groups

    def refresh(self, cursor: Cursor) -> None:
        """Refresh the reference if that is due after the step that led to `cursor`: a function of the step alone.

        So a checkpoint of this position has the reference that its next rollout is compared with.
        """
        interval, updates = self._recipe.config.algorithm.reference_interval, self._recipe.updates_per_rollout
        reference = self._reference
        if reference is None or isinstance(reference, Teacher) or cursor.update:
            return
        if refreshes_reference(interval, cursor.step, updates):
            with self._clock.phase("reference"):
                reference.refresh(self._policy, self._recipe.config.algorithm.reference_mixup)


class WeightUser(Protocol):
    """Engines, wherever they are, that get the policy's weights."""

    def sync(self) -> Synced:
        """Give the engines the current weights unless they have them. Collective."""

    def sleep(self) -> None:
        """Put all engines to sleep, if they share GPUs with others. Collective."""


class Evaluator:
    """Evaluations on unseen prompts."""

    def __init__(
        self,
        config: Config,
        data: PromptData,
        worker: CompletionSource,
        weights: WeightUser,
        observers: StepObserver,
        clock: StepClock,
    ) -> None:
        self._config, self._data, self._weights = config, data, weights
        self._completions = with_scores_of_models(worker, weights)
        self._observers, self._clock = observers, clock

    @property
    def has_prompts(self) -> bool:
        """True if there is anything to evaluate on."""
        return self._data.unseen_count > 0

    def run(self, step: int, phase: str) -> dict[str, Any]:
        """Return the scores of the current weights; `phase` is "before", "during" or "after". Collective.

        Rank 0 also has `eval/failure`, if the reward function failed for an answer.
        """
        self._weights.sync()
        with self._clock.phase("eval"):
            found = evaluate.run(self._completions, self._data.unseen, self._data.unseen_sizes, self._config)
        exchange = self._completions.ranks.exchange
        self._observers.samples(step, phase, exchange.gather_samples(found.greedy, self._config.tracking.samples))
        rows = evaluate.rows(exchange, found, self._config, step)
        scores: dict[str, Any] = {**found.scores}
        if rows:  # on rank 0
            self._observers.evaluated(step, rows)
            if failure := stored.most_common_failure(rows):
                scores["eval/failure"] = failure
        self._observers.note(f"step {step}: {told(scores, self._data.unseen_count)}")
        return scores


def told(scores: Mapping[str, Any], prompts: int) -> str:
    """Return the result of an evaluation in a line; one of which no answer was graded has no accuracy."""
    if why := reader.not_graded(scores):
        return f"evaluation on {prompts} unseen prompts {why}"
    line = f"accuracy {scores['eval/accuracy']:.3f} on {prompts} unseen prompts"
    sets = {name.split("/")[1]: mean for name, mean in scores.items() if re.fullmatch("eval/[^/]+/accuracy", name)}
    if sets:
        each = (f"{name} {'not graded' if mean is None else f'{mean:.3f}'}" for name, mean in sets.items())
        line += f" ({', '.join(each)})"
    if part := scores.get("eval/ungraded"):
        line += (
            f", of which {part:.1%} were {reader.told_not_graded(scores.get('eval/failure', ''))}; they count as wrong"
        )
    return line
