"""Make words of the pieces of text that a shell's expansions leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

BLANKS = " \t\n"  # what separates words where IFS is not set


class Open(str):
    """A word that is not known, and of which it is not known either how many words it is."""

    __slots__ = ()


class Absent(str):
    """An expansion without quotes of a variable that the script never sets: no word at all.

    As the value of a variable: that of one which the script never sets, so that it is empty.
    """

    __slots__ = ()


class Piece(NamedTuple):
    """A part of a word."""

    text: str
    splits: bool = False  # an expansion without quotes: the blanks in it separate words
    ends: bool = False  # a new word begins after this one, as between the elements of an array
    several: bool = False  # not known, and any number of words; with `splits`, that is so for its words with a $
    absent: bool = False  # never set, so that it adds nothing to a word
    quoted: bool = False  # no sign in it has a meaning in a pattern


def fields(pieces: Iterable[Piece], separators: str | None = BLANKS) -> list[str]:
    """Return the words that a shell makes of these pieces. `separators`: of IFS, None if it is not known."""
    words = _Words(separators)
    for piece in pieces:
        words.add(piece)
    words.end()
    return words.found


class _Words:
    def __init__(self, separators: str | None) -> None:
        self.found: list[str] = []
        self._separators = separators
        self._word: str | None = None
        self._kind: type[str] = str
        self._partly = False  # an expansion that is not known stands in the word
        self._after_blank = False  # a word has just been ended by a blank, to which another separator may belong

    def add(self, piece: Piece) -> None:
        if piece.several and not piece.splits:
            self._more(piece.text, Open)
        elif piece.absent:
            self._more(piece.text, Absent if self._word is None or self._kind is Absent else self._kind)
        elif not piece.splits:
            self._more(piece.text, Open if self._kind is Open else str)
        elif self._separators is None and piece.text:
            self._more("${IFS}", Open)
        else:
            for text in _signs(piece.text) if piece.several else piece.text:
                self._split(text)
                self._partly = self._partly or (piece.several and text[0] == "$")
        if piece.ends:
            self.end()

    def _split(self, sign: str) -> None:
        separators = self._separators or ""
        if sign not in separators:
            self._more(sign, Open if self._kind is Open else str)
        elif sign in BLANKS:
            blank = self._word is not None
            self.end()
            self._after_blank = blank or self._after_blank
        elif self._word is not None:
            self.end()
        elif self._after_blank:
            self._after_blank = False
        else:
            self.found.append("")

    def _more(self, text: str, kind: type[str]) -> None:
        self._word, self._kind = (self._word or "") + text, kind
        self._after_blank = False

    def end(self) -> None:
        if self._word is not None:
            kind = Open if self._partly else self._kind
            self.found.append(self._word if kind is str else kind(self._word))
        self._word, self._kind, self._partly, self._after_blank = None, str, False, False


def _signs(text: str) -> Iterator[str]:
    """Yield the characters of a text, and as one each expansion in it, which no separator takes apart."""
    at = 0
    while at < len(text):
        end, around = at + 1, ""
        if text[at] == "$":
            while sign := text[end : end + 1]:
                if sign in "({":
                    around += ")" if sign == "(" else "}"
                elif around and sign == around[-1]:
                    around = around[:-1]
                elif not around and not (sign.isalnum() or sign == "_"):
                    break
                end += 1
                if not around and sign in ")}":
                    break
        yield text[at:end]
        at = end


def settled(words: Iterable[str]) -> list[str]:
    """Return the words as arguments or elements: what is never set is none."""
    return [word for word in words if not isinstance(word, Absent)]


def is_open(words: Sequence[str]) -> bool:
    """Tell whether it is not known how many words these are."""
    return any(isinstance(word, Open) for word in words)
