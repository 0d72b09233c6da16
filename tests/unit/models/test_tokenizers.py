"""Two tokenizers compared by their files.

It would catch a teacher that reads other words than the student wrote, and one that is refused although every token
has the same meaning: with another chat template, with another end of an answer, or in a file of another version.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.models.tokenizers import difference


def content() -> dict[str, Any]:
    """The parts of a tokenizer.json that say what a token is."""
    return {
        "version": "1.0",
        "added_tokens": [{"id": 3, "content": "<|end|>", "special": True}],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    }


def folder(path: Path, given: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(given))
    return path


def other_vocabulary(given: dict[str, Any]) -> None:
    given["model"]["vocab"] = {"a": 1, "b": 0, "ab": 2}


def more_tokens(given: dict[str, Any]) -> None:
    given["added_tokens"].append({"id": 4, "content": "<think>", "special": False})


def other_special(given: dict[str, Any]) -> None:
    given["added_tokens"][0]["id"] = 4


def other_merges(given: dict[str, Any]) -> None:
    given["model"]["merges"] = ["b a"]


def other_kind(given: dict[str, Any]) -> None:
    given["model"] = {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (other_vocabulary, 'token "a" has the number 1, not 0, and 1 more differ'),
        (more_tokens, 'added token "<think>" has the number 4, not none'),
        (other_special, 'added token "<|end|>" has the number 4, not 3'),
        (other_merges, "its merges differ"),
        (other_kind, "it is of type Unigram, not BPE"),
    ],
)
def test_what_differs_is_said(change: Callable[[dict[str, Any]], None], expected: str, tmp_path: Path) -> None:
    changed = content()
    change(changed)
    assert difference(folder(tmp_path / "own", content()), folder(tmp_path / "its", changed)) == expected


def test_what_changes_no_token_may_differ(tmp_path: Path) -> None:
    """The version, spaces, how merges are written, a template, and which token ends an answer."""
    changed = content() | {"version": "2.0", "truncation": None}
    changed["model"]["merges"] = [["a", "b"]]
    own, its = folder(tmp_path / "own", content()), folder(tmp_path / "its", changed)
    (its / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": "{{ m }}"}))
    assert difference(own, its) is None
    assert difference(own, own) is None


def test_files_of_other_formats(tmp_path: Path) -> None:
    own, its = folder(tmp_path / "own", content()), tmp_path / "its"
    its.mkdir()
    (its / "tokenizer.model").write_bytes(b"pieces")
    assert difference(own, its) == f"{its} has no tokenizer.json, so they cannot be compared"
    (own / "tokenizer.json").unlink()
    (own / "tokenizer.model").write_bytes(b"others")
    assert difference(own, its) == "tokenizer.model differs"
    (own / "tokenizer.model").write_bytes(b"pieces")
    assert difference(own, its) is None
    for name in ("vocab.json", "merges.txt"):
        for one in (own, its):
            (one / "tokenizer.model").unlink(missing_ok=True)
            (one / name).write_text("{}")
    (its / "merges.txt").write_text("a b")
    assert difference(own, its) == "merges.txt differs"
