"""The phases of a step around its update: sampling a rollout, its log-prob passes, and evaluations."""

from __future__ import annotations

import abc
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol

from gspo_hpc.config.schema import Config
from gspo_hpc.data.prompts import Position
from gspo_hpc.data.records import Group, Prompt
from gspo_hpc.data.retired import pass_rates
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.data.table import UNGRADED, ShardedGroups
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.evaluation import evaluate
from gspo_hpc.evaluation.by_source import source_epochs
from gspo_hpc.evaluation.evaluate import CompletionSource, are_right
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks, broadcast_bytes
from gspo_hpc.rewards.registry import part_names, source_weights
from gspo_hpc.rollout.drawing import Drawing, Judged, pass_rates_decide
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.resampling import DrawLimits, Draws, Starved
from gspo_hpc.rollout.timing import added_up
from gspo_hpc.rollout.worker import Generated, Interrupted, RolloutWorker
from gspo_hpc.runs import journal
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training import update
from gspo_hpc.training.checkpoint_state import SampledBy
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.progress import Rollout
from gspo_hpc.training.recipe import PromptData, Recipe
from gspo_hpc.training.reference import AnyReference, Teacher
from gspo_hpc.training.sync import EngineWeights, Synced
from gspo_hpc.training.telemetry.step_clock import StepClock


class Sampler(abc.ABC):
    """Generation of rollouts: prompts, weights for the engines, completions, rewards and advantages."""

    def __init__(
        self,
        recipe: Recipe,
        data: PromptData,
        ranks: Ranks,
        rollouts: Path,  # folder of the journals
        observers: StepObserver,
        clock: StepClock,
    ) -> None:
        self._recipe, self._data, self._ranks = recipe, data, ranks
        self._rollouts, self._observers, self._clock = rollouts, observers, clock
        self._limits = DrawLimits.of(recipe.config.rollout, recipe.num_rollout_prompts)

    @abc.abstractmethod
    def sample(self, cursor: Cursor, start: Position) -> Rollout:
        """Return the rollout that begins at `cursor`, of the prompts from `start`. Collective."""

    def settle(self, cursor: Cursor) -> None:
        """Wait until a checkpoint at `cursor` needs no weights that are gone; raise Interrupted if that was stopped.

        Collective.
        """
        if not self.is_settled(cursor):
            raise Interrupted

    def is_settled(self, cursor: Cursor) -> bool:
        """Wait as :meth:`settle` does; return False if generation was stopped. By default there is none. Collective."""
        return True

    def ahead(self) -> dict[int, SampledBy]:
        """Return the weights of the rollout in use and of later ones, by number, if engines are ahead of training."""
        return {}

    def _rollout(
        self, cursor: Cursor, own: Iterable[Group], after: Position, engines: Mapping[str, float], weights_version: int
    ) -> Rollout:
        """Return the rollout that begins at `cursor`, with rewards and advantages.

        This rank holds its groups `own`. Collective.
        """
        exchange, config = self._ranks.exchange, self._recipe.config
        groups = update.with_batch_advantages(self._judged(own), self._recipe.objective.advantage)
        shown = exchange.gather_samples(groups, config.tracking.samples)
        self._observers.samples(cursor.step, "train", shown)
        if cursor.rollout == 0 and bool(groups.table.flagged(UNGRADED).all()):
            self._refuse(self._folder(cursor.rollout), len(groups.table), shown.failures)
        if config.rollout.dynamic_sampling and not any(update.signals(groups.table, config).values()):
            raise Starved(_starved(cursor, self._limits))
        return Rollout(groups, after, engines, weights_version)

    def _drawing(self) -> Drawing:
        """Return a rollout of which nothing is drawn yet."""
        config = self._recipe.config

        def judge(own: Iterable[Group]) -> Judged:
            table = self._judged(own).table
            rates = pass_rates(table, are_right(table, config)) if pass_rates_decide(config) else {}
            return Judged(table, update.signals(table, config), rates)

        return Drawing(self._limits, config, judge)

    def _has_enough(self, start: Position) -> bool:
        """Return False if too many prompts are retired for a rollout that begins at `start`."""
        return self._data.left(start.retired) >= self._limits.wanted

    def _require_enough(self, cursor: Cursor, start: Position) -> None:
        """Raise Starved if too many prompts are retired for the rollout that begins at `cursor`."""
        if not self._has_enough(start):
            raise Starved(_all_retired(cursor, start, self._data.left(start.retired), self._limits))

    def _next(self, rollout: int, start: Position, drawing: Drawing) -> Position:
        """Return where the prompts of the rollout after this one begin, once it has all its groups.

        Prompts that it retires are not among them, and its pass rates weigh them.
        """
        prompts, after = self._data.stream.take(start, drawing.state.used)
        return replace(
            after,
            retired=after.retired.with_more(drawing.retirements(prompts, rollout)),
            rates=after.rates.with_more(drawing.pass_rates(prompts)),
        )

    def _data_metrics(self, cursor: Cursor, start: Position, after: Position) -> dict[str, float]:
        """Return what the rollout at `cursor` changed of the data: prompts that are retired, epochs of sources."""
        rates = [*after.rates.rates.values()]
        known = {"data/known_pass_rates": len(rates), "data/pass_rate": sum(rates) / len(rates)} if rates else {}
        return {**self._record_retired(cursor, start, after), **known, **source_epochs(self._data.stream, after)}

    def _record_retired(self, cursor: Cursor, start: Position, after: Position) -> dict[str, int]:
        """Record the prompts that the rollout at `cursor` retired, tell of them at the end of an epoch, count them."""
        if self._recipe.config.data.no_resampling_pass_rate is None:
            return {}
        more = after.retired.prompts[len(start.retired) :]
        if more and self._data.train:  # on rank 0
            rows = [(one, self._data.train[one.prompt].index) for one in more]
            self._observers.retired(cursor.step + 1, start.epoch, rows)
        count = len(after.retired)
        if after.epoch > start.epoch:
            self._observers.note(
                f"epoch {after.epoch} begins: {count:,} of {self._data.stream.num_prompts:,} prompts are retired "
                f"(data.no_resampling_pass_rate), {self._data.left(after.retired):,} are left"
            )
        return {"data/retired": count}

    def _remark(self, cursor: Cursor, state: Draws) -> None:
        """Say so where groups without signal fill a rollout up."""
        if state.filled and self._recipe.config.rollout.dynamic_sampling:
            self._observers.note(
                f"rollout {cursor.rollout}: of {state.drawn:,} prompts, the most that it may draw "
                f"(rollout.max_num_gen_batches), {self._limits.wanted - state.filled:,} groups have signal; "
                f"{state.filled:,} without fill it up"
            )

    def _judged(self, own: Iterable[Group]) -> ShardedGroups:
        """Return the groups of all ranks, of which this one holds `own`, with advantages within groups. Collective."""
        config, terms = self._recipe.config, self._recipe.objective
        graded = update.without_truncated([*own], config)
        names = part_names(config.reward)
        made = list[Group]()
        for source in (None, *config.data.sources):
            weights = {names[term]: weight for term, weight in source_weights(config.reward, source).items()}
            own = [group for group in graded if find_source(group.prompt.fields, config.data) is source]
            made += update.with_advantages(own, terms.normalize_advantage, terms.advantage, weights)
        return self._ranks.exchange.gather_table(sorted(made, key=lambda group: group.slot))

    def _request(self, slots: Sequence[int], prompts: Mapping[int, Prompt], rollout: int) -> Request:
        """Return the request for completions of some slots of a rollout, to train on."""
        samples = self._recipe.config.batch.num_generations
        assert samples is not None
        return Request(slots, prompts, samples, training_sampling(self._recipe.config), rollout)

    def _folder(self, rollout: int) -> Path:
        """Return the folder of a rollout's journals."""
        return self._rollouts / f"{rollout:06d}"

    def _refuse(self, folder: Path, completions: int, failures: Counter[str]) -> NoReturn:
        """Raise ValueError on every rank: nothing can be learned from a first rollout without a reward.

        Its journals are deleted, so that the next start grades again: a service may have been away. Collective.
        """
        ranks, text = self._ranks, ""
        if ranks.rank == 0:
            for path in folder.parent.iterdir():  # and those of rollouts that are sampled ahead
                shutil.rmtree(path, ignore_errors=True)
            text = failures.most_common(1)[0][0]
        text = broadcast_bytes(text.encode(), ranks.device).decode()
        raise ValueError(f"reward.functions: no completion of the first rollout ({completions:,}) got a reward: {text}")


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
        drawing = self._drawing()
        drawing.add(finished, done)
        engines = list[Mapping[str, float]]()
        while todo := drawing.state.todo:
            prompts, _ = self._data.take(start, drawing.state.drawn)
            fresh = self._generate(self._request(todo, prompts, cursor.rollout), folder, fingerprint)
            drawing.add(fresh.own, todo)
            engines.append(fresh.engines)
        self._weights.sleep()
        self._remark(cursor, drawing.state)
        after = self._next(cursor.rollout, start, drawing)
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


