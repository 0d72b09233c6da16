"""YAML as configs have it: numbers as YAML 1.2 writes them, and none that a reader of 1.1 would take for another one.

PyYAML follows YAML 1.1, in which 1e-6 is text, 24:00:00 is 86400 and 0777 is 511. Here 1e-6 is a number, and the two
others are values that no key takes: :class:`Ambiguous` says what to write instead. Words such as `off` are true or
false, as in 1.1, except where text is wanted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

_PREFIX = "tag:yaml.org,2002:"
_AMBIGUOUS = "!ambiguous"
_DIGITS = r"\d+(?:_\d+)*"
_INT = re.compile(rf"[-+]?(?:0|(?!0){_DIGITS}|0b[01]+|0x[0-9a-fA-F]+)")
_FLOAT = re.compile(
    rf"[-+]?(?:(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?\d+)?|{_DIGITS}[eE][-+]?\d+|\.(?:inf|Inf|INF))"
    r"|\.(?:nan|NaN|NAN)"
)
_BASE_60 = re.compile(r"([-+]?)(\d+)((?::[0-5]?\d)+)(\.\d*)?")
_LEADING_0 = re.compile(r"[-+]?0[\d_]+")
_WORDS = re.compile(r"yes|no|on|off", re.IGNORECASE)  # true or false in YAML 1.1, text in 1.2


@dataclass(frozen=True, repr=False)
class Ambiguous:
    """A value without quotes that is a number in one version of YAML, and another one or text in the other."""

    text: str

    def __repr__(self) -> str:
        return self.text  # pydantic's errors show it

    def refusal(
        self, *, number: bool = True, text: bool = True, taken: Callable[[Any], bool] = lambda _: True, must: str = ""
    ) -> str:
        """Return what to write instead where a number, or text, is taken: the end of a sentence that begins with it.

        Only numbers that are `taken` are proposed; where there is none, `must` says what the value must be.
        """
        why, meant = self._base_60() if ":" in self.text else self._leading_zero()
        allowed = [value for value in meant if number and taken(value)]
        if must and not allowed:
            return f"is {self.text}, {why}; {f'that is {_shown(meant)}, and it ' * number}{must}"
        options = [f"write {_shown(allowed)}"] if allowed else []
        options += ["put quotes around text"] * text
        return f"is {self.text}, {why}; {' or '.join(options)}"

    def _base_60(self) -> tuple[str, list[int | float]]:
        """Return what the value is in YAML 1.1, and the number that is then meant."""
        whole, _, fraction = self.text.partition(".")
        number = 0
        for part in whole.lstrip("-+").split(":"):
            number = number * 60 + int(part)
        sign = -1 if whole.startswith("-") else 1
        return "a number of base 60 in YAML 1.1", [sign * (float(f"{number}.{fraction}") if fraction else number)]

    def _leading_zero(self) -> tuple[str, list[int | float]]:
        """Return what is wrong with the value, and the numbers that may be meant: the decimal one, and the octal."""
        digits = self.text.replace("_", "")
        octal = [int(digits, 8)] if re.fullmatch(r"[-+]?[0-7]+", digits) else []
        return "which begins with 0", list(dict.fromkeys([int(digits), *octal]))


def _shown(meant: list[int | float]) -> str:
    """Return the numbers that may be meant, of which a second one is octal."""
    return f"{meant[0]}{f' ({meant[1]} if it is octal)' if len(meant) > 1 else ''}"


def numbers_meant(text: str, *, whole: bool = False) -> tuple[int | float, ...]:
    """Return the numbers that a text such as 16k, 90% or 0o10 may mean; none for other text.

    Where only whole numbers are taken, a share of something is none.
    """
    given = text.strip()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKmMgGtT])[iI]?[bB]?", given):
        power = " kmgt".index(match[2].lower())
        return tuple(round(float(match[1]) * unit**power) for unit in (1000, 1024))
    if match := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", given):
        return () if whole else (float(f"{float(match[1]) / 100:g}"),)
    if re.fullmatch(r"0[oO][0-7]+", given):  # octal in YAML 1.2 and Python
        return (int(given, 8),)
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+", given):
        return (int(given.replace(",", "")),)
    if _INT.fullmatch(given):
        return (int(given.replace("_", ""), 0),)
    if _FLOAT.fullmatch(given) and math.isfinite(number := _float(given)):
        return (int(number) if whole and number.is_integer() else number,)
    return ()


def number_meant(
    text: str,
    *,
    whole: bool = False,
    share: bool = True,
    taken: Callable[[Any], bool] = lambda _: True,
    must: str = "",
) -> str:
    """Return what to write for a text that is meant as a number: "; write ...", or nothing.

    Only numbers that are `taken` are proposed; where there is none, `must` says what it must be. Without `share` the
    number is a size or a rate, of which 90% says nothing.
    """
    given, meant = text.strip(), numbers_meant(text, whole=whole)
    if (whole or not share) and given.endswith("%") and numbers_meant(text):
        return "; it is a number, not a share"
    if write := [str(number) for number in meant if taken(number)]:
        same = given.isascii() and (_INT.fullmatch(given) or (_FLOAT.fullmatch(given) and not whole))
        return f"; write {given}, without quotes" if same else f"; write {' or '.join(write)}"
    return f"; that is {' or '.join(map(str, meant))}, and it {must}" if meant and must else ""


def _float(text: str) -> float:
    """Return a number with a point or an exponent, as YAML writes it."""
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


class Reader(yaml.SafeLoader):
    """Reader of configs."""

    # Of 1.1: true and false, null, dates and merge keys.
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.split(":")[-1] not in ("int", "float", "value")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return a decimal number, or one with 0x or 0b in front."""
        return int(self.construct_scalar(node).replace("_", ""), 0)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Return a number with a point or an exponent."""
        return _float(self.construct_scalar(node))

    def construct_ambiguous(self, node: yaml.ScalarNode) -> Ambiguous:
        """Return a value that no key takes."""
        return Ambiguous(str(self.construct_scalar(node)))


def read_word(node: yaml.Node, *, text: bool) -> None:
    """Make a word such as `off` the text that YAML 1.2 reads, where `text` is wanted."""
    if text and isinstance(node, yaml.ScalarNode) and node.tag == f"{_PREFIX}bool" and _WORDS.fullmatch(node.value):
        node.tag = f"{_PREFIX}str"


class Writer(yaml.SafeDumper):
    """Writer of configs, which puts quotes around text that either version of YAML takes for something else."""


for _tag, _pattern in (
    (f"{_PREFIX}int", _INT),
    (f"{_PREFIX}float", _FLOAT),
    (_AMBIGUOUS, _BASE_60),
    (_AMBIGUOUS, _LEADING_0),
):
    _whole = re.compile(rf"(?:{_pattern.pattern})$(?!\n)", _pattern.flags)
    for _class in (Reader, Writer):
        _class.add_implicit_resolver(_tag, _whole, list("-+.0123456789"))
Reader.add_constructor(f"{_PREFIX}int", Reader.construct_yaml_int)
Reader.add_constructor(f"{_PREFIX}float", Reader.construct_yaml_float)
Reader.add_constructor(_AMBIGUOUS, Reader.construct_ambiguous)
