"""Parameters are counted exactly: against transformers' own count, for every family; and shares add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models.architecture import parse
from gspo_hpc.planning.estimates import parameters

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 32},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "Qwen3Moe": {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 48},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family: str, tied: bool) -> None:
    settings = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], tie_word_embeddings=tied)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(settings)
    arch = parse(settings.to_dict() | {"architectures": [f"{family}ForCausalLM"]})
    assert parameters.parameters(arch) == model.num_parameters()


def test_smollm2_and_a_rank_of_it() -> None:
    """134,515,008, as its model card's files have."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    arch = parse(
        sizes
        | {"num_hidden_layers": 30, "vocab_size": 49152, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
        | {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    )
    assert parameters.parameters(arch) == 134_515_008
    config = from_dict({"model": {"dtype": "bfloat16"}, "optimizer": {"grad_reduce_in_fp32": True}})
    planned = parameters.state(arch, config, 0)
    assert planned.total == 134_515_008 * (2 + 4 + 12)


def test_stages_and_their_ranks_have_everything_once() -> None:
    arch = parse(
        SIZES
        | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True}
    )
    config = from_dict({"parallel": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4}})
    counts = [parameters.of_rank(arch, config, stage) for stage in range(2)]
    assert sum(count.dense + 4 * count.experts for count in counts) == parameters.parameters(arch)
