"""The rule in CONTRIBUTING.md is complete: a copy of the package with its files has one more rule."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import example


@pytest.fixture(scope="module")
def copy(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and the files of the example."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(project / "gspo_hpc", folder / "gspo_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    text = example("A rule of the planner")
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for name, code in blocks:
        path = folder / name
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, "utf-8")
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of that folder's package."""
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "120"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_new_rule_refuses_and_has_its_name_places_and_fixes(copy: Path) -> None:
    words = ("gspo_hpc", "plan", "tiny_cpu", "run.max_steps=5", "optimizer.lr_warmup_steps=6")
    page = run(copy, *words)
    assert page.returncode == 2, page.stderr
    assert "\n  warmup_ends_within_run\n    optimizer.lr_warmup_steps (6) must be at most" in page.stdout
    found = json.loads(run(copy, *words, "--json").stdout)
    (broken,) = found["broken"]
    assert broken["rule"] == "warmup_ends_within_run"
    assert broken["settings"] == [
        {"key": "optimizer.lr_warmup_steps", "place": "command line"},
        {"key": "run.max_steps", "place": "command line"},
    ]
    fixes = [change | {"changes": len(fix)} for fix in found["fixes"] for change in fix]
    for key, before, value in (("optimizer.lr_warmup_steps", 6, 5), ("run.max_steps", 5, 6)):
        assert {"key": key, "before": before, "value": value, "changes": 1} in fixes
    assert run(copy, *words, "optimizer.lr_warmup_steps=5").returncode == 3  # its model is not made yet


def test_its_own_test_passes(copy: Path) -> None:
    done = run(copy, "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(copy), "tests")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_without_it_nothing_is_refused(project: Path) -> None:
    words = ("gspo_hpc", "plan", "tiny_cpu", "run.max_steps=5", "optimizer.lr_warmup_steps=6")
    assert run(project, *words).returncode in (0, 3)  # 3 where nobody has made its model
