"""The reward function of multiple choice: it finds the letter that a completion answers with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gspo_hpc.rewards.catalogue import Graded, UnparsableGold, field_of, reward_function
from gspo_hpc.rewards.formats import check_tag, section


def _check(letters: str = "ABCDEFGHIJ", tag: str = "", **_: Any) -> None:
    if not (letters.isascii() and letters.isalpha() and letters.isupper() and len(set(letters)) == len(letters) > 1):
        raise ValueError(f"letters is {letters!r}: it must be two or more different capital letters, such as ABCD")
    check_tag(tag)


def _check_row(
    fields: Mapping[str, Any], *, answer: str = "answer", letters: str = "ABCDEFGHIJ", tag: str = "", **_: Any
) -> None:
    _wanted(field_of(fields, answer), answer, letters)


def _answered(completion: str, *, letters: str = "ABCDEFGHIJ", tag: str = "", **_: Any) -> str | None:
    text = section(completion, tag)
    return None if text is None else chosen_letter(text, letters)


@reward_function(check=_check, check_row=_check_row, answered=_answered)
def multiple_choice(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    answer: str = "answer",
    letters: str = "ABCDEFGHIJ",
    tag: str = "",
) -> float:
    r"""Return 1.0 if the completion chooses the letter of the field named `answer`, else 0.0.

    The field is a letter, as in "C" or "(C)", or a whole number that counts the choices from 0. The completion chooses
    a letter by \boxed{C}, else by "answer is C", "Answer: (C)" or the like, else by a line that is a letter alone, else
    by "C is correct", else by lines that begin with one and the same letter, as "C) Paris" does, else by a letter in
    parentheses; of several the last counts. `letters` are those that may be chosen. With `tag`, only the last
    <tag>...</tag> is read. The result is a :class:`Graded` with the outcome "right", "wrong", or "unparsable" if none
    is chosen. Raises UnparsableGold if the field has no letter.
    """
    wanted = _wanted(field_of(fields, answer), answer, letters)
    text = section(completion, tag)
    chosen = None if text is None else chosen_letter(text, letters)
    if chosen is None:
        return Graded(0.0, "unparsable")
    return Graded(1.0, "right") if chosen == wanted else Graded(0.0, "wrong")


def chosen_letter(text: str, letters: str) -> str | None:
    """Return the letter that a text chooses, as :func:`multiple_choice` describes it; None if it chooses none."""
    boxed, named, line, judged, begun, bracketed = (pattern.findall(text) for pattern in _patterns(letters))
    listed = begun if len({letter.upper() for letter in begun}) == 1 else []  # several may be the question's own list
    for found in (boxed, named, line, judged, listed, bracketed):
        if found:
            return str(found[-1]).upper()
    return None


@lru_cache
def _patterns(letters: str) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of a choice, the surest first. Their only group is the letter."""
    either = f"[{letters}{letters.lower()}]"
    # All repetitions are bounded: texts of one character are long, and must not take time that grows with its square.
    some, space, blank = r"\s{0,9}", r"\s{1,9}", r"[^\S\n]{0,9}"
    # What Markdown and LaTeX put around a letter, on its left.
    wrapped = rf"(?:\\[(\[]{some})?(?:\\(?:text|textbf|mathrm|mathbf){some}\{{)?[*_`\"'(\uff08\[{{$]{{0,9}}"
    # "A" and "I" are words of English: "The answer is a cat" chooses nothing, "The answer is A because" does.
    ends = rf"(?![\w'\u2019])(?:(?<![AaIi])|(?!{space}(?!because\b|since\b|as\b|and\b|but\b|which\b)[a-z]))"
    noun = r"(?:answer|choice|option|\u7b54\u6848|\u9009\u9879)[*_]{0,9}"
    be = rf"(?:{space}(?:is|(?:would|should|must){space}be|choice|option)\b|{some}[:=\uff1a])"
    is_ = rf"(?:{be}|{some}(?:\u5e94\u8be5?)?[\u662f\u4e3a\u9009]){{1,9}}"
    choose = (
        rf"(?:choose|select|pick|go{space}with|\u9009\u62e9|\u9009){some}[:\uff1a]?(?:{space}(?:option|choice|answer))?"
    )
    closing = r"[*_`\"')\]}$.]{0,9}"
    return (
        re.compile(rf"\\boxed{some}\{{{some}{wrapped}{some}({either})(?!\w)"),
        re.compile(rf"(?i:(?<![a-z])(?:{noun}{is_}|{choose})[*_\s]{{0,9}}){wrapped}({either}){ends}"),
        re.compile(
            rf"(?m)^{blank}(?:<\w{{1,32}}>{blank})?{wrapped}({either}){closing}{blank}(?:</\w{{1,32}}>{blank})?$"
        ),
        re.compile(rf"(?<!\w)([{letters}]){closing}{space}is{space}(?:the{space})?(?:correct|right|best)\b"),
        re.compile(rf"(?m)^{blank}{wrapped}({either})[).:]\*{{0,9}}(?=\s)"),
        re.compile(rf"\(([{letters}])\)"),
    )


def _wanted(value: Any, name: str, letters: str) -> str:
    """Return the right letter of a data row."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(letters):
        return letters[value]
    found = re.fullmatch(rf"\s*\(?([{letters}{letters.lower()}])[).:]?\s*", value) if isinstance(value, str) else None
    if found is None:
        raise UnparsableGold(
            f"field {name!r} is {str(value)[:80]!r}: it must be one of the letters {letters}, or a whole number from 0 "
            f"to {len(letters) - 1}"
        )
    return found[1].upper()
