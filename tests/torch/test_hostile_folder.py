"""Commands that are started inside a run directory of somebody else import nothing that lies there.

Takes a minute. It would catch a process that has the current folder on its path, and so runs a torch.py in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.evaluation import stored
from gspo_hpc.runs.directory import open_run
from tests.unit.evaluation.kept import row
from tools.make_random_model import make_random_model

LIBRARIES = (
    "torch",
    "numpy",
    "yaml",
    "pydantic",
    "rich",
    "jinja2",
    "megatron",
    "transformers",
    "safetensors",
    "psutil",
)
CUSTOM = ("sitecustomize", "usercustomize", "gspo_hpc", "theirs")
PLANTED = (*LIBRARIES, *CUSTOM, *sorted(sys.stdlib_module_names - set(sys.builtin_module_names)))
LOOK = (
    *(("status", "."), ("logs", "."), ("report", "."), ("diagnose", "."), ("sync", "."), ("cancel", ".")),
    ("export", ".", "--out", "../out"),
    ("compare", ".", ".", "--steps", "1", "2"),
    ("rescore", ".", "reward.functions=[{function: regex, args: {pattern: '2'}}]"),  # by processes of its own
)
START = (("eval", "."), ("plan", "config.yaml"), ("train", "config.yaml", "--dry-run"))  # which run the config's code
SPAWN = "import multiprocessing, os; p = multiprocessing.get_context('spawn').Process(target=os.getpid); p.start(); "


def planted(folder: Path, name: str) -> str:
    """The text of a module that leaves a mark."""
    return f"import os\nos.makedirs({str(folder / 'marks' / name)!r}, exist_ok=True)\n"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a file for each module that a process might import."""
    folder = tmp_path_factory.mktemp("handed-over")
    model = make_random_model(folder / "model", hidden=64, layers=1, intermediate=64, vocab=128)
    (folder / "marks").mkdir()
    (folder / "rows.jsonl").write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 4)
    named = folder / "own" / "reward.py"  # elsewhere: its folder is on the path of whoever runs it
    named.parent.mkdir()
    named.write_text(planted(folder, "own"))
    config = {
        "run": {"dir": str(folder / "run"), "max_steps": 10},
        "cluster": {"platform": "cpu", "threads_per_rank": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "rows.jsonl")},
        "reward": {"functions": [{"function": f"{named}:reward"}, {"function": "regex", "args": {"pattern": "2"}}]},
        "algorithm": {"name": f"{named}:Own"},
        "tracking": {"observers": [f"{named}:watch"], "wandb": "disabled"},
        "rollout": {"engine": {"trust_remote_code": True, "worker_cls": "theirs.Worker", "scheduler_cls": "theirs.S"}},
    }
    run, _ = open_run(loader.from_dict(config))
    for step in (1, 2):
        stored.write_into(run, step, [row(1, True, step=step)])
    (folder / "model" / "theirs.py").write_text(planted(folder, "theirs"))
    for name in PLANTED:
        (run.path / f"{name}.py").write_text(planted(folder, name))
    return run.path


def started(words: tuple[str, ...], folder: Path, python: tuple[str, ...] = ("-P", "-m", "gspo_hpc")) -> list[str]:
    """Return what a command imports from the folder that it is started in, as the installed script starts it."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, *python, *words], cwd=folder, env=environment, capture_output=True, timeout=300)
    found = sorted(mark.name for mark in (folder.parent / "marks").iterdir())
    for name in found:
        (folder.parent / "marks" / name).rmdir()
    return found


def test_what_is_planted_runs_where_the_current_folder_is_on_the_path(hostile: Path) -> None:
    assert started(("plan", "config.yaml"), hostile) == ["own"]
    assert started((), hostile, ("-c", "import torch, yaml")) == ["torch", "yaml"]
    assert "multiprocessing" in started((), hostile, ("-c", SPAWN + "p.join()"))


@pytest.mark.parametrize("words", LOOK, ids=lambda words: words[0])
def test_who_looks_at_a_run_runs_neither_what_lies_there_nor_what_its_config_names(
    words: tuple[str, ...], hostile: Path
) -> None:
    assert started(words, hostile) == []


@pytest.mark.parametrize("words", START, ids=lambda words: words[0])
def test_who_is_given_its_config_runs_what_that_names_and_nothing_else(words: tuple[str, ...], hostile: Path) -> None:
    assert set(started(words, hostile)) <= {"own"}


def test_no_process_that_multiprocessing_spawns_runs_it(hostile: Path) -> None:
    assert started((), hostile, ("-P", "-c", SPAWN + "p.join()")) == []


def test_the_module_as_a_program_runs_it_only_in_place_of_the_package(hostile: Path) -> None:
    own = hostile / "gspo_hpc.py"
    own.rename(hostile / "gspo_hpc.txt")
    try:
        assert started(("status", "."), hostile, ("-m", "gspo_hpc")) == []
        assert started(("export", ".", "--out", "../out"), hostile, ("-m", "gspo_hpc")) == []
    finally:
        (hostile / "gspo_hpc.txt").rename(own)
