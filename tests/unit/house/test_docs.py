"""The pages in docs/ show what the program prints: every command of batch-arithmetic.md is run and compared."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main

DOCS = Path(__file__).resolve().parents[3] / "docs"
ARITHMETIC = (DOCS / "batch-arithmetic.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A command, and lines of its page: each is in it, in this order."""

    command: str
    lines: tuple[str, ...]


def examples(text: str) -> list[Example]:
    found = []
    for kind, block in _BLOCK.findall(text):
        if kind == "console":
            first, *lines = block.splitlines()
            assert first.startswith("$ ") and lines, block
            found.append(Example(first.removeprefix("$ "), tuple(lines)))
    return found


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page speaks of."""
    (source,) = [block for kind, block in _BLOCK.findall(ARITHMETIC) if kind == "yaml"]
    name = re.match(r"# (\S+)\n", source)
    assert name is not None
    (tmp_path / name[1]).write_text(source)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 8000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("example", examples(ARITHMETIC), ids=lambda example: example.command[21:90])
def test_the_arithmetic_page_is_what_plan_prints(
    example: Example, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(example.command)
    assert program == "gspo-hpc"
    code = main(words)
    page = plain(capsys.readouterr().out)
    place = 0
    for line in map(plain, example.lines):
        found = page.find(line, place)
        assert found >= 0, f"{line!r} is not there, or not after what stands above it:\n{page}"
        place = found + len(line)
    head = example.lines[0]
    assert head.startswith("plan of ")
    assert code == (3 if head.endswith("what is given is valid; a run needs more") else 2)


def test_the_page_has_all_worked_cases() -> None:
    shown = {example.command.removeprefix("gspo-hpc plan batch.yaml").strip() for example in examples(ARITHMETIC)}
    two = "cluster.nodes=2"
    for name, command in {
        "E1": "",
        "E2": two,
        "E2a": f"{two} batch.global_batch_size=32 batch.steps_per_generation=1",
        "E2b": f"{two} batch.steps_per_generation=4",
        "E2c": f"{two} batch.global_batch_size=32",
        "E3": f"{two} batch.micro_batch_size=2 batch.global_batch_size=32",
        "E3a": f"{two} batch.micro_batch_size=2 batch.global_batch_size=64",
        "E3b": f"{two} batch.micro_batch_size=2 batch.global_batch_size=32 batch.num_generations=2",
        "Q1": f"{two} batch.steps_per_generation=1",
        "Q3": "batch.micro_batch_size=2 batch.steps_per_generation=3",
    }.items():
        assert command in shown, name
    assert len(shown) == len(examples(ARITHMETIC)) > 20
