"""A rollout as the loop asks for it: what engines in either mode have in common."""

from __future__ import annotations

import abc
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from gspo_hpc.config.schema import Config
from gspo_hpc.data.carried import handed_on
from gspo_hpc.data.prompts import Position
from gspo_hpc.data.records import Group
from gspo_hpc.data.retired import pass_rates
from gspo_hpc.data.table import UNGRADED, ShardedGroups
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.evaluation.by_source import source_epochs
from gspo_hpc.evaluation.evaluate import are_right
from gspo_hpc.policy.process_groups import Ranks, broadcast_bytes
from gspo_hpc.rollout.drawing import Drawing, Judged, pass_rates_decide
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.resampling import DrawLimits, Draws, Starved
from gspo_hpc.rollout.worker import Interrupted
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training import update
from gspo_hpc.training.checkpoint_state import SampledBy
from gspo_hpc.training.observers.base import StepObserver
from gspo_hpc.training.progress import Rollout
from gspo_hpc.training.recipe import PromptData, Recipe
from gspo_hpc.training.sampling import carrying
from gspo_hpc.training.sampling.judged import judged_groups
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
        own = list(own)
        if not self._recipe.samples_at_once:
            engines = {**engines, **carrying.metrics(own, exchange, weights_version)}
        groups = update.with_batch_advantages(self._judged(own), self._recipe.objective.advantage)
        shown = exchange.gather_samples(groups, config.tracking.samples)
        self._observers.samples(cursor.step, "train", shown)
        if cursor.rollout == 0 and bool(groups.table.flagged(UNGRADED).all()):
            self._refuse(self._folder(cursor.rollout), len(groups.table), shown.failures)
        if config.rollout.dynamic_sampling and not any(update.signals(groups.table, config).values()):
            raise Starved(_starved(cursor, self._limits))
        return Rollout(groups, after, engines, weights_version)

    def _drawing(self, rollout: int, start: Position) -> Drawing:
        """Return a rollout, which begins at `start`, of which nothing is drawn yet."""
        config = self._recipe.config
        needed = carrying.required(start, rollout, config.rollout.max_continuations, self._limits.wanted)

        def judge(own: Iterable[Group]) -> Judged:
            table = self._judged(own).table
            rates = pass_rates(table, are_right(table, config)) if pass_rates_decide(config) else {}
            return Judged(table, update.signals(table, config), rates)

        return Drawing(self._limits.with_carried(len(start.carried)), config, judge, needed)

    def _has_enough(self, start: Position) -> bool:
        """Return False if too many prompts are retired for a rollout that begins at `start`."""
        return self._data.left(start.retired) >= self._limits.wanted

    def _require_enough(self, cursor: Cursor, start: Position) -> None:
        """Raise Starved if too many prompts are retired for the rollout that begins at `cursor`."""
        if not self._has_enough(start):
            raise Starved(_all_retired(cursor, start, self._data.left(start.retired), self._limits))

    def _next(
        self, rollout: int, start: Position, drawing: Drawing, weights: SampledBy, written: Mapping[str, int]
    ) -> Position:
        """Return where the prompts of the rollout after this one begin, once it has all its groups.

        Prompts that it retires are not among them, and its pass rates weigh them. Groups that it does not use are
        carried to it, where the config says so. `weights` sampled it, and this rank has just `written` files, by name
        and size. Collective where groups are carried.
        """
        prompts, after = self._data.places(start, drawing.state.used)
        after = replace(
            after,
            retired=after.retired.with_more(drawing.retirements(prompts, rollout)),
            rates=after.rates.with_more(drawing.pass_rates(prompts)),
        )
        if self._recipe.config.rollout.unfinished != "continue":
            return after
        ranks, folder, fingerprint = self._ranks, self._folder(rollout), weights.fingerprint
        spare = carrying.write(folder, ranks.rank, drawing.spare(), fingerprint, rollout, "spare")
        places = carrying.places(folder, rollout, fingerprint, ranks.exchange, {**written, **spare})
        groups = carrying.by_slot(start, prompts, rollout)
        over = frozenset(slot for slot in groups if drawing.is_over(slot))
        return replace(after, carried=handed_on(groups, places, over))

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
        made = judged_groups(own, self._recipe.config, self._recipe.objective)
        return self._ranks.exchange.gather_table(made)

    def _request(self, rollout: int, start: Position, drawing: Drawing, weights: SampledBy) -> Request:
        """Return the request for the completions that a rollout still needs, to train on."""
        config, state = self._recipe.config, drawing.state
        samples = config.batch.num_generations
        assert samples is not None
        prompts, _ = self._data.take(start, state.drawn)
        return Request(
            slots=state.todo,
            prompts=prompts,
            samples=samples,
            sampling=training_sampling(config),
            rollout=rollout,
            enough=drawing.enough(),
            weights_version=weights.version,
            begun=carrying.begun(start),
        )

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
