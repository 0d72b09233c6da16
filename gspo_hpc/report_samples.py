"""What the model answered, before and after, side by side. Floor 6, standard library only.

Everything here was written by a model or stands in a data set: it is cut, escaped, kept within its own box whatever its
reading direction, and its control characters are shown instead of sent.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_hpc.redact import redact
from gspo_hpc.report_data import RunData, value
from gspo_hpc.scales import number

LONGEST_TEXT = 2000  # characters of a prompt or completion
LONGEST_ANSWER = 160
MOST_PAIRS = 8
MOST_TRAINED = 6
_SPECIAL = re.compile(r"&lt;\|[^|<>&\n]{1,40}\|&gt;")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape(text: Any) -> str:
    """Text for HTML, in element content and in quoted attributes; always encodable as UTF-8."""
    whole = str(text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return html.escape(_CONTROL.sub(lambda c: chr(0x2400 + ord(c[0])) if ord(c[0]) < 32 else "\ufffd", whole))


def sample_section(run: RunData) -> str:
    """Evaluated prompts with their answers before and after, and some answers of the latest rollouts."""
    pairs = _pairs(run.samples)[:MOST_PAIRS]
    trained = [row for row in run.samples if row.get("phase") == "train"][-MOST_TRAINED:]
    frame = _frame([str((first or last or {}).get("prompt")) for first, last in pairs])
    parts = []
    if pairs:
        cards = "".join(_pair(first, last, frame) for first, last in pairs)
        around = (
            f'<details class="frame"><summary>What stands around every prompt</summary><div class="text">'
            f"{_text(frame[0] + ' … ' + frame[1])}</div></details>"
            if any(frame)
            else ""
        )
        parts.append(
            '<h2>Before and after</h2><p class="lead">The same unseen prompts, answered greedily by the model before '
            f'training and by the latest one that was evaluated.</p><div class="pairs">{cards}</div>{around}'
        )
    if trained:
        own = _frame([str(row.get("prompt")) for row in trained])
        cards = "".join(_card(row, _side(row, f"step {row.get('step')}"), own) for row in reversed(trained))
        inner = f'<div class="pairs">{cards}</div>'
        if pairs:
            inner = f"<details><summary>{len(trained)} completions of the latest rollouts</summary>{inner}</details>"
            parts.append(inner)
        else:
            parts.append(f'<h2>Samples</h2><p class="lead">Completions of the latest rollouts.</p>{inner}')
    return "".join(parts)


def _pairs(
    samples: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    """By prompt: its answer before training, and the latest one of a later evaluation."""
    before: dict[str, Mapping[str, Any]] = {}
    later: dict[str, Mapping[str, Any]] = {}
    for row in samples:
        if row.get("phase") == "before":
            before.setdefault(str(row.get("prompt")), row)
        elif row.get("phase") in ("during", "after"):
            later[str(row.get("prompt"))] = row
    prompts = list(dict.fromkeys([*before, *later]))
    return [(before.get(prompt), later.get(prompt)) for prompt in prompts]


def _frame(prompts: Sequence[str]) -> tuple[str, str]:
    """What all prompts begin and end with, in whole lines and template tokens: a chat template. None for one prompt."""
    if len(set(prompts)) < 2:
        return "", ""
    begin = os.path.commonprefix(list(prompts))
    begin = begin[: begin.rfind("\n") + 1]
    rest = [prompt[len(begin) :] for prompt in prompts]
    end = os.path.commonprefix([text[::-1] for text in rest])[::-1]
    first = re.search(r"\n|<\|", end)
    return begin, end[first.start() :] if first else ""


def _pair(first: Mapping[str, Any] | None, last: Mapping[str, Any] | None, frame: tuple[str, str]) -> str:
    row = first or last
    assert row is not None
    after = "After" if last is None or last.get("phase") == "after" else "Later"
    label = f"{after}, step {last.get('step')}" if last is not None else after
    return _card(row, f'<div class="sides">{_side(first, "Before")}{_side(last, label)}</div>', frame)


def _card(row: Mapping[str, Any], inner: str, frame: tuple[str, str]) -> str:
    begin, end = frame
    prompt = str(row.get("prompt")).removeprefix(begin).removesuffix(end)
    answer = row.get("answer")
    fields = answer if isinstance(answer, Mapping) else {"answer": answer} if answer is not None else {}
    known = "<br>".join(
        f"{escape(key)}: {escape(_cut_plain(inner if isinstance(inner, str) else json.dumps(inner, default=str)))}"
        for key, inner in list(redact(fields).items())[:4]
    )
    return (
        f'<article class="pair"><div class="asked"><div class="text" dir="auto">{_text(prompt)}</div>'
        f'<div class="answer">{known}</div></div>{inner}</article>'
    )


def _side(row: Mapping[str, Any] | None, label: str) -> str:
    if row is None:
        return f'<div class="side"><h4>{escape(label)}</h4><span class="none">not evaluated</span></div>'
    reward = value(row, "reward")
    kind = "" if reward is None else "good" if reward >= 0.999 else "bad" if reward <= 0.001 else "mid"
    shown = "" if reward is None else f"<b>reward {number(reward)}</b>"
    completion = _text(row.get("completion")) or '<span class="none">(empty)</span>'
    return (
        f'<div class="side {kind}"><h4><span>{escape(label)}</span>{shown}</h4>'
        f'<div class="text" dir="auto">{completion}</div></div>'
    )


def _text(raw: Any) -> str:
    """Cut, escaped, with the tokens of a chat template set back."""
    text = raw if isinstance(raw, str) else "" if raw is None else json.dumps(raw, default=str)
    shown = text[:LONGEST_TEXT].strip("\n")
    marked = _SPECIAL.sub(lambda token: f'<span class="tok">{token[0]}</span>', escape(shown))
    left = len(text) - LONGEST_TEXT
    return marked + (f'<span class="cut"> … {left:,} more characters</span>' if left > 0 else "")


def _cut_plain(text: str) -> str:
    return text if len(text) <= LONGEST_ANSWER else text[:LONGEST_ANSWER] + " …"
