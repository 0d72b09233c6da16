"""What config.json files of models with experts are read as, and what of them is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.models.architecture import Experts, outline, parse, read

SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 151936,
    "hidden_act": "silu",
}
MIXTRAL = SIZES | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "router_aux_loss_coef": 0.02,
}
QWEN2 = SIZES | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
QWEN3 = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (MIXTRAL, Experts(8, 2, 6144, True)),
        (QWEN2, Experts(60, 4, 1408, False, 5632)),
        (QWEN2 | {"mlp_only_layers": [0, 2]}, Experts(60, 4, 1408, False, 5632, (0, 2))),
        (QWEN2 | {"decoder_sparse_step": 2}, Experts(60, 4, 1408, False, 5632, (0, 2, 4))),
        (QWEN3, Experts(128, 8, 768, True)),
        (SIZES | {"architectures": ["Qwen3ForCausalLM"]}, None),
    ],
)
def test_experts(raw: dict[str, Any], expected: Experts | None) -> None:
    found = parse(raw)
    assert found.experts == expected
    without = set(expected.dense_layers) if expected else set(range(6))
    assert [layer for layer in range(6) if not found.has_experts(layer)] == sorted(without)


def test_what_differs_between_families() -> None:
    mixtral, qwen2, qwen3 = parse(MIXTRAL), parse(QWEN2), parse(QWEN3)
    assert [one.qkv_bias for one in (mixtral, qwen2, qwen3)] == [False, True, False]
    assert [one.qk_norm for one in (mixtral, qwen2, qwen3)] == [False, False, True]
    assert [one.head_dim for one in (mixtral, qwen2, qwen3)] == [64, 64, 128]
    assert not parse(QWEN2 | {"qkv_bias": False}).qkv_bias
    # transformers 5 writes another name
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3.items()}
    assert parse(renamed) == qwen3


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported; it must be 0 or 0.0"),
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window = 4096 is not supported; it must be absent"),
        (QWEN2 | {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({k: v for k, v in QWEN3.items() if k != "moe_intermediate_size"}, "moe_intermediate_size is missing"),
        ({k: v for k, v in QWEN3.items() if k != "num_experts"}, "num_local_experts is missing"),
        (QWEN3 | {"architectures": ["DeepseekV3ForCausalLM"]}, "architecture DeepseekV3ForCausalLM is not supported"),
    ],
)
def test_what_is_refused(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(raw)


def test_an_outline_is_of_any_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"architectures": ["DeepseekV3ForCausalLM"]}))
    arch = outline(tmp_path)
    assert (arch.family, arch.num_layers, arch.vocab_size) == ("DeepseekV3ForCausalLM", 6, 151936)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="num_attention_heads is missing"):
        outline(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"), [("[1]", "holds list, not the settings"), ("{", "is not JSON"), (None, "has no config.json")]
)
def test_a_folder_without_settings(content: str | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for reader in (read, outline):
        with pytest.raises(ValueError, match=told):
            reader(tmp_path)
