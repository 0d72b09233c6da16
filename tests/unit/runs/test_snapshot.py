"""The archive of a submission: a process that imports the package from it has the package whole, and no other.

Fifteen seconds on two busy cores, most of them five starts of Python. It would catch a file of the package that is read
in a way that works in a folder only, a module that the archive lacks, and a reward function that is read from where it
was edited.
"""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import gspo_hpc
from gspo_hpc.config import paths, plugins
from gspo_hpc.config.schema import Config, Reward, RewardFunction
from gspo_hpc.models import catalog
from gspo_hpc.planning.rules.registry import rules
from gspo_hpc.runs import snapshot
from gspo_hpc.system import environment

GRADER = """
def grade(completion, *, prompt, fields):
    return {value}
def fails(completion, *, prompt, fields):
    raise ArithmeticError("as it was submitted")
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with a reward function, whose file was changed since."""
    folder = tmp_path_factory.mktemp("snapshot")
    grader = folder / "my.grader.py"
    grader.write_text(GRADER.format(value=0.25))
    functions = tuple(RewardFunction(function=f"{grader}:{name}") for name in ("grade", "fails"))
    snapshot.take(folder / "code.zip", Config(reward=Reward(functions=functions)))
    grader.write_text(GRADER.format(value=0.75))
    return folder / "code.zip"


def python(archive: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the variables of a submitted job, in a folder without the package."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=variables | snapshot.environment(archive) | more,
        cwd=archive.parent,
    )


def answer(archive: Path, code: str) -> Any:
    done = python(archive, "-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_archive_is_one_private_file_with_the_whole_package(archive: Path) -> None:
    assert archive.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(archive) as whole:
        kept = {name for name in whole.namelist() if name.startswith("gspo_hpc/")}
        worker = whole.read("gspo_hpc/training/worker.py")
    folder = environment.import_root() / "gspo_hpc"
    there = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.relative_to(folder.parent).as_posix() for path in there} <= kept
    assert {f"gspo_hpc/config/presets/{path.name}" for path in paths.files(paths.PRESETS, ".yaml")} <= kept
    assert worker == (folder / "training" / "worker.py").read_bytes()
    assert not [name for name in kept if name.endswith(".pyc")]


def test_what_the_package_reads_of_itself_is_read_from_the_archive(archive: Path) -> None:
    found = answer(
        archive,
        "import json, pkgutil, gspo_hpc; from gspo_hpc.config import loader, paths, plugins\n"
        "from gspo_hpc.models import catalog; from gspo_hpc.planning.rules.registry import rules\n"
        "from gspo_hpc.report.render import asset, render, ASSETS; from gspo_hpc.starter import project\n"
        "from gspo_hpc.diagnose import registry; from gspo_hpc.importers import tables\n"
        "config = loader.load(None, ['slurm.profile=local'])\n"
        "print(json.dumps({'file': gspo_hpc.__file__, 'algorithms': list(plugins.algorithms()),\n"
        "  'models': list(catalog.names()), 'rules': list(rules()), 'partition': config.slurm.partition,\n"
        "  'modules': sorted(one.name for one in pkgutil.walk_packages(gspo_hpc.__path__, 'gspo_hpc.')),\n"
        "  'assets': [bool(asset(one.name)) for one in paths.files(ASSETS, '')],\n"
        "  'starter': bool(project._filled('reward.py.txt', project._Row('prompt', ('answer',)).names()))}))",
    )
    assert found["file"].startswith(f"{archive}/gspo_hpc/")
    assert found["algorithms"] == list(plugins.algorithms()) and found["models"] == list(catalog.names())
    assert sorted(found["rules"]) == sorted(str(one) for one in rules()) and found["partition"] == "low"
    assert found["modules"] == sorted(one.name for one in pkgutil.walk_packages(gspo_hpc.__path__, "gspo_hpc."))
    assert found["assets"] and all(found["assets"]) and found["starter"]


def test_a_command_and_its_children_run_from_the_archive(archive: Path) -> None:
    """`plan` with a reward function of a file tries it in a process of its own."""
    (archive.parent / "other" / "gspo_hpc").mkdir(parents=True)  # what the current directory holds does not count
    done = python(archive, "-m", "gspo_hpc", "schema")
    assert done.returncode == 0 and "run" in json.loads(done.stdout)["properties"], done.stderr
    found = answer(
        archive,
        "import json, sys; from gspo_hpc.rewards import trial; from gspo_hpc.config.schema import RewardFunction\n"
        f"one = RewardFunction(function='{archive.parent}/my.grader.py:grade')\n"
        "print(json.dumps([trial.run([one], 'p', {})[0].failure, __import__('gspo_hpc').__file__]))",
    )
    assert found[0] is None and found[1].startswith(str(archive))


def test_a_reward_function_is_the_one_that_was_submitted(archive: Path) -> None:
    found = answer(
        archive,
        "import json, traceback; from gspo_hpc.rewards import registry; from gspo_hpc.runs import snapshot\n"
        "from gspo_hpc.config.schema import Config, Reward, RewardFunction\n"
        f"name = '{archive.parent}/my.grader.py:'\n"
        "value = registry.load(name + 'grade')('', prompt='', fields={})\n"
        "try: registry.load(name + 'fails')('', prompt='', fields={})\n"
        "except ArithmeticError: text = traceback.format_exc()\n"
        "reward = Reward(functions=(RewardFunction(function=name + 'grade'),))\n"
        "registry.check(reward)\n"
        "print(json.dumps([value, text, snapshot.fingerprints(Config(reward=reward))]))",
    )
    value, text, prints = found
    assert value == 0.25
    assert 'raise ArithmeticError("as it was submitted")' in text, "the traceback shows the line"
    functions = (RewardFunction(function=f"{archive.parent}/my.grader.py:grade"),)
    edited = snapshot.fingerprints(Config(reward=Reward(functions=functions)))
    assert prints.keys() == edited.keys() and prints != edited


def test_a_job_that_submits_hands_its_own_code_on(archive: Path, tmp_path: Path) -> None:
    answer(
        archive,
        "from pathlib import Path; from gspo_hpc.runs import snapshot; from gspo_hpc.config.schema import Config\n"
        f"snapshot.take(Path('{tmp_path}/again.zip'), Config()); print('null')",
    )
    with zipfile.ZipFile(archive) as first, zipfile.ZipFile(tmp_path / "again.zip") as second:
        own = [name for name in first.namelist() if name.startswith("gspo_hpc/")]
        assert own and all(first.read(name) == second.read(name) for name in own)
        assert not [name for name in second.namelist() if name.startswith("own/")]


def test_git_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    snapshot.take(tmp_path / "code.zip", Config())
    assert json.loads(zipfile.ZipFile(tmp_path / "code.zip").read("origin.json"))["commit"] is None
