"""Disguise signs that bash takes as they are and the grammar of tree-sitter-bash stumbles over.

Each becomes a control character, which the grammar takes for a letter, and of which a byte is one as before; what is
read of the tree has the signs again.
"""

from __future__ import annotations

import re

_SIGNS = '()|{;&\\"+! [<>]'
_LETTERS = "\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x01\x02\x03"
BRACKET, LESS, MORE, CLOSING = "\x19\x01\x02\x03"
DOLLAR = "\x04"  # only where no name follows it
_DISGUISE = str.maketrans(_SIGNS, _LETTERS)
_SHOWN = bytes.maketrans((_LETTERS + DOLLAR).encode(), (_SIGNS + "$").encode())
_TOKEN = re.compile(
    r"(?P<default>\$\{\w+(?:\[[^\]\s]*\])?:?[-=+])|\$\{|\$?\(\(?|\\.|\$'(?:\\.|[^'\\])*'|"
    r"(?P<group>(?<!\$)[?*+@!]\()|(?<!\S)(?:\[\[|\]\])(?!\S)|[)}'\"{|;&]",
    re.DOTALL,
)
_FAR = 4096  # characters of a group


def shown(text: bytes) -> str:
    """Return the text of a part of the tree, with all signs as they stand in the script."""
    return text.translate(_SHOWN).decode("utf-8", "surrogatepass")


def disguised(text: str) -> str:
    """Return a script with signs disguised in groups of patterns, +(a|b), and in defaults, ${X:-{"a": 1}}."""
    done: list[str] = []
    around: list[str] = []  # quotes and brackets that are open
    at = 0
    tests = False
    extended = "extglob" in text  # outside of [[ ]], bash reads such groups only then
    while match := _TOKEN.search(text, at):
        token, inner = match[0], around[-1] if around else ""
        quoted = next((sign for sign in reversed(around) if sign[0] != "$"), "") == '"'
        done.append(text[at : match.start()])
        at = match.end()
        if match["default"]:
            around.append("$-")
        elif token == "${":
            around.append("$")
        elif token == '"':
            around.pop() if inner == '"' else around.append(token)
        elif token[0] == "\\":
            token = token.translate(_DISGUISE) if inner == "$-" and quoted and token[1] == '"' else token
        elif token == "}":
            around.pop() if inner[:1] == "$" else None
        elif token == "'" and (inner[:1] == "$" or not quoted):
            end = text.find("'", at) + 1 or len(text)
            token, at = text[match.start() : end], end
        elif inner == "$-" and token in ("{", "|", ";", "&", "(", "((", ")"):
            token = token.translate(_DISGUISE)
        elif token[:2] in ("$(", "((") or (token[0] == "(" and not quoted):
            around += "(" * token.count("(")
        elif token == ")":
            around.pop() if inner == "(" else None
        elif token in ("[[", "]]") and not quoted:
            tests = token == "[["
        elif match["group"] and not quoted:
            within = tests or (extended and (token[0] != "!" or not text[match.start() - 1 : match.start()].isspace()))
            if within and inner[:1] != "$" and (end := _end(text, at)):
                token, at = _group(text[match.start() : end]), end
            else:
                around.append("(")
        done.append(token)
    return "".join(done) + text[at:]


def _end(text: str, at: int) -> int:
    """Return where a group ends of which the inside begins at a place, 0 if nothing closes it."""
    open_ones, quote = 1, ""
    while at < min(len(text), at + _FAR) and text[at] != "\n":
        sign = text[at]
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "\\":
            at += 1
        else:
            open_ones += (sign == "(") - (sign == ")")
        at += 1
        if not open_ones:
            return at
    return 0


def _group(text: str) -> str:
    """Return a group without signs that the grammar knows; what is quoted in it stays as it is."""
    parts = re.split(r"""(\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|\$\([^)]*\))""", text)
    return "".join(part if number % 2 else part.translate(_DISGUISE) for number, part in enumerate(parts))
