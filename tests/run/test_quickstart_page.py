"""The commands of docs/quickstart.md work in their order, also those that train, evaluate and export.

It took five minutes on two busy cores. It catches a command of the page that fails, or a folder that transformers no
longer loads. The set-up of the environment is left out, for it needs a package index, and so is tools/quickstart.sh,
which does it all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests import blocks, pages
from tests.run import harness

PAGE = (pages.PROJECT / "docs" / "quickstart.md").read_text("utf-8")


def test_the_page_from_model_to_export(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    for name in ("configs", "tools"):
        (folder / name).symlink_to(pages.PROJECT / name)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "tiny").symlink_to(tiny_folder)
    steps = blocks.blocks(PAGE.split("\n## Step by step\n")[1])
    shown = blocks.run([replace(one, reason=None) for one in steps if one.reason != "Needs the internet"], folder, 570)
    assert [(one.command, line) for one in shown if (line := blocks.missing(one))] == []
    records = harness.metrics(folder / "runs" / "quick")
    assert records[-1]["step"] == 20 and records[-1]["eval/accuracy"] > records[0]["eval/accuracy"]
    (printed,) = [one.printed for one in shown if "gspo-hpc eval" in one.command]
    assert "pass@4" in printed
    assert "37 + 48 = " in shown[-1].printed
