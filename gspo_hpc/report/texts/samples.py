"""The completions that the report shows: evaluated prompts before and after training, and some of the latest rollouts.

All of this was written by a model or comes from a data set. It is cut to a bounded length here; the templates escape
it and keep each text in a box of its own, whatever its reading direction.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_hpc.report.scales import number
from gspo_hpc.runs.reader import RunData, value
from gspo_hpc.system.redact import redact

LONGEST_TEXT = 2000  # characters of a prompt or completion
LONGEST_ANSWER = 160
MOST_FIELDS = 4  # fields of an answer
MOST_PAIRS = 8
MOST_TRAINED = 6
_ORDER = ("fell", "rose", "")  # of changes, as they are shown
_SPECIAL = re.compile(r"""(<\|[^|<>&"'\n]{1,40}\|>)""")


@dataclass(frozen=True)
class Piece:
    """Part of a text; `token` marks a special token of the chat template, such as ``<|im_end|>``."""

    text: str
    token: bool


@dataclass(frozen=True)
class Passage:
    """A text cut to LONGEST_TEXT characters, and how many characters that left out."""

    pieces: tuple[Piece, ...]
    left_out: int


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt; `passage` is None where the prompt was not evaluated."""

    label: str
    passage: Passage | None
    reward: str = ""
    tone: str = ""  # "good", "bad" or "mid"; empty without a reward


@dataclass(frozen=True)
class Card:
    """A prompt, the fields of its reference answer, and its completions side by side."""

    prompt: Passage
    fields: tuple[str, ...]
    completions: tuple[Completion, ...]
    change: str = ""  # what became of its reward between the evaluations: "fell", "rose" or empty


@dataclass(frozen=True)
class Samples:
    """Everything that the section of samples shows; `shared` is what all evaluated prompts begin and end with."""

    pairs: tuple[Card, ...]
    shared: Passage | None
    trained: tuple[Card, ...]
    changes: str = ""  # how many of the compared prompts changed, as a sentence; empty if none was compared


def samples(run: RunData) -> Samples:
    """Return the evaluated prompts with their completions before and after, and the latest completions of rollouts.

    Prompts whose reward changed come first, and of these the ones whose reward fell.
    """
    every = _pairs(run.samples)
    pairs = sorted(every, key=lambda pair: _ORDER.index(_change(*pair)))[:MOST_PAIRS]
    trained = [row for row in run.samples if row.get("phase") == "train"][-MOST_TRAINED:]
    frame = frame_of([str((first or last or {}).get("prompt")) for first, last in pairs])
    own = frame_of([str(row.get("prompt")) for row in trained])
    return Samples(
        pairs=tuple(_pair(first, last, frame) for first, last in pairs),
        shared=passage(frame[0] + " … " + frame[1]) if any(frame) else None,
        trained=tuple(_card(row, own, _completion(row, f"Step {row.get('step')}")) for row in reversed(trained)),
        changes=_changes(every),
    )


def _change(first: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> str:
    before, after = (None if row is None else value(row, "reward") for row in (first, last))
    if before is None or after is None or before == after:
        return ""
    return "rose" if after > before else "fell"


def _changes(pairs: Sequence[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]) -> str:
    compared = sum(first is not None and last is not None for first, last in pairs)
    if not compared:
        return ""
    found = [_change(*pair) for pair in pairs]
    rose, fell = found.count("rose"), found.count("fell")
    more = f"; {len(pairs) - MOST_PAIRS} more are in samples.jsonl" if len(pairs) > MOST_PAIRS else ""
    return f"Of {compared} compared prompts the reward of {rose} rose and that of {fell} fell{more}."


def _pairs(
    rows: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    """Return for each prompt its sample before training and that of the latest later evaluation."""
    before: dict[str, Mapping[str, Any]] = {}
    later: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row.get("phase") == "before":
            before.setdefault(str(row.get("prompt")), row)
        elif row.get("phase") in ("during", "after"):
            later[str(row.get("prompt"))] = row
    prompts = list(dict.fromkeys([*before, *later]))
    return [(before.get(prompt), later.get(prompt)) for prompt in prompts]


def frame_of(prompts: Sequence[str]) -> tuple[str, str]:
    """Return what all prompts begin and end with, in whole lines and special tokens: usually the chat template.

    Both are empty if there is only one prompt, which has nothing to be compared with.
    """
    if len(set(prompts)) < 2:
        return "", ""
    begin = os.path.commonprefix(list(prompts))
    begin = begin[: max((found.end() for found in re.finditer(r"\n|\|>", begin)), default=0)]
    rest = [prompt[len(begin) :] for prompt in prompts]
    end = os.path.commonprefix([text[::-1] for text in rest])[::-1]
    first = re.search(r"\n|<\|", end)
    return begin, end[first.start() :] if first else ""


def _pair(first: Mapping[str, Any] | None, last: Mapping[str, Any] | None, frame: tuple[str, str]) -> Card:
    row = first or last
    assert row is not None
    after = "After" if last is None or last.get("phase") == "after" else "Later"
    label = f"{after}, step {last.get('step')}" if last is not None else after
    return replace(
        _card(row, frame, _completion(first, "Before"), _completion(last, label)), change=_change(first, last)
    )


def _card(row: Mapping[str, Any], frame: tuple[str, str], *completions: Completion) -> Card:
    begin, end = frame
    prompt = str(row.get("prompt")).removeprefix(begin).removesuffix(end)
    return Card(passage(prompt), tuple(fields(row.get("answer"))), completions)


def fields(answer: Any) -> Iterator[str]:
    """Yield the fields of a data row as text, without secrets; a few of them, and not all of a long one."""
    given = answer if isinstance(answer, Mapping) else {"answer": answer} if answer is not None else {}
    for key, inner in list(redact(given).items())[:MOST_FIELDS]:
        text = inner if isinstance(inner, str) else json.dumps(inner, default=str)
        yield f"{key}: {text if len(text) <= LONGEST_ANSWER else text[:LONGEST_ANSWER] + ' …'}"


def _completion(row: Mapping[str, Any] | None, label: str) -> Completion:
    if row is None:
        return Completion(label, None)
    shown, reward = passage(row.get("completion")), value(row, "reward")
    return Completion(label, shown) if reward is None else Completion(label, shown, number(reward), tone(reward))


def tone(reward: float | None) -> str:
    """Return how to colour a reward: "good" and "bad" for the ends of a share, "mid" between, "" for none."""
    if reward is None:
        return ""
    return "good" if reward >= 0.999 else "bad" if reward <= 0.001 else "mid"


def passage(raw: Any, longest: int = LONGEST_TEXT) -> Passage:
    """Return a text that a model or a data set supplied, cut to `longest` characters, with its special tokens apart."""
    text = raw if isinstance(raw, str) else "" if raw is None else json.dumps(raw, default=str)
    shown = text[:longest].strip("\n")
    parts = _SPECIAL.split(shown)  # special tokens stand at the odd places
    pieces = tuple(Piece(part, token=index % 2 == 1) for index, part in enumerate(parts) if part)
    return Passage(pieces, max(0, len(text) - longest))
