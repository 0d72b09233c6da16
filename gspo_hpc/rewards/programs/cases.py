"""The tests of a data row: pairs of standard input and output, and assertions, as data sets write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo_hpc.rewards.catalogue import UnparsableGold, field_of
from gspo_hpc.system.text import parse_json

_FORMS = (
    "a list of {input, output} or of assertions, {inputs: [...], outputs: [...]}, one of these as JSON, or the text of "
    "assertions"
)


@dataclass(frozen=True)
class Pair:
    """Standard input of a program, and the output that it must print."""

    given: str
    expected: str


@dataclass(frozen=True)
class Cases:
    """The tests of a row, in their order: pairs come first."""

    pairs: tuple[Pair, ...] = ()
    assertions: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs) + len(self.assertions)


def cases_of(fields: Mapping[str, Any], name: str) -> Cases:
    """Return the tests that a field of a row holds. Raises ValueError where it is missing or in no known form."""
    value = field_of(fields, name)
    if isinstance(value, str):
        try:
            value = parse_json(value, finite=False)
        except ValueError:  # Python, and not JSON
            value = [value]
    if isinstance(value, Mapping):
        value = _paired(value, name)
    if not isinstance(value, list | tuple) or not value:
        raise UnparsableGold(f"field {name!r} is {str(value)[:80]!r}: it must be {_FORMS}")
    pairs, assertions = [], []
    for one in value:
        if isinstance(one, str) and one.strip():
            assertions.append(one)
        elif isinstance(one, Mapping) and {"input", "output"} <= one.keys():
            pairs.append(Pair(_text(one["input"]), _text(one["output"])))
        else:
            raise UnparsableGold(f"field {name!r} has a test {str(one)[:80]!r}: it must be {_FORMS}")
    return Cases(tuple(pairs), tuple(assertions))


def _paired(value: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    given, expected = value.get("inputs"), value.get("outputs")
    if not isinstance(given, list | tuple) or not isinstance(expected, list | tuple) or len(given) != len(expected):
        raise UnparsableGold(f"field {name!r} must have as many inputs as outputs; it is {str(value)[:80]!r}")
    return [{"input": one, "output": other} for one, other in zip(given, expected, strict=True)]


def _text(value: Any) -> str:
    """Return an input or output as text; some data sets have lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def same(printed: str, expected: str) -> bool:
    """Tell whether two outputs are the same, but for white space at the ends of lines and empty lines at the end."""
    first, second = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (printed, expected))
    return first == second
