"""A tiny random model and one engine, shared by the tests that leave it as they found it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_hpc.engine.engine import Engine, EngineSettings

ROOT = Path(__file__).resolve().parents[2]
# Less than one attention projection: query, key and value of a layer always travel in different buckets.
BUCKET_BYTES = 16 << 10


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("make_random_model", ROOT / "tools" / "make_random_model.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    made: Path = tool.make_random_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3")
    return made


@pytest.fixture(scope="session")
def weights(model_path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model_path / "model.safetensors")


@pytest.fixture(scope="session")
def other_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Any:
    """The same model in transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def settings(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return EngineSettings(
        model_path=str(model_path),
        max_model_len=256,
        kv_cache_gb=0.03,
        threads=2,
        bucket_bytes=BUCKET_BYTES,
        log_path=tmp_path_factory.mktemp("log") / "engine.log",
    )


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Iterator[Engine]:
    made = Engine(settings)
    made.start()
    yield made
    made.close()
