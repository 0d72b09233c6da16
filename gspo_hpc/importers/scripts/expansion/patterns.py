"""Match texts against the patterns of a shell, as case, [[ ]] and ${name#pattern} use them."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"([\\*?\[\]!^+@|()-])")
_EXTENDED = re.compile(r"(?<!\\)[?*+@!]\(")
_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z", "space": r" \t\n\r\f\v",
    "blank": r" \t", "xdigit": "0-9a-fA-F", "word": r"\w", "punct": r"!-/:-@\[-`{-~",
}  # fmt: skip
_LONGEST = 4096  # characters of a text or a pattern


def escaped(text: str) -> str:
    """Return a pattern that only the text itself matches, as quotes make one."""
    return _SPECIAL.sub(r"\\\1", text)


def is_extended(pattern: str) -> bool:
    """Tell whether a pattern has a group such as +(a|b), which counts only after ``shopt -s extglob``, or in [[ ]]."""
    return _EXTENDED.search(pattern) is not None


def matches(text: str, pattern: str, extended: bool | None, any_case: bool | None) -> bool | None:
    """Tell whether a text matches a pattern, None if that is not known.

    `extended`: groups such as +(a|b) count; `any_case`: large and small letters are the same. None: not known.
    """
    found = compiled(pattern, extended)
    if found is None or len(text) > _LONGEST:
        return None
    exact = found.fullmatch(text) is not None
    if any_case is False or exact:
        return exact
    loose = re.compile(found.pattern, re.DOTALL | re.IGNORECASE).fullmatch(text) is not None
    return loose if any_case or not loose else None


def compiled(pattern: str, extended: bool | None) -> re.Pattern[str] | None:
    """Return a pattern as a regular expression, None for one that is not followed."""
    if len(pattern) > _LONGEST or (extended is not True and is_extended(pattern)):
        return None
    try:
        parts, at = _translated(pattern, 0, False)
        return re.compile(parts, re.DOTALL) if at == len(pattern) else None
    except (ValueError, re.error, RecursionError):
        return None


def _translated(pattern: str, at: int, inner: bool) -> tuple[str, int]:
    """Return the expression for a pattern from `at` on, and where it ends: within a group at its | or )."""
    done: list[str] = []
    while at < len(pattern):
        sign, after = pattern[at], pattern[at + 1 : at + 2]
        if inner and sign in "|)":
            break
        if sign in "?*+@!" and after == "(":
            group, at = _group(pattern, at, sign)
            done.append(group)
        elif sign == "\\":
            done.append(re.escape(after or "\\"))
            at += 2
        elif sign == "*":
            done.append(".*")
            at += 1
        elif sign == "?":
            done.append(".")
            at += 1
        elif sign == "[" and (bracket := _bracket(pattern, at)):
            done.append(bracket[0])
            at = bracket[1]
        else:
            done.append(re.escape(sign))
            at += 1
    return "".join(done), min(at, len(pattern))


def _group(pattern: str, at: int, sign: str) -> tuple[str, int]:
    if sign == "!":  # of what stands beside it depends what it leaves over
        raise ValueError
    ways, at = list[str](), at + 1
    while pattern[at : at + 1] in ("(", "|"):
        way, at = _translated(pattern, at + 1, True)
        ways.append(way)
    if pattern[at : at + 1] != ")":
        raise ValueError
    return f"(?:{'|'.join(ways)}){sign if sign in '?*+' else ''}", at + 1


def _bracket(pattern: str, at: int) -> tuple[str, int] | None:
    """Return the expression for [...] and where it ends, None if nothing closes the bracket."""
    begin = at + 1
    negated = pattern[begin : begin + 1] in ("!", "^")
    place, done = begin + negated, list[str]()
    while place < len(pattern) and (pattern[place] != "]" or not done):
        if pattern[place] == "/":
            raise ValueError  # of file names alone it is said what it means
        if match := re.compile(r"\[:(\w+):\]").match(pattern, place):
            done.append(_CLASSES[match[1]] if match[1] in _CLASSES else _lost())
            place = match.end()
        elif pattern[place] == "[" and pattern[place + 1 : place + 2] in (".", "=", ":"):
            _lost()
        elif pattern[place] == "-" and done and pattern[place + 1 : place + 2] not in ("]", ""):
            done.append("-")
            place += 1
        else:
            place += pattern[place] == "\\"
            done.append(re.escape(pattern[place : place + 1]))
            place += 1
    if place >= len(pattern):
        return None
    return f"[{'^' if negated else ''}{''.join(done)}]", place + 1


def _lost() -> str:
    raise ValueError
