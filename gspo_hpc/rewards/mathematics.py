r"""Mathematical answers, compared as expressions by math-verify: 1/2, 0.5 and \frac{1}{2} are equal.

math-verify is an optional package (``gspo-hpc[math]``) and imported in worker processes only. Its own time limits are
signals, which fail silently outside the main thread, so they are off: the pool ends a call that takes too long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from gspo_hpc.rewards.catalogue import Graded, UnparsableGold, field_of, reward_function
from gspo_hpc.rewards.formats import check_tag, section

_MARKED = re.compile(r"\\boxed|\$|\\\(|\\\[")  # text that says where its mathematics is
_WRITTEN = re.compile(r"\$[^$]+\$|[-+]?\d+(?:[,.]\d+)*(?:/\d+)?")  # where nothing is boxed
_RATIO = re.compile(r"([-+]?)\\[dt]?frac\{(\d{1,30})\}\{(\d{1,30})\}")
_NUMBER = re.compile(r"[-+]?\d{1,30}(?:\.\d{1,30}|/\d{1,30})?")
_EXAMPLE = (r"so the answer is $\boxed{\frac{x^2+1}{2}}$, or 1/2", r"\boxed{(1, \sqrt{2}]}")


def _prepare() -> None:
    """Import math-verify and parse once, because its grammar takes seconds to load."""
    try:
        import math_verify
    except ImportError as error:
        raise ImportError(f"math-verify is not installed ({error}): pip install 'gspo-hpc[math]'") from None
    for text in _EXAMPLE:
        parsed = math_verify.parse(text, parsing_timeout=None)
        math_verify.verify(parsed, parsed, timeout_seconds=None)


def _check(precision: int = 6, tag: str = "", **_: Any) -> None:
    if not 0 <= precision <= 50:
        raise ValueError(f"precision is {precision}: it must be a number of decimal places from 0 to 50")
    check_tag(tag)


def _check_row(fields: Mapping[str, Any], *, answer: str = "answer", **_: Any) -> None:
    _gold_text(field_of(fields, answer), answer)


def _answered(completion: str, *, tag: str = "", **_: Any) -> str | None:
    r"""Return what the last \boxed{} holds, else the text of the tag, else the last formula between dollars or number.

    Numbers and fractions of whole numbers are given by their value, everything else without white space: two ways to
    write another answer are two texts, since reading them as mathematics takes a process and a time limit.
    """
    text = section(completion, tag)
    if not text:
        return None
    boxed, rest = text.rpartition("\\boxed{")[1:]
    if boxed:
        end = _closing(rest)
        found = None if end is None else rest[:end]
    else:
        written = _WRITTEN.findall(text)
        found = text if tag else written[-1].strip("$") if written else None
    return None if found is None else _plain("".join(found.split())) or None


def _closing(text: str) -> int | None:
    """Return the place of the brace that closes one before the text; None if there is none."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return place
    return None


def _plain(text: str) -> str:
    """Return the value of a number or a fraction as text, and any other text as it is."""
    ratio = _RATIO.fullmatch(text)
    number = f"{ratio[1]}{ratio[2]}/{ratio[3]}" if ratio else text.replace(",", "")
    try:
        return str(Fraction(number)) if _NUMBER.fullmatch(number) else text
    except ZeroDivisionError:
        return text


@reward_function(check=_check, check_row=_check_row, prepare=_prepare, answered=_answered)
def math_verify(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    answer: str = "answer",
    precision: int = 6,
    tag: str = "",
) -> float:
    r"""Return 1.0 if the completion's last mathematical expression equals that of the field named `answer`, else 0.0.

    An expression in \boxed{} counts before others; several that "and" or a comma joins are a set. The field is a number
    or an expression, plain or in LaTeX; where text is around it, it stands in \boxed{}, between dollars, or after
    "####". Numbers are compared after rounding to `precision` decimal places. With `tag`, only the last
    <tag>...</tag> of the completion is read, which may be a plain expression, too. The result is a :class:`Graded` with
    the outcome "right", "wrong", or "unparsable" if the completion has no expression or one that cannot be compared.
    Raises UnparsableGold if the field cannot be read.
    """
    import math_verify as library

    gold = library.parse(_gold_text(field_of(fields, answer), answer), parsing_timeout=None)
    if not any(not isinstance(one, str) for one in gold):
        raise UnparsableGold(f"field {answer!r} is {str(fields[answer])[:80]!r}: math-verify finds no expression in it")
    if tag:
        inside = section(completion, tag)
        if not inside:
            return Graded(0.0, "unparsable")
        completion = inside if _MARKED.search(inside) else f"\\boxed{{{inside}}}"
    given = library.parse(completion, parsing_timeout=None)
    if not any(not isinstance(one, str) for one in given):
        return Graded(0.0, "unparsable")
    # Compared one by one with errors raised: by itself, math-verify takes an error for a wrong answer.
    compared = True
    for one in given:
        try:
            if library.verify(gold, one, float_rounding=precision, timeout_seconds=None, raise_on_error=True):
                return Graded(1.0, "right")
        except Exception:  # of sympy, on expressions that it cannot compare
            compared = False
    return Graded(0.0, "wrong" if compared else "unparsable")


def _gold_text(value: Any, name: str) -> str:
    """Return the text of a right answer in which math-verify looks for the expression."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not str(value).strip():
        raise UnparsableGold(f"field {name!r} is {value!r}: it must be a number or a mathematical expression")
    text = str(value).rpartition("####")[2].strip()
    return text if _MARKED.search(text) else f"\\boxed{{{text}}}"
