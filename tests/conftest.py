"""For all tests: few threads, no network, no account."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported by anything
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("WANDB_API_KEY", None)  # a test must never write to someone's account


@pytest.fixture(scope="session")
def project() -> Path:
    """The top of the project."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """Holds model/ and data/. Made by the tool that the quickstart uses."""
    project = Path(__file__).parents[1]
    folder = Path(os.environ.get("GSPO_HPC_CACHE", project / ".cache")) / "tiny"
    subprocess.run([sys.executable, str(project / "tools" / "make_tiny_model.py"), "--out", str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """configs/tiny_cpu.yaml with the folders of this machine."""
    project = Path(__file__).parents[1]
    raw = yaml.safe_load((project / "configs" / "tiny_cpu.yaml").read_text())
    raw["model"]["path"] = str(tiny_folder / "model")
    raw["data"] = {"train": str(tiny_folder / "data" / "train.jsonl"), "eval": str(tiny_folder / "data" / "eval.jsonl")}
    path = tmp_path_factory.mktemp("config") / "tiny_cpu.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
