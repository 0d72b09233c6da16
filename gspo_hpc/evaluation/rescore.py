"""Stored completions graded again, by other reward functions or the same ones after a change; nothing is generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gspo_hpc.config.derived import decider
from gspo_hpc.config.schema import Config, Rows, replace
from gspo_hpc.config.sections.reward_models import FUNCTION as REWARD_MODEL
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.evaluation import stored
from gspo_hpc.evaluation.deciding import HALF, answer_of
from gspo_hpc.evaluation.stored import Answer, Asked, Stored
from gspo_hpc.rewards.calls import ENVIRONMENT, Sampled
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.registry import part_names
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.system.text import near_miss

T = TypeVar("T", bound=Rows)

_AHEAD = 64  # completions that are with the pool for each of its processes; the others wait here


@dataclass(frozen=True)
class Rescored:
    """An evaluation before and after. Changes are counted by (right before, right after).

    None are counted where nothing was graded before, or nothing is now: then it is not known what was right.
    """

    old: Stored
    new: Stored
    greedy: Counter[tuple[bool, bool]]
    samples: Counter[tuple[bool, bool]]
    failed: Counter[str]  # why no value came of a completion, and of how many

    def to_json(self) -> dict[str, Any]:
        """Return everything that is printed."""
        kinds = {"greedy": self.greedy, "samples": self.samples}
        return {
            "file": str(self.old.path),
            "step": self.old.step,
            "prompts": len(self.old.prompts),
            "decided": self.old.deciders,
            "decides": self.new.deciders,
            "old": self.old.scores(),
            "new": self.new.scores(),
            "changed": {
                kind: {"answers": counts.total(), "to_right": counts[False, True], "to_wrong": counts[True, False]}
                for kind, counts in kinds.items()
                if counts
            },
            "failures": dict(self.failed.most_common()),
        }


def rescore(old: Stored, config: Config) -> Rescored:
    """Return the evaluation with the rewards of `config`. Raises ValueError where these cannot be given.

    Time limits, memory, retries and what a function that fails means are as in a run.
    """
    _check(config)
    config = _with_graders(config)
    results = _graded(old, config)
    names, graded = list[str](), list[list[Mapping[str, Any]]]()
    for place, asked in enumerate(old.prompts):
        source = find_source(asked.fields, config.data)
        name, answer = decider(config, source), answer_of(config, source)
        names.append(name)
        graded.append([_new(each, results[place, index], name, answer) for index, each in enumerate(asked.answers)])
    new = stored.regraded(old, names, graded)
    pairs = list(zip(old.prompts, new.prompts, strict=True))
    return Rescored(
        old,
        new,
        _changes([(before.greedy, after.greedy) for before, after in pairs]),
        _changes([one for before, after in pairs for one in zip(before.samples, after.samples, strict=True)]),
        Counter(result.failure for result in results.values() if result.failure is not None),
    )


def _changes(pairs: Sequence[tuple[Answer, Answer]]) -> Counter[tuple[bool, bool]]:
    if not (any(one.graded for one, _ in pairs) and any(two.graded for _, two in pairs)):
        return Counter()
    return Counter((one.right, two.right) for one, two in pairs)


def _check(config: Config) -> None:
    functions = [term.function for term in config.reward.functions]
    if not functions:
        raise ValueError(
            "reward.functions is not set: give a reward function, such as reward.functions=[{function: number_match}]"
        )
    if REWARD_MODEL in functions:
        kept = [f"{{function: {one}}}" for one in dict.fromkeys(functions) if one != REWARD_MODEL]
        raise ValueError(
            "reward.functions has reward_model, and reward models score in engines, which rescore does not start: give "
            f"functions alone, such as 'reward.functions=[{', '.join(kept) or '{function: number_match}'}]'"
        )
    if config.eval.reward and config.eval.reward not in functions:
        raise ValueError(
            f"eval.reward ({config.eval.reward}) must be one of reward.functions"
            f"{near_miss(config.eval.reward, functions, known=True)}"
        )


def _with_graders(config: Config) -> Config:
    """Return the config with all reward functions for sources and sets whose own functions are not among these."""
    given = part_names(config.reward)

    def graded(one: T) -> T:
        return one if one.rewards is None or set(one.rewards) <= {*given} else replace(one, rewards=None)

    data = config.data
    sources, sets = tuple(map(graded, data.sources)), tuple(map(graded, data.eval_sets))
    return replace(config, data=replace(data, sources=sources, eval_sets=sets))


def _graded(old: Stored, config: Config) -> dict[tuple[int, int], RewardResult]:
    """Return the result of every completion by the place of its prompt and its own; the greedy answer is the first."""
    found: dict[tuple[int, int], RewardResult] = {}
    most = _AHEAD * config.reward.workers
    with RewardPool(config.reward, 1, config.sandbox, config.data.named, config.judges) as pool:
        for place, asked in enumerate(old.prompts):
            _submit(pool, place, asked)
            while pool.pending > most:
                found |= dict(pool.poll(timeout=None))
        while pool.pending:
            found |= dict(pool.poll(timeout=None))
    return found


def _submit(pool: RewardPool, place: int, asked: Asked) -> None:
    """Submit the greedy answer by itself and the samples as one group, as the evaluation did."""
    for first, group in ((0, asked.answers[:1]), (1, asked.samples)):
        if group:
            keys = [(place, first + number) for number in range(len(group))]
            pool.submit_group(keys, [_sampled(one) for one in group], asked.prompt, asked.fields)


def _sampled(one: Answer) -> Sampled:
    return Sampled(one.text, len(one.tokens), one.tokens, one.raw["reward_parts"].get(ENVIRONMENT))


def _new(one: Answer, result: RewardResult, name: str, answer: Callable[[str], str | None] | None) -> Mapping[str, Any]:
    return {
        "reward": result.value,
        "reward_parts": result.parts,
        "outcomes": result.outcomes,
        "failure": result.failure,
        "graded": name in result.parts,
        "right": result.parts.get(name, 0.0) > HALF,
    } | ({} if answer is None else {"answer": answer(one.text)})
