"""The floors between modules, and that the user side starts without torch."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "vllm", "megatron", "wandb", "transformers")


def contracts(project: Path) -> configparser.ConfigParser:
    """The sections of setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(project / "setup.cfg", encoding="utf-8")
    return parser


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over the package in `folder`."""
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def copy(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its contracts, to plant mistakes in."""
    folder = tmp_path_factory.mktemp("floors")
    shutil.copytree(project / "gspo_hpc", folder / "gspo_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project / "setup.cfg", folder)
    return folder


@pytest.mark.parametrize(
    ("module", "planted", "contract"),
    [
        ("config", "from gspo_hpc import worker", "Floors BROKEN"),
        ("records", "def f():\n    import torch", "Floor 1 is plain Python BROKEN"),
        ("report", "import torch", "The user side answers at once: no torch, no engine, no tracker BROKEN"),
        ("trainer", "import wandb", "wandb has one home BROKEN"),
        ("model", "from vllm import LLM", "vLLM has one home BROKEN"),
        ("trainer", "from megatron.core import parallel_state", "Megatron-Core has one home BROKEN"),
    ],
)
def test_a_planted_import_is_caught(copy: Path, module: str, planted: str, contract: str) -> None:
    path = copy / "gspo_hpc" / f"{module}.py"
    clean = path.read_text(encoding="utf-8")
    path.write_text(f"{clean}\n{planted}\n", encoding="utf-8")
    try:
        result = lint(copy)
    finally:
        path.write_text(clean, encoding="utf-8")
    assert result.returncode == 1, result.stdout + result.stderr
    assert contract in result.stdout


def test_a_file_without_a_floor_is_caught(copy: Path) -> None:
    path = copy / "gspo_hpc" / "of_no_floor.py"
    path.write_text("", encoding="utf-8")
    try:
        result = lint(copy)
    finally:
        path.unlink()
    assert result.returncode == 1
    assert "gspo_hpc.of_no_floor" in result.stdout


def test_the_floors_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout + result.stderr


def imported(code: str, project: Path) -> list[str]:
    """Which of the heavy packages are loaded after `code`, in a fresh Python."""
    probe = f"import sys\n{code}\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], cwd=project, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()


def test_the_user_side_and_floor_1_load_nothing_heavy(project: Path) -> None:
    sections = contracts(project)
    modules = [
        name
        for section in ("importlinter:contract:user_side", "importlinter:contract:plain_python")
        for name in sections[section]["source_modules"].split()
    ]
    assert {"gspo_hpc.cli", "gspo_hpc.launch", "gspo_hpc.config", "gspo_hpc.plan"} <= set(modules)
    assert imported("\n".join(f"import {name}" for name in modules), project) == []


def test_a_plan_loads_nothing_heavy(project: Path) -> None:
    config = project / "configs" / "tiny_cpu.yaml"
    code = f"from gspo_hpc.cli import main\nassert main(['plan', {str(config)!r}]) == 0"
    assert imported(code, project) == []


def test_the_probe_sees_a_heavy_import(project: Path) -> None:
    assert imported("import wandb", project) == ["wandb"]


def test_help_answers_in_half_a_second(project: Path) -> None:
    # Processor time, the best of three: what the machine does besides must not count.
    code = (
        "import contextlib, io, time\nfrom gspo_hpc.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    main(['--help'])\n"
        "print(time.process_time())"
    )
    seconds = []
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        seconds.append(float(result.stdout))
    assert min(seconds) < 0.5
