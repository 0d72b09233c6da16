"""Reward functions of the form of an answer: a regular expression, and sections between tags such as <think>."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gspo_hpc.rewards.catalogue import reward_function

_TAG = re.compile(r"[A-Za-z][\w.-]*")


def check_tag(tag: str) -> None:
    """Raise ValueError for text that is no name of a tag; an empty one names none."""
    if tag and not _TAG.fullmatch(tag):
        raise ValueError(f"tag {tag!r} must be a name without brackets, such as answer for <answer>...</answer>")


def section(text: str, tag: str) -> str | None:
    """Return the text between the last <tag> and the </tag> after it; None if there is none, all if `tag` is empty."""
    if not tag:
        return text
    before, end, _ = text.rpartition(f"</{tag}>")
    _, begin, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if begin and end else None


def _check_regex(pattern: str, **_: Any) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None


@reward_function(check=_check_regex)
def regex(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    pattern: str,
    mode: Literal["full", "search"] = "full",
) -> float:
    """Return 1.0 if the whole completion (`full`) or any part of it (`search`) matches the pattern, else 0.0.

    The pattern has Python's syntax; flags go into it, as in "(?s)<think>.*</think>.*". White space around the
    completion is dropped first.
    """
    match = re.fullmatch if mode == "full" else re.search
    return float(match(pattern, completion.strip()) is not None)


def _check_tags(tags: Sequence[str] = ("think",), **_: Any) -> None:
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not tags:
        raise ValueError(f"tags is {tags!r}: it must be a list of names, such as [think, answer]")
    for tag in tags:
        if not isinstance(tag, str) or not tag:
            raise ValueError(f"tags has {tag!r}: it must be a list of names, such as [think, answer]")
        check_tag(tag)
    if len(set(tags)) < len(tags):
        raise ValueError(f"tags has a name twice: {', '.join(tags)}")


@reward_function(check=_check_tags)
def tag_format(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    tags: Sequence[str] = ("think", "answer"),
    text_after: bool = False,
    partial: bool = False,
) -> float:
    """Return 1.0 if the completion is a sequence of sections, <tag>...</tag> for each of `tags` in order, else 0.0.

    Each tag occurs exactly once, and there is only white space between the sections and around them; with `text_after`
    any text may follow the last one. With `partial`, the result is the share of opening and closing tags that occur
    exactly once, wherever they stand. Where the prompt ends with the first opening tag, as some chat templates make
    it, the completion need not repeat it.
    """
    if prompt.rstrip().endswith(f"<{tags[0]}>"):
        completion = f"<{tags[0]}>{completion}"
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    once = sum(completion.count(mark) == 1 for mark in marks)
    if partial:
        return once / len(marks)
    if once < len(marks):
        return 0.0
    sections = r"\s*".join(rf"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    match = re.match if text_after else re.fullmatch
    return float(match(rf"(?s)\s*{sections}\s*", completion) is not None)
