"""Two stored evaluations of the same prompts, compared prompt by prompt: models, checkpoints, or graders."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_hpc.evaluation import stored
from gspo_hpc.evaluation.scores import avg_at_k, difference_interval, mcnemar
from gspo_hpc.evaluation.stored import Answer, Asked, Stored

# A prompt's text or the number of its row, its other fields, and how many such prompts came before it.
_Key = tuple[str | int, str, int]
_Pair = tuple[Asked, Asked]  # the same prompt on both sides


@dataclass(frozen=True)
class Difference:
    """A score of both sides on the prompts in common, the second minus the first, and the 95 % interval of that.

    A side of which nothing was graded has no score, and then there is no difference.
    """

    first: float | None
    second: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Part:
    """The scores of two evaluations on some prompts that both have."""

    prompts: int
    accuracy: Difference
    average: Difference | None  # of avg@K, on those of which both have samples

    def to_json(self) -> dict[str, Any]:
        """Return what is printed of it."""
        found: dict[str, Any] = {"prompts": self.prompts, "accuracy": vars(self.accuracy)}
        return found if self.average is None else found | {"avg": vars(self.average)}


@dataclass(frozen=True)
class Comparison:
    """The scores of two evaluations on the prompts that both have."""

    first: Stored
    second: Stored
    whole: Part  # all prompts in common
    parts: Mapping[str, Part]  # by source or evaluation set
    # None where no greedy answer of a side was graded:
    only_first: int | None  # prompts whose greedy answer is right in the first alone
    only_second: int | None
    p_value: float | None  # McNemar's exact test of these two numbers
    by_row: bool = False  # the texts differ, as those of two chat templates do: prompts are the same rows of the data

    def to_json(self) -> dict[str, Any]:
        """Return everything that is printed."""
        sides = {
            name: {
                "file": str(side.path),
                "step": side.step,
                "prompts": len(side.prompts),
                "left_out": len(side.prompts) - self.whole.prompts,
                "samples": side.samples[0] if len(side.samples) == 1 else side.samples,
                "decides": side.deciders,
                "failure": stored.most_common_failure(one.raw for one in side.prompts) or None,
            }
            for name, side in (("first", self.first), ("second", self.second))
        }
        matched = "row" if self.by_row else "prompt"
        test = {"only_first": self.only_first, "only_second": self.only_second, "p_value": self.p_value}
        found = {**sides, "by": matched, **self.whole.to_json(), "mcnemar": test}
        return found | ({"sets": {name: part.to_json() for name, part in self.parts.items()}} if self.parts else {})


def compare(first: Stored, second: Stored) -> Comparison:
    """Return the comparison. Prompts that one side alone has are left out; ValueError where none is in common.

    A prompt is the same where its text, as the model sees it, and the other fields of its row are. Where no text is, as
    with two chat templates, it is the row of the same number with the same fields, if the other side has every row of
    the one that has fewer: then both asked the same data.
    """
    sides = [_by_prompt(first.prompts), _by_prompt(second.prompts)]
    keys = sorted(sides[0].keys() & sides[1].keys())
    if by_row := not keys:
        sides = [_by_prompt(side.prompts, by_row=True) for side in (first, second)]
        keys = sorted(sides[0].keys() & sides[1].keys())
        if len(keys) < min(map(len, sides)):
            raise ValueError(
                f"{first.path} and {second.path} have no prompt in common: no text of one is in the other, and the "
                "other fields of the rows are not the same, row by row"
            )
    pairs = [(sides[0][key], sides[1][key]) for key in keys]
    greedy = _greedy(pairs)
    names = dict.fromkeys(one.part for one, _ in pairs if one.part)
    alone: tuple[int, int] | None = None
    if greedy[0] is not None and greedy[1] is not None:
        counts = Counter(zip(greedy[0], greedy[1], strict=True))
        alone = counts[1.0, 0.0], counts[0.0, 1.0]
    return Comparison(
        first,
        second,
        _part(pairs),
        {name: _part([pair for pair in pairs if pair[0].part == name]) for name in names},
        None if alone is None else alone[0],
        None if alone is None else alone[1],
        None if alone is None else mcnemar(*alone),
        by_row,
    )


def _by_prompt(prompts: Sequence[Asked], *, by_row: bool = False) -> dict[_Key, Asked]:
    seen = Counter[tuple[str | int, str]]()
    found: dict[_Key, Asked] = {}
    for one in prompts:
        key = one.raw["row"] if by_row else one.prompt, json.dumps(one.fields, sort_keys=True)
        found[*key, seen[key]] = one
        seen[key] += 1
    return found


def _part(pairs: Sequence[_Pair]) -> Part:
    sampled = [pair for pair in pairs if pair[0].samples and pair[1].samples]
    average = None
    if sampled:
        average = _difference(*(_shares([pair[side].samples for pair in sampled]) for side in (0, 1)))
    return Part(len(pairs), _difference(*_greedy(pairs)), average)


def _greedy(pairs: Sequence[_Pair]) -> tuple[list[float] | None, list[float] | None]:
    return _shares([pair[0].answers[:1] for pair in pairs]), _shares([pair[1].answers[:1] for pair in pairs])


def _shares(answers: Sequence[Sequence[Answer]]) -> list[float] | None:
    """Return the share of right answers to each prompt; None where none of them was graded."""
    if not any(one.graded for each in answers for one in each):
        return None
    return avg_at_k([[one.right for one in each] for each in answers])


def _difference(first: Sequence[float] | None, second: Sequence[float] | None) -> Difference:
    if first is None or second is None:
        return Difference(*(None if side is None else math.fsum(side) / len(side) for side in (first, second)))
    differences = [two - one for one, two in zip(first, second, strict=True)]
    one, two, mean = (math.fsum(values) / len(values) for values in (first, second, differences))
    return Difference(one, two, mean, *difference_interval(differences))
