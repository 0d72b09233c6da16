"""Reward functions of a text by itself, without a right answer: its length, its repetitions, its language.

The language of a word is judged by its Unicode script, not by a model of languages. These models are unreliable on the
few words between two formulas, and a reward that errs at random is a reward for nothing. A script finds what models do
when they mix languages, such as Chinese within English; it cannot tell English from French.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from gspo_hpc.rewards.catalogue import field_of, reward_function
from gspo_hpc.system.text import near_miss

_SCRIPTS = {  # of languages, by their codes of ISO 639-1; scripts as Unicode's names of characters begin
    **dict.fromkeys("en de fr es it pt nl pl cs sk sl hr ro hu fi sv da no tr vi id ms tl sw".split(), ("LATIN",)),
    **dict.fromkeys("ru uk bg mk sr be kk".split(), ("CYRILLIC",)),
    **dict.fromkeys("ar fa ur".split(), ("ARABIC",)),
    **dict.fromkeys("hi mr ne".split(), ("DEVANAGARI",)),
    "zh": ("CJK",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"),
    **{"ko": ("HANGUL",), "el": ("GREEK",), "he": ("HEBREW",), "th": ("THAI",), "ka": ("GEORGIAN",)},
    **{"bn": ("BENGALI",), "ta": ("TAMIL",), "te": ("TELUGU",), "gu": ("GUJARATI",), "kn": ("KANNADA",)},
    **{"ml": ("MALAYALAM",), "pa": ("GURMUKHI",), "si": ("SINHALA",), "am": ("ETHIOPIC",), "hy": ("ARMENIAN",)},
    **{"km": ("KHMER",), "lo": ("LAO",), "my": ("MYANMAR",)},
}
# Scripts that are written without spaces between words: each of their characters counts as a word.
_UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "THAI", "KHMER", "LAO", "MYANMAR"}
_MARK = "mark"
# Formulas, code, tags, commands and addresses have Latin letters in every language. Formulas in LaTeX's brackets are of
# bounded length: a text of opening brackets must not take time that grows with its square.
_NO_LANGUAGE = re.compile(
    r"(?s)```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.{0,500}?\\\)|\\\[.{0,1000}?\\\]|\\[A-Za-z]+|</?\w+>|https?://\S+"
)


def _check_length(target: int, limit: int, minimum: int = 0, **_: Any) -> None:
    if not 0 <= minimum <= target < limit:
        raise ValueError(
            f"minimum {minimum}, target {target} and limit {limit} do not fit: 0 <= minimum <= target < limit must hold"
        )


@reward_function(check=_check_length)
def length(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    response_length: int,
    target: int,
    limit: int,
    minimum: int = 0,
    unit: Literal["tokens", "characters"] = "tokens",
) -> float:
    """Return a penalty on long answers: 0.0 up to `target`, falling linearly to -1.0 at `limit` and beyond.

    This is DAPO's soft overlong punishment with `limit` as its largest length and `limit - target` as its cache. Below
    `minimum`, the result falls to -1.0 at 0.
    """
    used = response_length if unit == "tokens" else len(completion)
    if used < minimum:
        return used / minimum - 1.0
    return -min(1.0, max(0.0, (used - target) / (limit - target)))


def _check_repetition(ngram_size: int = 3, **_: Any) -> None:
    if ngram_size < 1:
        raise ValueError(f"ngram_size is {ngram_size}: it must be at least 1")


@reward_function(check=_check_repetition)
def repetition(completion: str, *, prompt: str, fields: Mapping[str, Any], ngram_size: int = 3) -> float:
    """Return a penalty on repetition: minus the share of n-grams of words that occurred before; 0.0 if none did.

    n is `ngram_size`. Upper and lower case are equal, and a character of a script without spaces, such as Chinese, is
    a word. With fewer words than n the result is 0.0.
    """
    words = [word for word, _ in words_of(unicodedata.normalize("NFC", completion.casefold()))]
    ngrams = list(zip(*(words[start:] for start in range(ngram_size)), strict=False))
    return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0


def _check_language(language: str = "", field: str = "", **_: Any) -> None:
    if bool(language) == bool(field):
        raise ValueError("give either language, such as en, or field, the name of the field of a row that has it")
    if language:
        _scripts_of(language)


def _check_language_row(fields: Mapping[str, Any], *, language: str = "", field: str = "") -> None:
    _scripts_of(language or field_of(fields, field))


@reward_function(check=_check_language, check_row=_check_language_row)
def language_consistency(
    completion: str, *, prompt: str, fields: Mapping[str, Any], language: str = "", field: str = ""
) -> float:
    """Return the share of the completion's words that are written in the script of a language, from 0.0 to 1.0.

    `language` is a code of ISO 639-1, such as en; instead of it, `field` names the field of the row that has the code.
    Numbers, formulas, code, tags and words of a single letter do not count, and a character of a script without spaces
    counts as a word. Languages of one script, such as English and French, are not told apart. 1.0 if there is no word.
    """
    scripts = _scripts_of(language or field_of(fields, field))
    text = _NO_LANGUAGE.sub(" ", unicodedata.normalize("NFKC", completion))
    words = [(word, script) for word, script in words_of(text) if script]  # without numbers
    own = [script in scripts for word, script in words if len(word) > 1 or script in _UNSPACED]
    return sum(own) / len(own) if own else 1.0


def words_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the words and numbers of a text, each with its script, which is empty for a number.

    A word ends where the script changes. A character of a script without spaces is a word.
    """
    word, written = "", ""
    for character in f"{text} ":
        script = _script(character)
        if script == _MARK and word:
            word += character
            continue
        if word and (script != written or script in _UNSPACED):
            yield word, written
            word = ""
        if script not in (None, _MARK):
            word, written = word + character, script


@lru_cache(maxsize=65536)
def _script(character: str) -> str | None:
    """Return the script of a letter, "" for a digit, _MARK for an accent or a vowel sign, None for others."""
    if unicodedata.category(character).startswith("M") or character in "\u200c\u200d":
        return _MARK
    if not character.isalnum():
        return None
    return unicodedata.name(character, "").partition(" ")[0] if character.isalpha() else ""


def _scripts_of(language: Any) -> tuple[str, ...]:
    found = _SCRIPTS.get(language) if isinstance(language, str) else None
    if found is None:
        wrong = near_miss(str(language), sorted(_SCRIPTS), known=True)
        raise ValueError(f"language {language!r} is not a known code of ISO 639-1{wrong}")
    return found
