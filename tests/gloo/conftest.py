"""Small random Hugging Face models, made once a session."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from tests.gloo.layouts import Arrays, run_all
from tools.make_random_model import make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far from the near-uniform softmax of a fresh model: errors show
    "rope_theta": 5000.0,
}


ROPES: dict[str, dict[str, Any]] = {  # the original contexts are short: sequences here go beyond them
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


KINDS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen2moe": "Qwen2Moe",
    "qwen3moe": "Qwen3Moe",
}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"head_dim": 16},  # derived from others there: hidden / heads
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "qwen3moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}


LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}  # 160 MB, in equal layers


def make(folder: Path, family: str, tied: bool, rope: str = "default", **sizes: int) -> Path:
    """A random model of the family: biases and norms too are random."""
    kind = KINDS[family]
    settings = SIZES | OWN.get(family, {}) | sizes
    theta = {"rope_parameters": {"rope_theta": settings["rope_theta"], "rope_type": rope, **ROPES[rope]}}
    settings = {key: value for key, value in settings.items() if key != "rope_theta"} | theta
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**settings, tie_word_embeddings=tied)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    make_tokenizer(settings["vocab_size"]).save_pretrained(folder)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for the cases of all of them, on a busy machine longer than others may take."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(4200))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by family-tied or family-untied."""
    root = tmp_path_factory.mktemp("models")
    found = {
        f"{family}-{'tied' if tied else 'untied'}": make(root / f"{family}-{tied}", family, tied)
        for family, tied in (
            *(("llama", True), ("llama", False), ("mistral", False), ("qwen2", True), ("qwen3", False)),
            *(("mixtral", False), ("qwen2moe", True), ("qwen3moe", False)),
        )
    }
    for family, rope in (("llama", "linear"), ("llama", "llama3"), ("qwen3", "yarn")):
        found[f"{family}-{rope}"] = make(root / f"{family}-{rope}", family, True, rope)
    found["qwen3-single"] = make(root / "single", "qwen3", False, num_key_value_heads=1)
    for name, layers in (("three", 3), ("six", 6)):
        found[f"llama-{name}"] = make(root / name, "llama", layers == 3, num_hidden_layers=layers)
    # Of their optimizer's state two ranks hold halves that end within an expert.
    found["qwen3moe-odd"] = make(root / "odd", "qwen3moe", False, num_experts=6, num_hidden_layers=3)
    found["qwen3-teacher"] = make(
        root / "teacher", "qwen3", False, vocab_size=109, hidden_size=96, num_hidden_layers=8, intermediate_size=160
    )
    found["llama-wide"] = make(root / "wide", "llama", True, vocab_size=16384)
    found["qwen3-broad"] = make(root / "broad", "qwen3", False, vocab_size=16381, num_hidden_layers=2)
    found["llama-large"] = make(root / "large", "llama", False, **LARGE)
    found["llama-half"] = make(root / "half", "llama", False, **LARGE | {"num_hidden_layers": 8})
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cases put what they write."""
    return tmp_path_factory.mktemp("gloo")


def cases_of(module: ModuleType) -> str:
    """The pattern of the names of the cases that a module of tests looks at: its CASES; all if it has none."""
    return str(getattr(module, "CASES", ".*"))


@pytest.fixture(scope="session")
def every(request: pytest.FixtureRequest, models: dict[str, Path], folder: Path) -> dict[str, Arrays]:
    """The arrays of every case that a test of this session looks at: all of them run on ranks that start once."""
    asking = {item.module for item in request.session.items if "every" in getattr(item, "fixturenames", ())}
    return run_all(models, folder, re.compile("|".join(sorted(map(cases_of, asking)))).fullmatch)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, every: dict[str, Arrays]) -> dict[str, Arrays]:
    """The arrays of the cases that a module of tests looks at; no others, or it would fail where it runs alone."""
    return {name: arrays for name, arrays in every.items() if re.fullmatch(cases_of(request.module), name)}
