"""The commands and files of docs/your-task.md work as they stand there, in an empty folder, in the order of the page.

It takes four seconds: planning, a reward function and reports of a finished run, no model. It catches a command of the
page that fails. Blocks that sample or train are marked; tests/run/test_task_page.py runs them, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import blocks, pages

PAGE = (pages.PROJECT / "docs" / "your-task.md").read_text("utf-8")


def run(text: str, folder: Path) -> str:
    """Run a page in an empty folder, but for the run that its later blocks speak of; return what it prints."""
    folder.mkdir()
    blocks.finished_runs(folder, text)
    return "\n".join(one.printed for one in blocks.run(blocks.blocks(text), folder))


def test_the_commands_work_in_order(tmp_path: Path) -> None:
    printed = run(PAGE, tmp_path / "empty")
    assert "plan of config.yaml: valid as far as checked" in printed
    assert "share of ratios that were clipped" in printed and "data.train_ratio" in printed
    times = tmp_path / "empty" / "times"
    assert {path.name for path in times.iterdir()} >= {"config.yaml", "reward.py", "test_reward.py"}
    assert (times / "runs" / "times" / "report.html").is_file()


def test_a_wrong_reward_ends_the_script(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="test_right_wrong_and_missing"):
        run(PAGE.replace("return 1.0 if", "return 0.1 if"), tmp_path / "empty")
