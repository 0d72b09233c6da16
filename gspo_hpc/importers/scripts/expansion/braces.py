"""Make the words that bash makes of {a,b} and {1..3}, or find them where they are not followed."""

from __future__ import annotations

import re

from gspo_hpc.importers.scripts.expansion.splitting import Open

_BRACES = re.compile(r"(?<!\$)\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_NUMBERS = re.compile(r"\{(-?\d{1,9})\.\.(-?\d{1,9})\}")
_PLAIN = re.compile(r"(?!~)[\w./:,=+@%{}-]+")
_LISTS = re.compile(r"\{((?:[^{},.]|\.(?!\.))*,(?:[^{}.]|\.(?!\.))*)\}")
_MOST = 64  # numbers of one word
_INSIDE = re.compile(r"""\$\{\w+\}|"[^"]*"|'[^']*'""")  # what may stand within them beside literal text


def marked(text: str) -> str:
    """Return literal text with its braces as what is not known, ``$({a,b})``."""
    return _BRACES.sub(lambda match: f"$({match[0]})", text)


def expanded(kind: str, raw: str) -> list[str]:
    """Return the words that a word of a script becomes by its braces, if all else in it is plain; nothing for others.

    `kind`: of the word, as the grammar calls it.
    """
    if kind == "brace_expression":
        return numbers(raw)
    parts = _LISTS.split(raw) if kind in ("word", "concatenation") and _PLAIN.fullmatch(raw) else []
    if len(parts) < 3 or any(sign in part for part in parts[::2] for sign in "{}"):
        return []
    words = [parts[0]]
    for inner, after in zip(parts[1::2], parts[2::2], strict=True):
        words = [f"{word}{one}{after}" for word in words for one in inner.split(",")][: _MOST + 1]
    return [word for word in words if word] if len(words) <= _MOST else []


def numbers(raw: str) -> list[str]:
    """Return the words that {1..3} becomes; where it is another one, or has zeros in front, one that is not known."""
    match = _NUMBERS.fullmatch(raw)
    first, last = (int(match[1]), int(match[2])) if match else (0, _MOST)
    if abs(last - first) >= _MOST or raw != f"{{{first}..{last}}}":
        return [Open(f"$({raw})")]
    step = 1 if last >= first else -1
    return [str(number) for number in range(first, last + step, step)]


def mixed(raw: str) -> str:
    """Return a word whose braces have more than literal text inside, with these as what is not known; else nothing."""
    if not any("$" in match[0] for match in _BRACES.finditer(_INSIDE.sub("$x", raw))):
        return ""
    begin = next((match.start() for match in re.finditer(r"(?<!\$)\{", raw)), 0)
    return f"{raw[:begin]}$({raw[begin:]})"
