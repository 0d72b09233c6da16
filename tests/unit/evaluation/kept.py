"""Stored evaluations for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config.loader import from_dict
from gspo_hpc.evaluation import stored
from gspo_hpc.evaluation.stored import Stored
from gspo_hpc.runs.directory import RunDir, open_run


def answer(text: str, right: bool) -> dict[str, Any]:
    """One completion as an evaluation with number_match keeps it."""
    return {
        "text": text,
        "tokens": list(range(len(text))),
        "sampled": len(text),
        "finish_reason": "stop",
        "reward": float(right),
        "reward_parts": {"number_match": float(right)},
        "outcomes": {},
        "failure": None,
        "graded": True,
        "right": right,
        "answer": text,
    }


def row(number: int, greedy: bool, samples: Sequence[bool] = (), **more: Any) -> dict[str, Any]:
    """A prompt whose right answer is its number, and a completion for each truth value."""
    told = {True: str(number), False: "-1"}
    return {
        "step": 3,
        "decides": "number_match",
        "row": number,
        "prompt": f"which number is {number}?",
        "fields": {"answer": number},
        "greedy": answer(told[greedy], greedy),
        "samples": [answer(told[one], one) for one in samples],
    } | more


def evaluation(path: Path, *rows: dict[str, Any]) -> Stored:
    """The evaluation of these rows, by way of its file."""
    stored.write(path, rows)
    return stored.read(path)


def made_run(path: Path, **reward: Any) -> RunDir:
    """A run that has begun, with number_match or these rewards."""
    config = {"run": {"dir": str(path)}, "reward": {"functions": [{"function": "number_match"}], **reward}}
    return open_run(from_dict(config))[0]
