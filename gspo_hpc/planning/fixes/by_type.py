"""Candidate values of settings that candidates.py does not know, from their types and from the message of a rule.

A message names its settings and has its bounds as numbers, so a new rule gets fixes without a word about them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from gspo_hpc.config.schema import Config, as_dict, keys, limits, plain_type
from gspo_hpc.planning.builder import Broken
from gspo_hpc.planning.mentions import mentioned
from gspo_hpc.planning.settings import divisors

_NUMBERS = 8  # of a message that are looked at
_NEAR = 4  # divisors on each side of the present value
_KEPT = (
    "cluster.platform",
    "run.seed",
    "data.sources",
    "data.eval_sets",
    "reward.models",
)  # another machine, experiment, data, reward
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)")


def candidates(config: Config, broken: Iterable[Broken]) -> dict[str, set[Any]]:
    """Return values that the settings named by broken rules can take, by setting."""
    found: dict[str, set[Any]] = {}
    for item in broken:
        numbers = [float(text) for text in _NUMBER.findall(item.message)[:_NUMBERS]]
        for key in mentioned(item.message):
            section, _, name = key.partition(".")
            if key not in keys() or key in _KEPT or section == "algorithm":  # the other values of algorithms are known
                continue
            part, field = getattr(config, section), keys()[key]
            if isinstance(field.default, dict):  # free-form
                continue
            values = {field.default, *_values(plain_type(field.annotation), getattr(part, name), numbers)}
            values |= {bound for bound in limits(field).values() if isinstance(bound, int) and abs(bound) < 100}
            raw = as_dict(part)
            found.setdefault(key, set()).update(v for v in values if _is_taken(type(part), raw | {name: v}))
    return found


def _values(kind: Any, before: Any, numbers: list[float]) -> Iterator[Any]:
    """Yield values of a type: all of a few, and numbers that are near the present one or stand in the message."""
    if kind is bool:
        yield from (True, False)
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    if kind is float:
        yield from numbers
        yield from (before * factor for factor in (0.5, 2) if before)
    if kind is int:
        present = before if isinstance(before, int) else 1
        yield from (present - 1, present + 1, present // 2, 2 * present)
        for number in {int(number) for number in numbers if number >= 1}:
            yield from (number - 1, number, number + 1)
            yield from (number * (present // number + step) for step in (0, 1))
            parts = divisors(number)
            yield from [part for part in parts if part <= present][-_NEAR:]
            yield from [part for part in parts if part > present][:_NEAR]


def _is_taken(section: Any, raw: dict[str, Any]) -> bool:
    try:
        section.model_validate(raw)
    except ValidationError:
        return False
    return True
