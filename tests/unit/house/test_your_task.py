"""The commands and files of docs/your-task.md work as they stand there, in an empty folder, in the order of the page.

It takes two seconds: planning and a reward function, no model. It catches a command of the page that fails. Blocks
that need a model or a run say so in a comment; tests/run/test_starter.py trains a project of `gspo-hpc init`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests import pages

PAGE = (pages.PROJECT / "docs" / "your-task.md").read_text("utf-8")
_BLOCK = re.compile(r"^(<!-- not run by the test: [^\n]+ -->\n)?```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def script() -> str:
    """Return the page as a shell script: its commands, and its Python files as here-documents."""
    parts = ["set -eu", 'gspo-hpc() { python -m gspo_hpc "$@"; }']
    for skipped, kind, block in _BLOCK.findall(PAGE):
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name is not None, block
            parts.append(f"cat > {name[1]} <<'END_OF_FILE'\n{block}END_OF_FILE")
        elif not skipped:
            parts.append(block)
    return "\n".join(parts)


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(pages.PROJECT)}
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_commands_work_in_order(tmp_path: Path) -> None:
    done = run(script(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plan of config.yaml: valid as far as checked" in done.stdout
    assert "share of ratios that were clipped" in done.stdout and "data.train_ratio" in done.stdout
    assert {path.name for path in (tmp_path / "times").iterdir()} >= {"config.yaml", "reward.py", "test_reward.py"}


def test_a_wrong_reward_ends_the_script(tmp_path: Path) -> None:
    text = script()
    assert run(text.replace("return 1.0 if", "return 0.1 if"), tmp_path).returncode != 0
