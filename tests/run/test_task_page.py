"""The commands of docs/your-task.md work in their order, also those that sample and train: two steps of the tiny model.

Four starts of an engine, a minute of processor time. It catches a command of the page that fails, and rows, reward
functions and environments of the page that the loop does not take. The block that samples from the model of the
quickstart runs in a folder that has that model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests import blocks, pages
from tests.run import harness

PAGE = (pages.PROJECT / "docs" / "your-task.md").read_text("utf-8")


def test_the_page_from_rows_to_a_run(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    folder.mkdir()
    model = f"model.path={tiny_folder / 'model'}"
    quick = {"train": (model, "run.max_steps=2", harness.ONE_RANK), "try": (model,), "doctor": (model,)}
    every = [replace(one, reason=None) for one in blocks.blocks(PAGE)]
    shown = blocks.run([one for one in every if "try tiny_cpu" not in one.text], folder, 570, quick)
    quickstart = tmp_path / "quickstart"
    (quickstart / ".cache").mkdir(parents=True)
    (quickstart / ".cache" / "tiny").symlink_to(tiny_folder)
    shown += blocks.run([one for one in every if "try tiny_cpu" in one.text], quickstart, 120, {})
    assert [(one.command, line) for one in shown if (line := blocks.missing(one))] == []
    records = harness.metrics(folder / "times" / "runs" / "times")
    assert records[-1]["step"] == 2 and records[-1]["reward"] is not None
    tried = [one.printed for one in shown if one.command.startswith("gspo-hpc try")]
    assert len(tried) == 3 and all("3 completions of 1 prompt" in printed for printed in tried), tried
