"""Norms compute in fp32, whatever the model's dtype, as docs/parallelism.md says."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_hpc.policy.layers import RMSNorm

ONE_ROUNDING = 2**-8 * (1 + 1e-4)  # bf16 has 8 significant bits; the rest is for the last bits of fp32


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest relative error."""
    return ((found.double() - exact).abs() / exact.abs().clamp_min(1e-30)).max().item()


@pytest.mark.parametrize("size", [64, 576])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_norm_in_bf16_is_that_of_fp32_rounded_once(size: int, scale: float) -> None:
    draw = torch.Generator().manual_seed(size)
    x = (scale * torch.randn(32, size, generator=draw)).bfloat16()
    config = TransformerConfig(
        num_layers=1, hidden_size=size, num_attention_heads=1, params_dtype=torch.bfloat16, bf16=True
    )
    norm = RMSNorm(config, size)
    with torch.no_grad():
        norm.weight.copy_(1.0 + 0.1 * torch.randn(size, generator=draw))
    assert norm.weight.dtype is torch.bfloat16

    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    found = norm(x)
    assert found.dtype is torch.bfloat16
    assert error(found, exact) <= ONE_ROUNDING


def test_statistics_in_bf16_would_be_seen() -> None:
    """Show that the bound above tells the two apart."""
    x = torch.randn(32, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = x.double()
    exact = wide * wide.square().mean(-1, keepdim=True).rsqrt()
    rough = x * x.square().mean(-1, keepdim=True).rsqrt()
    assert error(rough, exact) > 1.5 * ONE_ROUNDING
