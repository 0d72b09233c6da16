"""Operations by our arithmetic against what torch counts in transformers' models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from gspo_hpc.models import architecture, flops
from tests.gloo.conftest import make


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "qwen2moe", "qwen3moe"])
def test_a_forward_pass_has_the_operations_that_torch_counts(family: str, tmp_path: Path) -> None:
    folder = make(tmp_path / family, family, tied=True)
    eagerly = {"attn_implementation": "eager", "experts_implementation": "eager"}  # torch counts no grouped products
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **eagerly).eval()
    tokens = 37
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.arange(tokens)[None])
    # Computed eagerly, every query meets every key.
    assert counted.get_total_flops() == flops.forward(architecture.read(folder), tokens, tokens * tokens, tokens)
