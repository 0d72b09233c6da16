"""The layers of rooms, and that the user's side starts without torch."""

from __future__ import annotations

import ast
import configparser
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

USER_SIDE = "The user's side answers at once: no torch, no engine, no tracker BROKEN"
HEAVY = ("torch", "vllm", "megatron", "wandb", "transformers")
LINES, MODULES = 400, 16  # the most of a module, and of a folder
EVERYWHERE = {"torch", "numpy", "pydantic", "pydantic_core"}  # outside libraries that are no room's own
# What imports modules by names that it makes: those of our own files, which need no registration.
DISCOVERERS = {"cli/parser.py", "config/plugins.py", "diagnose/registry.py", "planning/rules/registry.py"}


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
    folder = tmp_path_factory.mktemp("rooms")
    shutil.copytree(project / "gspo_hpc", folder / "gspo_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project / "setup.cfg", folder)
    return folder


@pytest.mark.parametrize(
    ("module", "planted", "contract"),
    [
        ("config/schema", "from gspo_hpc.training import worker", "A room imports only from rooms below it BROKEN"),
        (
            "launch/status",
            "def f():\n    import torch",
            "The user's side answers at once: no torch, no engine, no tracker BROKEN",
        ),
        ("report/page", "import torch", USER_SIDE),
        ("training/loop", "import wandb", "Libraries of trackers have one room BROKEN"),
        ("policy/model", "from vllm import LLM", "vLLM has one room BROKEN"),
        ("training/loop", "from megatron.core import parallel_state", "Megatron-Core has two rooms BROKEN"),
        ("cli/main", "import submitit", "submitit has one room BROKEN"),
        ("rollout/worker", "import pebble", "pebble has one room BROKEN"),
        ("rewards/registry", "import pebble", "pebble has one room BROKEN"),
        ("checkpoint/saver", "from safetensors import safe_open", "safetensors and transformers have one room BROKEN"),
        ("launch/status", "import yaml\nimport rich.table", "PyYAML has one room BROKEN"),
        ("launch/status", "import yaml\nimport rich.table", "rich has two rooms BROKEN"),
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


def test_a_room_without_a_layer_is_caught(copy: Path) -> None:
    room = copy / "gspo_hpc" / "attic"
    room.mkdir()
    (room / "__init__.py").write_text("", encoding="utf-8")
    try:
        result = lint(copy)
    finally:
        shutil.rmtree(room)
    assert result.returncode == 1
    assert "gspo_hpc.attic" in result.stdout


def test_the_layers_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout + result.stderr


def libraries(source: str) -> set[str]:
    """The outside libraries that a module imports, at its top or later."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"gspo_hpc"}


def imports_by_name(source: str) -> list[str]:
    """The calls by which a module imports what import-linter cannot see."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [text for text in map(ast.unparse, calls) if text.split(".")[-1] in ("import_module", "__import__")]


def test_every_outside_library_has_a_contract_that_names_its_room(project: Path) -> None:
    sections = contracts(project)
    held = {name for section in sections for name in sections[section].get("protected_modules", "").split()}
    used = {name for file in (project / "gspo_hpc").rglob("*.py") for name in libraries(file.read_text("utf-8"))}
    assert used - held == EVERYWHERE  # a library that is new needs a contract in setup.cfg
    assert held - used == set()  # and a contract about a library that is gone is to go too


def test_only_files_of_our_own_are_imported_by_name(project: Path) -> None:
    package = project / "gspo_hpc"
    found = {file for file in package.rglob("*.py") if imports_by_name(file.read_text("utf-8"))}
    assert {file.relative_to(package).as_posix() for file in found} == DISCOVERERS


def test_planted_libraries_and_imports_by_name_are_seen() -> None:
    source = "import os, ray.data\ndef f():\n    from cloudpickle import dumps\n    return __import__('torch')"
    assert libraries(source) == {"ray", "cloudpickle"}
    assert libraries("from . import a\nfrom gspo_hpc.cli import main") == set()
    assert imports_by_name(source) == ["__import__"]
    assert imports_by_name("import importlib\nimportlib.import_module('torch')") == ["importlib.import_module"]


def disorder(package: Path) -> list[str]:
    """Modules that are too long or too many to find one's way among, and modules that lie in no room."""
    found = []
    for folder in (package, *sorted(path for path in package.rglob("*") if path.is_dir())):
        files = sorted(folder.glob("*.py"))
        if files and not (folder / "__init__.py").exists():
            found.append(f"{folder.name}/ has no __init__.py: contracts and the wheel leave it out")
        if len(files) > MODULES:
            found.append(f"{folder.name}/ has {len(files)} modules")
        for file in files:
            if (lines := len(file.read_text(encoding="utf-8").splitlines())) > LINES:
                found.append(f"{folder.name}/{file.name} has {lines} lines")
    loose = sorted({path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"})
    return found + [f"{name} lies in no room" for name in loose]


def test_modules_are_short_and_folders_small(project: Path) -> None:
    assert len(list((project / "gspo_hpc").rglob("*.py"))) > 200
    assert disorder(project / "gspo_hpc") == []


def test_planted_disorder_is_seen(tmp_path: Path) -> None:
    for name in ("__init__", "__main__"):
        (tmp_path / f"{name}.py").write_text("")
    crowd = tmp_path / "room" / "crowd"
    crowd.mkdir(parents=True)
    for folder in (crowd, crowd.parent):
        (folder / "__init__.py").write_text("")
    for number in range(MODULES - 1):
        (crowd / f"m{number}.py").write_text("x = 1\n" * LINES)
    assert disorder(tmp_path) == []  # as long and as many as they may be
    (crowd / "one_more.py").write_text("")
    (tmp_path / "room" / "long.py").write_text("x = 1\n" * (LINES + 1))
    (tmp_path / "loose.py").write_text("")
    hidden = tmp_path / "room" / "hidden" / "module.py"
    hidden.parent.mkdir()
    hidden.write_text("import torch\n")
    assert disorder(tmp_path) == [
        f"room/long.py has {LINES + 1} lines",
        f"crowd/ has {MODULES + 1} modules",
        "hidden/ has no __init__.py: contracts and the wheel leave it out",
        "loose.py lies in no room",
    ]


def imported(code: str, project: Path) -> list[str]:
    """Which of the heavy packages are loaded after `code`, in a fresh Python."""
    probe = f"import sys\n{code}\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], cwd=project, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()


def modules(project: Path, rooms: Iterable[str]) -> list[str]:
    """Every module of these rooms."""
    files = [path for room in rooms for path in sorted((project / room.replace(".", "/")).rglob("*.py"))]
    return [".".join(path.relative_to(project).with_suffix("").parts) for path in files if path.name != "__init__.py"]


def test_every_module_of_the_user_side_loads_nothing_heavy(project: Path) -> None:
    rooms = contracts(project)["importlinter:contract:user_side"]["source_modules"].split()
    found = modules(project, rooms)
    assert {"gspo_hpc.cli.main", "gspo_hpc.launch.status", "gspo_hpc.planning.rules.batch"} <= set(found)
    assert imported("\n".join(f"import {name}" for name in found), project) == []


def test_the_probe_sees_a_heavy_import(project: Path) -> None:
    assert imported("import wandb", project) == ["wandb"]


def test_the_picture_of_the_rooms_is_what_the_imports_say(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/draw_rooms.py", "--check"], cwd=project, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
