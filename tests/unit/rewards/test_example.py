"""The example of a reward function works as it stands: its files are written out and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.examples import example


def write_out(folder: Path) -> str:
    """Write the example's fenced blocks into `folder`, each under the name in its first line; return the whole text."""
    text = example("A reward function")
    for name, content in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(content, "utf-8")
    return text


def test_the_example_is_short_and_runs(tmp_path: Path) -> None:
    text = write_out(tmp_path)
    assert len(text.splitlines()) < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_rewards.py", "run.yaml", "try_it.py"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "try_it.py"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    got = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    assert (got["worked"], got["guessed"]) == ("1.5 ", "0.5 ")
    assert got["no answer field"].startswith("0 my_rewards.py:shows_work: raised KeyError: 'answer'; number_match: ")
