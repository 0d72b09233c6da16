"""Find {a,b} and {1..3} in words, of which bash makes several words: they are not followed."""

from __future__ import annotations

import re

_BRACES = re.compile(r"(?<!\$)\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_INSIDE = re.compile(r"""\$\{\w+\}|"[^"]*"|'[^']*'""")  # what may stand within them beside literal text


def marked(text: str) -> str:
    """Return literal text with its braces as what is not known, ``$({a,b})``."""
    return _BRACES.sub(lambda match: f"$({match[0]})", text)


def mixed(raw: str) -> str:
    """Return a word whose braces have more than literal text inside, with these as what is not known; else nothing."""
    if not any("$" in match[0] for match in _BRACES.finditer(_INSIDE.sub("$x", raw))):
        return ""
    begin = next((match.start() for match in re.finditer(r"(?<!\$)\{", raw)), 0)
    return f"{raw[:begin]}$({raw[begin:]})"
