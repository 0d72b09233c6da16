"""Accuracy on unseen prompts: greedy, and avg@k, pass@k and maj@k over sampled completions.

Engines and reward functions are those of training; a completion counts as right if the chosen reward function gives
it more than half of a full mark.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Prompt
from gspo_hpc.data.table import GroupTable, ShardedGroups
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.evaluation.scores import avg_at_k, majority, mean_interval, pass_at_k, wilson_interval
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rewards.builtin import ANSWERS
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.worker import Generated

EVAL_ROLLOUT = -1  # seeds of evaluation samples are those of no training rollout


class CompletionSource(Protocol):
    """Engines, wherever they are, that sample completions and grade them."""

    @property
    def ranks(self) -> Ranks:
        """The place of this rank."""

    def generate(self, request: Request) -> Generated:
        """Sample and grade completions of every prompt. Collective."""


def run(
    worker: CompletionSource, prompts: Sequence[Prompt], count: int, config: Config
) -> tuple[dict[str, float], ShardedGroups]:
    """Return the scores by name, and the greedy groups. Collective.

    Rank 0 gives the prompts, and all ranks their number.
    `eval/accuracy_low` and `eval/accuracy_high` are the bounds of the 95 % interval of the greedy accuracy (Wilson).
    So are those that end in `_low` and `_high` of the scores of samples, by drawing prompts again (bootstrap).
    `eval/ungraded` is the share of greedy answers for which the reward function failed, if it did: they count as wrong.
    """
    slots, chosen = range(count), dict(enumerate(prompts))
    length = config.rollout.max_response_length
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=length)
    exchange = worker.ranks.exchange
    groups = exchange.gather_table(worker.generate(Request(slots, chosen, 1, greedy, EVAL_ROLLOUT)).own.values())
    right = are_right(groups.table, config)
    lengths = groups.table.rows["sampled_len"].tolist()
    low, high = wilson_interval(sum(right), len(right))
    ungraded = len(right) - sum(are_graded(groups.table, config))
    scores = {
        "eval/accuracy": sum(right) / len(right),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/response_length": sum(lengths) / len(lengths),
    }
    if ungraded:
        scores["eval/ungraded"] = ungraded / len(right)
    k = config.eval.samples
    if k > 1:
        sampled = Sampling(temperature=config.eval.temperature, top_p=1.0, top_k=-1, max_tokens=length)
        drawn = exchange.gather_table(worker.generate(Request(slots, chosen, k, sampled, EVAL_ROLLOUT)).own.values())
        marks = are_right(drawn.table, config)
        table = [marks[i : i + k] for i in range(0, len(marks), k)]
        found = {f"eval/avg@{k}": avg_at_k(table), f"eval/pass@{k}": pass_at_k(table, k)}
        if (answer := _answer_of(config)) is not None:
            own = {
                slot: majority([answer(one.text) for one in group.completions], table[slot])
                for slot, group in drawn.own.items()
            }
            found[f"eval/maj@{k}"] = list(exchange.gather_values(own).values())
        for name, values in found.items():
            scores[name] = math.fsum(values) / len(values)
            scores[f"{name}_low"], scores[f"{name}_high"] = mean_interval(values)
    return scores, groups


def are_right(table: GroupTable, config: Config) -> list[bool]:
    """Return True for each completion that the function which decides gives more than half a mark.

    That is the reward function `eval.reward` (default: the first). Whether another one failed does not matter.
    """
    return [bool((row > 0.5).any()) for row in table.reward_parts[:, _deciding(table, config)]]


def are_graded(table: GroupTable, config: Config) -> list[bool]:
    """Return True for each completion to which the function that decides gave a value, and did not fail."""
    return [bool(row.any()) for row in table.graded[:, _deciding(table, config)]]


def _answer_of(config: Config) -> Callable[[str], str | None] | None:
    """Return what tells which answer a completion gives; None for functions that do not say it."""
    terms = config.reward.functions
    name = config.eval.reward or terms[0].function
    arguments = next((term.args for term in terms if term.function == name), {})
    return functools.partial(ANSWERS[name], **arguments) if name in ANSWERS else None


def _deciding(table: GroupTable, config: Config) -> list[int]:
    """Return the column of the function that decides; none where it graded nothing."""
    name = config.eval.reward or config.reward.functions[0].function
    return [column for column, known in enumerate(table.names) if known == name]
