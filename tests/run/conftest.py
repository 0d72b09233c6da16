"""The tiny model and its data, made once and kept in the cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.run import harness


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """Holds model/ and data/. Made by the tool that the quickstart uses."""
    project = Path(__file__).parents[2]
    folder = Path(os.environ.get("GSPO_HPC_CACHE", project / ".cache")) / "tiny"
    subprocess.run([sys.executable, str(project / "tools" / "make_tiny_model.py"), "--out", str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """configs/tiny_cpu.yaml with the folders of this machine."""
    project = Path(__file__).parents[2]
    raw = yaml.safe_load((project / "configs" / "tiny_cpu.yaml").read_text())
    raw["model"]["path"] = str(tiny_folder / "model")
    raw["data"] = {"train": str(tiny_folder / "data" / "train.jsonl"), "eval": str(tiny_folder / "data" / "eval.jsonl")}
    path = tmp_path_factory.mktemp("config") / "tiny_cpu.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="session")
def uninterrupted(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    run_dir, log = folder / "run", folder / "log"
    process = harness.start(harness.command(tiny_config, run_dir, *harness.OVERRIDES), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert [record["step"] for record in harness.metrics(run_dir)] == list(range(harness.STEPS + 1))
    return run_dir
