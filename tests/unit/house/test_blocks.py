"""Every block of commands or Python in the documentation is run by a test, or says above it what it needs.

It takes half a minute, for some forty commands that need neither a model nor a GPU. It catches a block that fails as it
stands, output that a page shows and a command no longer prints, and a block that nobody runs and nothing marks.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.paths import PRESETS as PRESET_FOLDER
from tests import blocks, pages
from tests.unit.importers.test_swift import SWIFT_DENSE

# Pages whose blocks are run by a test of their own. It holds the text of the page, as one of its values.
ELSEWHERE = {
    "docs/batch-arithmetic.md": "tests.unit.house.test_docs",
    "docs/your-task.md": "tests.unit.house.test_your_task",
}
CHINESE = [page for page in pages.PAGES if "zh" in page.name or page.parent.name == "zh"]  # equal to the English ones
PAGES = [page for page in pages.PAGES if page not in CHINESE]
# Its examples, below this heading, are run by the tests that take them by their heading (tests/examples.py).
EXAMPLES = ("CONTRIBUTING.md", "\n## One way to add a thing\n", "\n## Style\n")
PRESETS = {path.stem for path in PRESET_FOLDER.glob("*.yaml")}
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|[…\[]|\.\.\.|/path/")


def text_of(page: Path) -> str:
    """The page, without the examples that other tests run."""
    text = page.read_text("utf-8")
    name, start, end = EXAMPLES
    return text.split(start)[0] + text.split(end)[1] if pages.name_of(page) == name else text


HERE = [
    page
    for page in PAGES
    if pages.name_of(page) not in ELSEWHERE and any(not one.reason for one in blocks.blocks(text_of(page)))
]


def unrun(text: str) -> list[str]:
    """Commands of a page that nobody would run: a reason that is none, and commands outside the blocks that are run."""
    found = []
    for block in blocks.blocks(text):
        if block.reason is None:
            continue
        if block.reason not in blocks.REASONS:
            found.append(f"{block.reason!r} is none of {', '.join(blocks.REASONS)}")
        elif not re.search(blocks.REASONS[block.reason], block.text):
            found.append(f"{block.reason}: nothing in the block shows it: {block.text}")
    fenced = re.findall(r"(?ms)^```(\w*)[^\n]*\n(.*?)^```$", text)
    lines = [line for kind, block in fenced if not kind for line in block.splitlines()]
    lines += re.findall(r"(?m)^    (\S.*)$", re.sub(r"(?ms)^```.*?^```$", "", text))
    for line in lines:
        if re.match(r"(gspo-hpc|python|bash) \S", line) and not PLACEHOLDER.search(line):
            found.append(f"a command outside a block of bash or console: {line}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_blocks_are_run_or_say_what_they_need(page: Path) -> None:
    assert unrun(text_of(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_marked_blocks_can_be_pasted(page: Path) -> None:
    for block in blocks.blocks(text_of(page)):
        if block.reason is None:
            continue
        command = [sys.executable, "-c", "import sys; compile(sys.stdin.read(), 'block', 'exec')"]
        command = command if block.kind == "python" else ["bash", "-n"]
        done = subprocess.run(command, input=block.text, text=True, capture_output=True, check=False)
        assert done.returncode == 0 and "…" not in block.text, block.text + done.stderr


def starts(text: str) -> list[list[str]]:
    """The configs of commands in blocks that no quick test runs, each with the settings that it is given."""
    found = []
    for block in blocks.blocks(text):
        if block.reason is None or block.kind == "python":
            continue
        for line in re.findall(
            r"(?m)^(?:\S*/)?gspo-hpc (?:train|submit|try|eval) (.*)$", block.text.replace("\\\n", " ")
        ):
            config, *words = shlex.split(line, comments=True)
            words = words[: words.index("--array")] if "--array" in words else words
            if Path(config).suffix == ".yaml" or config in PRESETS:
                found.append([config, *(word for word in words if re.match(r"[a-z_.]+=", word))])
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if starts(page.read_text("utf-8"))], ids=pages.name_of)
def test_settings_of_marked_blocks_make_a_plan(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that take minutes or a cluster are planned here: a renamed setting or broken rule would end it at once."""
    text = page.read_text("utf-8")
    blocks.furnish(tmp_path, text)
    for block in blocks.blocks(text):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, "utf-8")
    monkeypatch.chdir(tmp_path)
    for words in starts(text):
        assert main(["plan", *words]) in (0, 3), (words, capsys.readouterr())


def test_planted_settings_of_a_marked_block_are_found() -> None:
    given = "*Takes minutes:*\n\n```bash\n.venv/bin/gspo-hpc train tiny_cpu a.b=1 \\\n  'c.d=[x, y]' # seconds\n```\n"
    assert starts(given) == [["tiny_cpu", "a.b=1", "c.d=[x, y]"]]
    assert starts("*Needs a cluster:*\n\n```bash\ngspo-hpc submit a.yaml --array run.seed=1,2\n```\n") == [["a.yaml"]]


@pytest.mark.parametrize("page", HERE, ids=pages.name_of)
def test_blocks_work_in_their_order(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    text = text_of(page)
    blocks.furnish(folder, text)
    (folder / "run_gspo.sh").write_text(SWIFT_DENSE.replace("train.jsonl", "rows.jsonl"))
    shown = blocks.run(blocks.blocks(text), folder)
    assert shown and [(one.command, line) for one in shown if (line := blocks.missing(one))] == []


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_test_of_a_page_reads_it(name: str) -> None:
    text = (pages.PROJECT / name).read_text("utf-8")
    assert text in [
        value for value in vars(importlib.import_module(ELSEWHERE[name])).values() if isinstance(value, str)
    ]
    assert blocks.blocks(text)


def test_every_example_for_contributors_is_taken_by_a_test() -> None:
    name, start, end = EXAMPLES
    section = (pages.PROJECT / name).read_text("utf-8").split(start)[1].split(end)[0]
    titles = [part.splitlines()[0] for part in section.split("\n### ")[1:] if blocks.blocks(part)]
    sources = "".join(path.read_text("utf-8") for path in (pages.PROJECT / "tests").rglob("test_*.py"))
    assert len(titles) > 4 and [title for title in titles if f'example("{title}")' not in sources] == []


PLANTED = """
*Needs a holiday:*

```bash
gspo-hpc train config.yaml
```

*Needs a cluster:*

```bash
gspo-hpc keys lr
```

    gspo-hpc plan config.yaml
    gspo-hpc plan CONFIG

*Takes minutes:*

```bash
gspo-hpc train config.yaml
```
"""


def test_planted_blocks_are_found() -> None:
    assert [one.split(":")[0] for one in unrun(PLANTED)] == [
        "'Needs a holiday' is none of Needs a cluster, Needs a GPU, Needs the internet, Takes minutes",
        "Needs a cluster",
        "a command outside a block of bash or console",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```bash\ngspo-hpc plan no_such.yaml\n```\n", "exit code 2: gspo-hpc plan"),
        ("```python\nraise ValueError('planted')\n```\n", "planted"),
        ("```bash\ncd gone\n```\n", "gone"),
    ],
)
def test_a_planted_block_that_fails_is_found(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    with pytest.raises(AssertionError, match=told):
        blocks.run(blocks.blocks(text), tmp_path / "scratch")


def test_planted_output_is_missed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (good, bad) = blocks.run(
        blocks.blocks("```console\n$ printf 'a  b\\nc\\n'\na b\nc\n$ echo c; echo d\nd\nc\n```\n"), tmp_path / "scratch"
    )
    assert blocks.missing(good) is None and blocks.missing(bad) == "c"