def _starved(cursor: Cursor, limits: DrawLimits) -> str:
    """Return why a run cannot go on, and what may help."""
    return (
        f"rollout.dynamic_sampling: rollout {cursor.rollout}, after step {cursor.step}, drew {limits.most:,} prompts "
        f"({limits.most // limits.wanted} x {limits.wanted}, rollout.max_num_gen_batches), and in none of their groups "
        "do rewards differ. Either all prompts are solved or none can be: see the samples in gspo-hpc report, give "
        "other data or rewards, or set rollout.dynamic_sampling=false"
    )


def _all_retired(cursor: Cursor, start: Position, left: int, limits: DrawLimits) -> str:
    """Return why a run ends before run.max_steps: its prompts are solved."""
    return (
        f"data.no_resampling_pass_rate: after step {cursor.step}, {len(start.retired):,} prompts are retired, and the "
        f"{left:,} that are left are fewer than the {limits.wanted:,} of a rollout: what this data can teach is "
        "learnt. Go on from the last checkpoint with harder prompts, or in a new run with a higher pass rate"
    )


def training_sampling(config: Config) -> Sampling:
    """Return how completions to train on are sampled."""
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_response_length,
    )


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
        if config.rollout.max_staleness or config.algorithm.correction == "bypass":
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
        self._config, self._data, self._worker, self._weights = config, data, worker, weights
        self._observers, self._clock = observers, clock

    @property
    def has_prompts(self) -> bool:
        """True if there is anything to evaluate on."""
        return self._data.unseen_count > 0

    def run(self, step: int, phase: str) -> dict[str, float]:
        """Return the scores of the current weights; `phase` is "before", "during" or "after". Collective."""
        self._weights.sync()
        with self._clock.phase("eval"):
            found = evaluate.run(self._worker, self._data.unseen, self._data.unseen_count, self._config)
        exchange = self._worker.ranks.exchange
        self._observers.samples(step, phase, exchange.gather_samples(found.greedy, self._config.tracking.samples))
        rows = evaluate.rows(exchange, found, self._config, step)
        if rows:  # on rank 0
            self._observers.evaluated(step, rows)
        accuracy = found.scores["eval/accuracy"]
        self._observers.note(f"step {step}: accuracy {accuracy:.3f} on {self._data.unseen_count} unseen prompts")
        return found.scores
