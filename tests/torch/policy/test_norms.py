"""Norms compute in fp32, whatever the model's dtype, or round as the engine's do, as docs/parallelism.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from gspo_hpc.models.architecture import read
from gspo_hpc.policy.layers import RMSNorm, RoundedRMSNorm, final_norm, layer_spec
from tools.make_random_model import make_random_model

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


def pair(size: int, draw: torch.Generator) -> tuple[RoundedRMSNorm, Qwen3RMSNorm]:
    """Return the norm that rounds first and that of transformers, with the same weight in bf16."""
    config = TransformerConfig(
        num_layers=1, hidden_size=size, num_attention_heads=1, params_dtype=torch.bfloat16, bf16=True
    )
    ours, theirs = RoundedRMSNorm(config, size, eps=1e-6), Qwen3RMSNorm(size, eps=1e-6).bfloat16()
    with torch.no_grad():
        ours.weight.copy_(1.0 + 0.1 * torch.randn(size, generator=draw))
        theirs.weight.copy_(ours.weight)
    return ours, theirs


@pytest.mark.parametrize("size", [64, 576])
def test_a_norm_that_rounds_first_is_that_of_transformers(size: int) -> None:
    """Nearly every value is the same; a sum in another order may fall on the other side of a rounding."""
    draw = torch.Generator().manual_seed(size)
    ours, theirs = pair(size, draw)
    x, upstream = ((3.0 * torch.randn(32, size, generator=draw)).bfloat16() for _ in range(2))
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = ours(mine), theirs(its)
    assert found.dtype is torch.bfloat16
    assert (found == wanted).float().mean() > 0.995
    # Rounded once, a tenth of all values are others.
    once = torch.nn.functional.rms_norm(x, (size,), ours.weight, 1e-6)
    assert (once != wanted).float().mean() > 0.1
    found.backward(upstream)
    wanted.backward(upstream)
    for one, other in ((mine.grad, its.grad), (ours.weight.grad, theirs.weight.grad)):
        assert one is not None and other is not None
        assert (one - other).float().norm() < 0.01 * other.float().norm()


def test_a_norm_that_rounds_first_keeps_its_input_alone() -> None:
    """The plan counts no more for it."""
    ours, _ = pair(64, torch.Generator().manual_seed(0))
    kept: list[torch.Tensor] = []
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), ours.weight.data_ptr()}


def test_all_norms_of_a_model_are_of_one_class(tmp_path: Path) -> None:
    arch = read(make_random_model(tmp_path / "m", hidden=64, layers=1, intermediate=64, vocab=128))
    assert arch.qk_norm
    for norm in (RMSNorm, RoundedRMSNorm):
        layer = layer_spec(arch, False, False, norm).submodules
        within = layer.self_attention.submodules
        found = (layer.input_layernorm, layer.pre_mlp_layernorm, within.q_layernorm, within.k_layernorm)
        assert {*found, final_norm(False, norm)} == {norm}
