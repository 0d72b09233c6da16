"""The reward of a task of reasoning-gym: the package's own score of an answer, in the pool's processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gspo_hpc.rewards.catalogue import Graded, field_of, reward_function
from gspo_hpc.rewards.formats import check_tag, section

_FIELD = "reasoning_gym"  # of a row: name and options of its task, and its entry


def _prepare() -> None:
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        from gspo_hpc.data.gym_tasks import INSTALL

        raise ImportError(f"reasoning-gym is not installed ({error}): {INSTALL}") from None


def _check(tag: str = "answer", **_: Any) -> None:
    check_tag(tag)


def _check_row(fields: Mapping[str, Any], **_: Any) -> None:
    row = field_of(fields, _FIELD)
    if not isinstance(row, Mapping) or not {"task", "options", "entry"} <= row.keys():
        raise ValueError(f"the field {_FIELD!r} is none of a row that data.train=reasoning_gym:TASK makes")


def _answered(completion: str, *, tag: str = "answer", **_: Any) -> str | None:
    return (section(completion, tag) or "").strip() or None


@reward_function(check=_check, check_row=_check_row, prepare=_prepare, answered=_answered)
def reasoning_gym(completion: str, *, prompt: str, fields: Mapping[str, Any], tag: str = "answer") -> float:
    """Return the score, from 0.0 to 1.0, that reasoning-gym gives the last <answer>...</answer> of the completion.

    `tag` is another tag; with an empty one the whole completion is the answer. The row is one of reasoning_gym:TASK.
    """
    from gspo_hpc.data.gym_tasks import unpacked

    _check_row(fields)
    answer, row = section(completion, tag), fields[_FIELD]
    if answer is None:
        return Graded(0.0, "unparsable")
    scorer = _scorer(row["task"], json.dumps(row["options"], sort_keys=True))
    score = float(scorer.score_answer(answer.strip(), unpacked(row["entry"])))
    return Graded(score, "right" if score >= 1.0 else "wrong")


@lru_cache(maxsize=64)
def _scorer(task: str, options: str) -> Any:
    """Return the object that scores a task; some take seconds to be made."""
    import reasoning_gym as library

    return library.create_dataset(task, size=1, seed=0, **json.loads(options))
