"""The examples of the documentation: a new algorithm and a new preset are one file each."""

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


def block(title: str, language: str) -> str:
    """The one fenced block of an example."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", example(title), re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def copy(project: Path, tmp_path: Path) -> Path:
    """The package alone, to put a file into."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(project / "gspo_hpc", tmp_path / "code" / "gspo_hpc", ignore=ignored)
    return tmp_path / "code"


def gspo_hpc(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The program of a copy of the package."""
    code = "import sys; from gspo_hpc.cli.main import main; code = main(sys.argv[1:]); "
    code += "heavy = {'torch', 'numpy'} & set(sys.modules); sys.exit(f'imported: {heavy}' if heavy else code)"
    env = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=120, check=False)


def test_an_algorithm_is_one_file(copy: Path) -> None:
    text = block("An algorithm", "python")
    assert len(text.splitlines()) < 60
    (copy / "run.yaml").write_text("batch: {steps_per_generation: 4}\n")
    plan = ("plan", "run.yaml", "algorithm.name=mine")
    before = gspo_hpc(copy, *plan)
    assert before.returncode == 2 and "algorithm.name is 'mine', which is not allowed" in before.stderr
    (copy / "gspo_hpc" / "algorithms" / "mine.py").write_text(text)

    done = gspo_hpc(copy, *plan, "algorithm.least_weight=0.5")
    assert (done.returncode, done.stderr) == (3, "")  # no rule is broken, but a run needs more
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "mine: MiniMax-M1, arXiv 2506.13585" in lines
    assert "least_weight 0.5 Least weight of a token." in lines and "kl_beta 0.0 Weight" in "\n".join(lines)
    wrong = gspo_hpc(copy, *plan, "algorithm.least_wieght=2", "algorithm.clip_low=2")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[0] == (
        "error: command line: unknown key algorithm.least_wieght of mine; nearest: algorithm.least_weight"
    )
    assert "algorithm.clip_low must be above 0 and below 1" in wrong.stderr
    refused = gspo_hpc(copy, *plan, "algorithm.least_weight=11")
    assert "algorithm.least_weight must be at least 0 and at most 10; found 11; mine has 0.0" in refused.stderr

    schema = json.loads(gspo_hpc(copy, "schema").stdout)
    assert schema["$defs"]["Mine"]["properties"]["least_weight"]["maximum"] == 10


def test_an_algorithm_may_be_in_a_file_of_the_users_own(copy: Path, tmp_path: Path) -> None:
    """The same file without its `name`, as CONTRIBUTING.md says."""
    lines = block("An algorithm", "python").splitlines(keepends=True)
    (copy / "own.py").write_text("".join(line for line in lines if not line.startswith("    name:")))
    (copy / "run.yaml").write_text("batch: {steps_per_generation: 4}\n")
    done = gspo_hpc(copy, "plan", "run.yaml", "algorithm.name=own.py:Mine", "algorithm.least_weight=0.5")
    assert (done.returncode, done.stderr) == (3, "")
    shown = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "own.py:Mine: MiniMax-M1, arXiv 2506.13585" in shown and "least_weight 0.5 Least weight of a token." in shown


def test_a_file_that_cannot_be_imported_is_named(copy: Path) -> None:
    path = copy / "gspo_hpc" / "algorithms" / "mine.py"
    path.write_text('class Mine(Missing):\n    name: Literal["mine"] = "mine"\n')
    (copy / "run.yaml").write_text("batch: {steps_per_generation: 4}\n")
    assert gspo_hpc(copy, "plan", "run.yaml").returncode == 3, "only the algorithm that a config names is imported"
    plan = ("plan", "run.yaml", "algorithm.name=mine")
    done = gspo_hpc(copy, *plan)
    assert f"{path}: cannot be imported: NameError: name 'Missing' is not defined\n" in done.stderr
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    path.write_text('# name: Literal["mine"]\nclass Mine(:\n')
    done = gspo_hpc(copy, *plan)
    assert f"{path}:2: cannot be imported: SyntaxError: invalid syntax\n" in done.stderr and done.returncode == 2
    done = gspo_hpc(copy, "schema")  # which lists them all
    assert done.stderr == f"error: {path}:2: cannot be imported: SyntaxError: invalid syntax\n"


def test_a_setting_without_a_description_is_refused(copy: Path) -> None:
    text = block("An algorithm", "python")
    bare = re.sub(r"least_weight: Annotated.*", "least_weight: float = 0.0", text)
    assert bare != text
    (copy / "gspo_hpc" / "algorithms" / "mine.py").write_text(bare)
    (copy / "run.yaml").write_text("algorithm: {name: mine}\n")
    done = gspo_hpc(copy, "plan", "run.yaml")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "mine.py: Mine has settings without a description: least_weight; use Field(description=...)" in done.stderr


def test_every_setting_has_a_description() -> None:
    from gspo_hpc.config.plugins import algorithms

    found = {(name, key) for name, kind in algorithms().items() for key in kind.model_fields}
    assert {("gspo", "clip_low"), ("grpo", "kl_beta")} <= found
    for name, key in found:
        assert key == "name" or algorithms()[name].model_fields[key].description, (name, key)


def test_the_settings_in_the_documentation_are_those_of_the_classes(project: Path, copy: Path) -> None:
    tool = [sys.executable, "tools/algorithms.py", "--check"]
    done = subprocess.run(tool, cwd=project, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

    for name in ("tools/algorithms.py", "tools/generated.py", "docs/algorithms.md"):  # a new one shows up by itself
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(project / name, copy / name)
    (copy / "gspo_hpc" / "algorithms" / "mine.py").write_text(block("An algorithm", "python"))
    env = os.environ | {"PYTHONPATH": str(copy)}
    stale = subprocess.run(tool, cwd=copy, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert stale.returncode == 1 and "run: python tools/algorithms.py" in stale.stderr
    assert subprocess.run(tool[:2], cwd=copy, env=env, timeout=60, check=False).returncode == 0
    row = "| `least_weight` | 0.0 | at least 0 and at most 10 | Least weight of a token. |"
    assert row in (copy / "docs" / "algorithms.md").read_text("utf-8")


def test_every_algorithm_here_is_a_short_file(project: Path) -> None:
    from gspo_hpc.config.plugins import algorithms

    for name in algorithms():
        assert len((project / "gspo_hpc" / "algorithms" / f"{name}.py").read_text().splitlines()) < 60


def test_a_preset_is_one_file(copy: Path) -> None:
    (copy / "configs").mkdir()
    (copy / "configs" / "qwen2.5_14b_tp4.yaml").write_text(block("A configuration preset", "yaml"))
    done = gspo_hpc(copy, "plan", "qwen2.5_14b_tp4", "--json")
    assert (done.returncode, done.stderr) == (3, "")  # its files are not here
    plan = json.loads(done.stdout)
    assert plan["valid"] and plan["algorithm"]["name"] == "grpo" and plan["algorithm"]["clip_high"] == 0.28
    nearest = gspo_hpc(copy, "plan", "qwen2.5_14b_pt4")
    assert nearest.returncode == 2 and "nearest: configs/qwen2.5_14b_tp4.yaml" in nearest.stderr
