"""Docstrings that a first reader understands: each begins with a verb in the imperative or with a noun."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# A sentence that begins so has lost its subject, or its verb: "Of a model whose sizes are known."
FRAGMENTS = frozenset(
    "of what whether that by those where when how which who whose with without if as for from in on at to but and or "
    "nothing not no".split()
)
# Third person, "Returns ..." where "Return ..." is meant: nouns that end in s are not here.
THIRD_PERSON = frozenset(
    "adds allows applies asks begins builds calls collects compares computes converts copies counts "
    "creates decides deletes drops ends fills finds gives goes hands holds keeps lets lifts lists loads looks makes "
    "marks measures moves notes opens parses prints puts raises reads removes renders replaces resets resolves "
    "returns runs says sends sets shows sleeps starts stops takes tells tries turns updates verifies waits "
    "wakes watches writes yields".split()
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring in a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def opening(text: str) -> str:
    """The first word, without quotes, commas or backticks."""
    return text.split()[0].strip("`\"'():,.;").lower()


def mistakes(paths: list[Path]) -> list[str]:
    """Places of docstrings that begin with a fragment or in the third person."""
    return [
        f"{path}:{line}: {text.splitlines()[0][:80]}"
        for path in paths
        for line, text in docstrings(path)
        if opening(text) in FRAGMENTS | THIRD_PERSON
    ]


def test_docstrings_begin_with_a_verb_or_a_noun(project: Path) -> None:
    paths = [path for folder in ("gspo_hpc", "tools") for path in sorted((project / folder).rglob("*.py"))]
    assert len(paths) > 100
    found = mistakes(paths)
    assert not found, "\n".join([f"{len(found)} docstrings:", *found])


def test_a_planted_fragment_is_caught(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Sizes."""\ndef f():\n    """Of a model."""\ndef g():\n    """Returns it."""\n')
    assert [line.split(":")[1] for line in mistakes([tmp_path / "a.py"])] == ["2", "4"]
