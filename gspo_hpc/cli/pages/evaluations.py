"""The pages of ``gspo-hpc rescore`` and ``gspo-hpc compare``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from gspo_hpc.cli.pages.render import grid, item, text
from gspo_hpc.evaluation import stored
from gspo_hpc.evaluation.compare import Comparison, Difference, Part
from gspo_hpc.evaluation.rescore import Rescored
from gspo_hpc.evaluation.scores import Scores
from gspo_hpc.evaluation.stored import Stored
from gspo_hpc.runs import reader
from gspo_hpc.system.text import counted

_MOST_FAILURES = 3  # kinds of failures that are shown


def rescored(found: Rescored) -> Iterator[RenderableType]:
    """Yield the parts of the page of completions that are graded again."""
    yield text(f"{found.old.path}: {_about(found.old)}")
    old, new = found.old.scores(), found.new.scores()
    rows = [("", f"old: {found.old.deciders}", f"new: {found.new.deciders}")]
    for name in dict.fromkeys([*old, *new]):
        if not name.endswith(("_low", "_high")):
            rows.append((name.removeprefix("eval/"), _score(old, name), _score(new, name)))
    yield grid(rows, wrapped=0)
    for kind, counts in (("greedy answers", found.greedy), ("samples", found.samples)):
        if total := counts.total():
            better, worse = counts[False, True], counts[True, False]
            yield text(f"of {total:,} {kind}, {better:,} became right and {worse:,} became wrong")
    for failure, count in found.failed.most_common(_MOST_FAILURES):
        yield item(f"{counted(count, 'completion')} without a reward: ", failure)
    if (more := len(found.failed) - _MOST_FAILURES) > 0:
        yield text(f"{counted(more, 'further failure')}: --json has all of them")


def compared(found: Comparison) -> Iterator[RenderableType]:
    """Yield the parts of the page of two evaluations."""
    for name, side in (("first ", found.first), ("second", found.second)):
        left = len(side.prompts) - found.whole.prompts
        out = f", of which {left:,} {'is' if left == 1 else 'are'} left out: the other has none of them" if left else ""
        yield text(f"{name}  {side.path}: {_about(side)}{out}")
    how = ", by their rows of the data: the texts that the models saw differ" if found.by_row else ""
    yield text(f"{counted(found.whole.prompts, 'prompt')} in common{how}")
    rows = [("", "first", "second", "difference", "95 % interval"), *_rows(found, "", found.whole)]
    for part, scores in found.parts.items():
        rows += _rows(found, part, scores)
    yield grid(rows, wrapped=0)
    for name, side in (("first", found.first), ("second", found.second)):
        if count := sum(not one.greedy.graded for one in side.prompts):
            failure = stored.most_common_failure(one.raw for one in side.prompts)
            yield text(f"{name}: {counted(count, 'greedy answer')} {reader.told_not_graded(failure)}")
    if found.only_first is None or found.only_second is None:
        return
    yield text(
        f"right greedy answers of one alone: {found.only_first:,} of the first, {found.only_second:,} of the second; "
        f"McNemar's exact test: p = {found.p_value:.4g}"
    )


def _rows(found: Comparison, name: str, part: Part) -> Iterator[tuple[str, str, str, str, str]]:
    prefix = f"{name}/" if name else ""
    yield f"{prefix}accuracy", *_difference(part.accuracy)
    if part.average is not None:
        sides = [one for side in (found.first, found.second) for one in side.prompts if name in ("", one.part)]
        counts = sorted({len(one.samples) for one in sides} - {0})
        yield f"{prefix}avg@{'/'.join(map(str, counts))}", *_difference(part.average)


def _about(side: Stored) -> str:
    step = "" if side.step is None else f"step {side.step}, "
    counts = " or ".join(map(str, side.samples))
    samples = f" with {counted(side.samples[0], 'sample') if len(side.samples) == 1 else f'{counts} samples'}"
    return f"{step}{counted(len(side.prompts), 'prompt')}{samples if any(side.samples) else ''}"


def _score(scores: Scores, name: str) -> str:
    if name not in scores:
        return "0.0000" if name == "eval/ungraded" else "not known"
    interval = (
        "" if scores.get(f"{name}_low") is None else f" ({scores[f'{name}_low']:.4f} to {scores[f'{name}_high']:.4f})"
    )
    return f"{_number(scores[name])}{interval}"


def _number(score: float | None) -> str:
    return "not graded" if score is None else f"{score:.4f}"


def _difference(found: Difference) -> tuple[str, str, str, str]:
    sides = _number(found.first), _number(found.second)
    if found.difference is None:
        return *sides, "", ""
    return *sides, f"{found.difference:+.4f}", f"{found.low:+.4f} to {found.high:+.4f}"
