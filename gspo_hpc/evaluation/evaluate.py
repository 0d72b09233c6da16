"""Accuracy on unseen prompts: greedy, and avg@k, pass@k and maj@k over sampled completions.

Engines and reward functions are those of training; a completion counts as right if the chosen reward function gives
it more than half of a full mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gspo_hpc.config.derived import decider
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.data.table import GroupTable, ShardedGroups, source_mark
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.evaluation.deciding import HALF, answer_of
from gspo_hpc.evaluation.scores import Scores, majority, summary
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.policy.process_groups import Ranks
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


@dataclass(frozen=True, eq=False)
class Evaluated:
    """The scores by name, the greedy groups, and those of samples, if `eval.samples` is above 1."""

    scores: Scores
    greedy: ShardedGroups
    sampled: ShardedGroups | None = None


def run(worker: CompletionSource, prompts: Sequence[Prompt], count: int, config: Config) -> Evaluated:
    """Return the scores and the groups that they were made of. Collective.

    Rank 0 gives the prompts, and all ranks their number. :func:`gspo_hpc.evaluation.scores.summary` has the scores.
    """
    slots, chosen = range(count), dict(enumerate(prompts))
    length = config.rollout.max_response_length
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=length)
    exchange = worker.ranks.exchange
    groups = exchange.gather_table(worker.generate(Request(slots, chosen, 1, greedy, EVAL_ROLLOUT)).own.values())
    right = are_right(groups.table, config)
    lengths = groups.table.rows["sampled_len"].tolist()
    ungraded = len(right) - sum(are_graded(groups.table, config))
    k = config.eval.samples
    if k <= 1:
        return Evaluated(summary(right, lengths, ungraded), groups)
    sampled = Sampling(temperature=config.eval.temperature, top_p=1.0, top_k=-1, max_tokens=length)
    drawn = exchange.gather_table(worker.generate(Request(slots, chosen, k, sampled, EVAL_ROLLOUT)).own.values())
    marks = are_right(drawn.table, config)
    table = [marks[i : i + k] for i in range(0, len(marks), k)]
    majorities = None
    answers = [answer_of(config, source) for source in (None, *config.data.sources)]
    if all(answer is not None for answer in answers):
        own = {
            slot: majority([_answer(one, group, config) for one in group.completions], table[slot])
            for slot, group in drawn.own.items()
        }
        majorities = list(exchange.gather_values(own).values())
    graded = any(are_graded(drawn.table, config))
    return Evaluated(summary(right, lengths, ungraded, table, majorities, samples_graded=graded), groups, drawn)


def rows(exchange: Exchange, found: Evaluated, config: Config, step: int | None) -> list[dict[str, Any]]:
    """Return on rank 0 what :mod:`gspo_hpc.evaluation.stored` keeps, by prompt; nothing elsewhere. Collective."""
    greedy = exchange.gather_texts(found.greedy, _told(found.greedy, config))
    samples = {} if found.sampled is None else exchange.gather_texts(found.sampled, _told(found.sampled, config))
    return [
        {"step": step}
        | group["prompt"]
        | {"greedy": group["completions"][0], "samples": samples[slot]["completions"] if slot in samples else []}
        for slot, group in sorted(greedy.items())
    ]


def _told(groups: ShardedGroups, config: Config) -> dict[int, dict[str, Any]]:
    """Return what is kept of the groups that this rank holds, by slot."""

    def told(group: Group) -> dict[str, Any]:
        source = find_source(group.prompt.fields, config.data)
        name, answer = decider(config, source), answer_of(config, source)
        prompt = group.prompt
        return {
            "prompt": {"decides": name, "row": prompt.index, "prompt": prompt.text, "fields": prompt.fields},
            "completions": [
                _completion(one, name) | ({} if answer is None else {"answer": answer(one.text)})
                for one in group.completions
            ],
        }

    return {slot: told(group) for slot, group in groups.own.items()}


def _answer(one: Completion, group: Group, config: Config) -> str | None:
    answer = answer_of(config, find_source(group.prompt.fields, config.data))
    assert answer is not None, "asked of each source before"
    return answer(one.text)


def _completion(one: Completion, name: str) -> dict[str, Any]:
    return {
        "text": one.text,
        "tokens": one.tokens.tolist(),
        "sampled": len(one.sampled),
        "finish_reason": one.finish_reason,
        "reward": one.reward,
        "reward_parts": one.reward_parts,
        "outcomes": one.outcomes,
        "failure": one.failure,
        "graded": name in one.reward_parts,
        "right": one.reward_parts.get(name, 0.0) > HALF,
    }


def are_right(table: GroupTable, config: Config) -> list[bool]:
    """Return True for each completion that the function which decides gives more than half a mark.

    That is the reward function `eval.reward` (default: the first), or that of its source. Whether another one failed
    does not matter.
    """
    return _decided(table.reward_parts > HALF, table, config)


def are_graded(table: GroupTable, config: Config) -> list[bool]:
    """Return True for each completion to which the function that decides gave a value, and did not fail."""
    return _decided(table.graded, table, config)


def _decided(values: npt.NDArray[np.bool_], table: GroupTable, config: Config) -> list[bool]:
    """Return of each row the value [N, P] in the column of the function that decides; False where it graded nothing."""
    found = np.zeros(len(table), np.bool_)
    for source in (None, *config.data.sources):
        own = np.ones(len(table), np.bool_) if source is None else table.rows["source"] == source_mark(source.name)
        name = decider(config, source)
        found[own] = values[own, table.names.index(name)] if name in table.names else False
    return found.tolist()
