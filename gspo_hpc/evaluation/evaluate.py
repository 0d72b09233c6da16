"""Accuracy on unseen prompts: greedy, and avg@k, pass@k and maj@k over sampled completions.

Engines and reward functions are those of training; a completion counts as right if the chosen reward function gives
it more than half of a full mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gspo_hpc.config.derived import decider, eval_of
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.data.table import GroupTable, ShardedGroups, source_mark
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.evaluation.deciding import HALF, answer_of
from gspo_hpc.evaluation.marks import Marks, scores
from gspo_hpc.evaluation.scores import Scores, majority
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.worker import Generated

Sizes = Mapping[str, int]  # the number of prompts by their evaluation set, see `run`

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
    """The scores by name, the greedy groups, and those of samples, if any prompt is sampled more than once."""

    scores: Scores
    greedy: ShardedGroups
    sampled: ShardedGroups | None = None


def run(worker: CompletionSource, prompts: Sequence[Prompt], sizes: Sizes, config: Config) -> Evaluated:
    """Return the scores and the groups that they were made of. Collective.

    Rank 0 gives the prompts, and all ranks the number of each set, in their order; those of no set have the name "".
    :func:`gspo_hpc.evaluation.marks.scores` has the scores.
    """
    chosen, exchange = dict(enumerate(prompts)), worker.ranks.exchange
    greedy, sampled = dict[Sampling, list[int]](), dict[tuple[Sampling, int], list[int]]()
    begin = 0
    for name, size in sizes.items():
        slots, asked = range(begin, begin := begin + size), eval_of(config, name)
        most = asked.max_tokens or config.rollout.max_response_length
        once = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=most)
        greedy.setdefault(once, []).extend(slots)
        if asked.samples > 1:
            drawn = Sampling(asked.temperature, asked.top_p, asked.top_k, most)
            sampled.setdefault((drawn, asked.samples), []).extend(slots)

    def gathered(asked: Iterable[Request]) -> ShardedGroups:
        own = dict[int, Group]()
        for one in asked:
            own |= worker.generate(one).own
        return exchange.gather_table(own.values())

    # Sets that are sampled alike share a call, so that engines stay full.
    answers = gathered(Request(slots, chosen, 1, how, EVAL_ROLLOUT) for how, slots in greedy.items())
    samples = None
    if sampled:
        samples = gathered(Request(slots, chosen, k, how, EVAL_ROLLOUT) for (how, k), slots in sampled.items())
    return Evaluated(scores(_marks(answers, samples, exchange, config)), answers, samples)


def _marks(greedy: ShardedGroups, sampled: ShardedGroups | None, exchange: Exchange, config: Config) -> list[Marks]:
    """Return what is known of every prompt, on all ranks. Collective."""
    rows, names = greedy.table.rows, {source_mark(one.name): one.name for one in config.data.named}
    marks, lengths = are_right(greedy.table, config), rows["sampled_len"].tolist()
    parts = [names.get(mark, "") for mark in rows["source"].tolist()]
    found = [*map(Marks, parts, marks, lengths, are_graded(greedy.table, config))]
    if sampled is None:
        return found
    right, graded = dict[int, tuple[bool, ...]](), dict[int, bool]()
    slots = sampled.table.rows["slot"].tolist()
    for slot, is_right, is_graded in zip(
        slots, are_right(sampled.table, config), are_graded(sampled.table, config), strict=True
    ):
        right[slot] = (*right.get(slot, ()), is_right)
        graded[slot] = graded.get(slot, False) or is_graded
    own = dict[int, float]()
    for slot, group in sampled.own.items():
        answer = answer_of(config, find_source(group.prompt.fields, config.data))
        if answer is not None:
            own[slot] = majority([answer(one.text) for one in group.completions], right[slot])
    votes = exchange.gather_values(own)
    return [
        replace(one, samples=right[slot], samples_graded=graded[slot], majority=votes.get(slot))
        if slot in right
        else one
        for slot, one in zip(rows["slot"].tolist(), found, strict=True)
    ]


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
            "prompt": {
                "set": "" if source is None else source.name,
                "decides": name,
                "row": prompt.index,
                "prompt": prompt.text,
                "fields": prompt.fields,
            },
            "completions": [
                _completion(one, name) | ({} if answer is None else {"answer": answer(one.text)})
                for one in group.completions
            ],
        }

    return {slot: told(group) for slot, group in groups.own.items()}


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
    for source in (None, *config.data.named):
        own = np.ones(len(table), np.bool_) if source is None else table.rows["source"] == source_mark(source.name)
        name = decider(config, source)
        found[own] = values[own, table.names.index(name)] if name in table.names else False
    return found.tolist()
