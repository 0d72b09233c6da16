"""The record of one optimizer step, for metrics.jsonl, trackers and console.

Rewards and lengths are those of the completions of this step's global batch; losses, ratios and gaps are over
the completions that were computed (those with an advantage); seconds are wall time by phase.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args

import numpy as np

from gspo_hpc.algorithms.terms.gap import effective_share
from gspo_hpc.config.constants import STEP_PHASES
from gspo_hpc.config.derived import PassName, rewards_count
from gspo_hpc.config.schema import Config
from gspo_hpc.data.outcomes import CALL_OUTCOMES, OUTCOMES
from gspo_hpc.data.table import EXCLUDED, LATE, TRUNCATED, UNGRADED, GroupTable, ShardedGroups
from gspo_hpc.evaluation.by_source import graded_rows, source_metrics
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.schedule import StepResult
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.runs.spending import Account
from gspo_hpc.training.observers.base import StepObserver, TrainedGroups
from gspo_hpc.training.progress import Progress
from gspo_hpc.training.recipe import Recipe
from gspo_hpc.training.serving.weights import RemoteWeights
from gspo_hpc.training.sync import EngineWeights
from gspo_hpc.training.telemetry.step_clock import StepClock

MEAN_OF = {"logprob_gap": "logprob_gap_mean", "ratio": "ratio_mean"}  # names beside which a maximum stands
OF_REWARDS = ("reward", "reward_std", "zero_variance_groups")  # metrics that runs lack whose only signal is a teacher
_TELLING = ("right", "wrong", "unparsable", "not_compiled", "crashed", "too_slow")  # outcomes that are no failures
# Means from which another metric is made; they are no metrics themselves.
INTERMEDIATE = ("logprob_gap_weight", "logprob_gap_weight_squared")


def step_record(
    before: Cursor,
    after: Cursor,
    table: GroupTable,
    result: StepResult | None,
    seconds: Mapping[str, float],
    total_seconds: float,
    weights_version: int,
    config: Config | None = None,
) -> dict[str, Any]:
    """Return one flat record of the step that led from `before` to `after`.

    `weights_version`: steps that had made the weights which sampled. `config` says which sources there are.
    """
    kept = table.select(~table.flagged(EXCLUDED))
    rewards = kept.rows["reward"].astype(np.float64)
    lengths = table.rows["sampled_len"].astype(np.float64)
    record: dict[str, Any] = {
        "step": after.step,
        "rollout": before.rollout,
        "update": before.update,
        "weights_version": weights_version,
        "staleness": before.step - before.update - weights_version,
        "epoch": before.epoch,
        "reward": float(rewards.mean()) if len(rewards) else None,
        "reward_std": float(rewards.std()) if len(rewards) else None,
        "failures": int(table.flagged(UNGRADED).sum()),
        "excluded": len(table) - len(kept),
        "zero_variance_groups": len(set(table.slots) - set(table.select(table.rows["advantage"] != 0.0).slots)),
        "response_length": float(lengths.mean()),
        "response_length_max": int(lengths.max()),
        "truncated_fraction": int(table.flagged(TRUNCATED).sum()) / len(table),
        "completion_tokens": int(lengths.sum()),
        "tokens": after.completion_tokens,
        "sampled_crc32": table.tokens_crc32(),  # equal runs sample equally
        "seconds": total_seconds,
        "time": time.time(),
    }
    for column, name in enumerate(kept.names):
        graded = kept.graded[:, column]
        if graded.any():
            values = np.where(graded, kept.reward_parts[:, column], 0.0)
            record[f"reward/{name}"] = float(
                np.mean(values if config is None else values[graded_rows(kept, name, config)])
            )
    if (turns := table.rows["turns"]).max() > 1:
        record |= {"turns": float(turns.mean()), "turns_max": int(turns.max())}
    if late := int(table.flagged(LATE).sum()):
        record["out_of_time_fraction"] = late / len(table)
    record |= outcome_shares(table) | tool_calls(table) | ({} if config is None else source_metrics(table, config))
    for phase in STEP_PHASES:
        record[f"seconds/{phase}"] = seconds.get(phase, 0.0)
    if result is None:  # every advantage was zero: there was nothing to learn, and no step was made
        return record | {"loss": 0.0, "grad_norm": 0.0, "skipped": 0, "empty": 1}
    means = {MEAN_OF.get(name, name): total / count for name, (total, count) in result.sums.items() if count}
    maxima = dict(result.maxima)
    if result.sums.get("logprob_gap", (0.0, 1.0))[1] == 0:  # the log-probs of the weights that sampled are not known
        maxima.pop("logprob_gap_max", None)
    if INTERMEDIATE[0] in means:
        means["logprob_gap_effective"] = effective_share(*(means.pop(name) for name in INTERMEDIATE))
    return (
        record
        | means
        | maxima
        | result.experts
        | result.packing
        | {"grad_norm": result.grad_norm, "lr": result.learning_rate, "skipped": int(result.skipped), "empty": 0}
    )


def outcome_shares(table: GroupTable) -> dict[str, float]:
    """Return the share of completions with each outcome, by grader.

    All of a grader that tells whether an answer is right; of others those of failures, where there are any.
    """
    shares: dict[str, float] = {}
    for column, name in enumerate(table.names):
        counts = np.bincount(table.outcomes[:, column], minlength=len(OUTCOMES) + 1)[1:]
        tells = counts[[OUTCOMES.index(one) for one in _TELLING]].any()
        for outcome, count in zip(OUTCOMES, counts.tolist(), strict=True):
            if tells or count:
                kind = f"{name}/{outcome}"
                shares[f"reward_outcome/{kind}"] = count / len(table)
    return shares


def tool_calls(table: GroupTable) -> dict[str, float]:
    """Return the mean calls of tools in a completion, and the shares of them that failed; empty without calls."""
    counts = table.rows["calls"].astype(np.int64).sum(axis=0)
    if not (every := int(counts.sum())):
        return {}
    failed = {f"tool_calls/{name}": count / every for name, count in zip(CALL_OUTCOMES, counts.tolist(), strict=True)}
    return {"tool_calls": every / len(table)} | {
        name: share for name, share in failed.items() if name != "tool_calls/done"
    }


class Deaths(Protocol):
    """The account of engines that died."""

    def deaths(self) -> Sequence[str]:
        """Return how engines died in this attempt, on any rank: one text each."""


class StepRecorder:
    """The maker of the records of one attempt's steps."""

    def __init__(
        self,
        recipe: Recipe,
        weights: EngineWeights | RemoteWeights,
        recovery: Deaths,
        observers: StepObserver,
        clock: StepClock,
        account: Account | None = None,
    ) -> None:
        """`account`: the requests to judges, on the rank whose records are kept."""
        self._account = account
        self._recipe, self._weights, self._recovery = recipe, weights, recovery
        self._observers, self._clock = observers, clock
        self._deaths_noted = 0

    def record(
        self, before: Cursor, progress: Progress, batch: ShardedGroups, result: StepResult | None
    ) -> dict[str, Any]:
        """Return the record of the step that led from `before` to where `progress` stands. Collective."""
        clock = self._clock
        version = progress.weights_version
        self._show_trained(before, progress, batch, result, version)
        config, seconds = self._recipe.config, clock.elapsed()
        record = step_record(before, progress.cursor, batch.table, result, clock.seconds, seconds, version, config)
        if not rewards_count(config):  # they are no signal: nothing is to be judged by them
            record = {key: value for key, value in record.items() if key not in OF_REWARDS}
        if config.environment.tools:
            record = {"tool_calls": 0.0} | record
        record |= self._speed(before, progress, record)
        record |= self._state(before, progress) | self._judges()
        if result is not None and result.expert_tokens:
            self._observers.experts(progress.cursor.step, result.expert_tokens)
        return record | clock.measured().metrics()

    def _show_trained(
        self, before: Cursor, progress: Progress, batch: ShardedGroups, result: StepResult | None, version: int
    ) -> None:
        """Give the observers the groups of this step that are recorded, before a checkpoint of it is saved."""
        step = progress.cursor.step
        if slots := self._recipe.recorded_slots(step, batch.table):
            groups = [batch.own[slot] for slot in slots if slot in batch.own]
            logprobs = {} if result is None else result.logprobs
            self._observers.trained(TrainedGroups(step, before.rollout, before.update, version, groups, logprobs))

    def _speed(self, before: Cursor, progress: Progress, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return completion tokens per second, with the rollout's time shared out evenly over its updates."""
        rollout_seconds = progress.rollout_seconds
        if rollout_seconds is None:
            return {"completion_tokens_per_s": None}
        own = record["seconds"] - (rollout_seconds if before.update == 0 else 0.0)
        seconds = own + rollout_seconds / self._recipe.updates_per_rollout
        return {"completion_tokens_per_s": record["completion_tokens"] / seconds}

    def _judges(self) -> dict[str, Any]:
        """Return what the run has asked of judges so far, in all its attempts; empty if nothing."""
        if self._account is None:
            return {}
        self._account.read()
        used = self._account.total()
        if not used.requests:
            return {}
        return {
            "judge/requests": used.requests,
            "judge/prompt_tokens": used.prompt_tokens,
            "judge/completion_tokens": used.completion_tokens,
            "judge/cost": used.cost,
        }

    def _state(self, before: Cursor, progress: Progress) -> dict[str, Any]:
        """Return the attempt, its engine restarts and passes, and after a rollout its sync and its engines."""
        deaths = self._recovery.deaths()
        for death in deaths[self._deaths_noted :]:
            self._observers.note(f"an engine died and was restarted in place ({death})")
        self._deaths_noted = len(deaths)
        state: dict[str, Any] = {"attempt": self._recipe.attempt, "engine_restarts": len(deaths)}
        state |= _pass_record(self._clock.monitor)
        if progress.weights is not None:  # those that this step was made with
            state |= {"kl_beta": progress.weights.kl_beta, "entropy_coef": progress.weights.entropy_coef}
        synced = self._weights.newest
        if synced is not None and before.update == 0:  # the sync before this rollout; later updates had none
            state |= {
                "probe_logprob_gap_max": synced.gap.max,
                "probe_logprob_gap_mean": synced.gap.mean,
                "probe_logprob_gap_weighted": synced.gap.weighted_mean,
            }
            if synced.gap.logit_step:
                state["probe_logit_step"] = synced.gap.logit_step
            state |= progress.engines
        return state


def _pass_record(monitor: PassMonitor) -> dict[str, int]:
    """Return the number of passes of each name, and the sizes that those with a size of their own had on this rank."""
    found = {f"passes/{name}": monitor.counts[name].passes for name in (*get_args(PassName), "probe")}
    for name in get_args(PassName):
        if (counts := monitor.counts[name]).passes:
            found |= {
                f"passes/{name}/micro_batches": counts.micro_batches,
                f"passes/{name}/most_completions": counts.most_completions,
                f"passes/{name}/most_tokens": counts.most_tokens,
            }
    return found
