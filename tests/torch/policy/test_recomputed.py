"""Names of modules that can be computed again, asked of Megatron's own configuration."""

from __future__ import annotations

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_hpc.planning.rules.model import RECOMPUTED


def make(name: str) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        recompute_granularity="selective",
        recompute_modules=[name],
        moe_grouped_gemm=True,
        num_moe_experts=2,
        add_bias_linear=False,
    )


@pytest.mark.parametrize("name", RECOMPUTED)
def test_megatron_takes_the_name(name: str) -> None:
    assert make(name).recompute_modules == [name]


def test_megatron_refuses_others() -> None:
    with pytest.raises(AssertionError):
        make("mlpp")
