"""For all tests: few threads, no network, no account."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported by anything
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("WANDB_API_KEY", None)  # a test must never write to someone's account


@pytest.fixture(scope="session")
def project() -> Path:
    """The top of the project."""
    return Path(__file__).resolve().parents[1]
