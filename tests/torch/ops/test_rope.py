"""Rotary frequencies against transformers', and what of a config.json is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gspo_hpc.models import architecture
from gspo_hpc.ops.rope import inverse_frequencies

BASE: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 64},
    **{"num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 131072},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3 | {"original_max_position_embeddings": 8192},
    LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
]


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("given", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_frequencies_are_those_of_transformers(given: dict[str, Any], theta: float) -> None:
    theirs = transformers.LlamaConfig(**BASE, rope_parameters={"rope_theta": theta, **given})
    expected, magnitude = ROPE_INIT_FUNCTIONS[given["rope_type"]](theirs, torch.device("cpu"))
    new = architecture.parse(BASE | {"rope_parameters": {"rope_theta": theta, **given}})
    old = architecture.parse(BASE | {"rope_theta": theta, "rope_scaling": given})
    assert new == old
    torch.testing.assert_close(inverse_frequencies(new.rope, new.head_dim), expected, rtol=2e-6, atol=0.0)
    assert new.rope.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type longrope"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": LLAMA3}, "original_max_position_embeddings is missing"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with sliding_attention"),
        ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        architecture.parse(BASE | change)
