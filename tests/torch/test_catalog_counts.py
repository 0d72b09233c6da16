"""Shipped configurations, counted by transformers' own models without their memory."""

from __future__ import annotations

import pytest
import torch
import transformers

from gspo_hpc import model_catalog, model_memory
from gspo_hpc.model_config import parse


@pytest.mark.parametrize("name", model_catalog.names())
def test_parameters_are_those_of_transformers(name: str) -> None:
    raw = model_catalog.content(name)
    (family,) = raw["architectures"]
    settings = getattr(transformers, family.replace("ForCausalLM", "Config"))(**raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    assert type(model).__name__ == family
    assert model.num_parameters() == model_memory.parameters(parse(raw))
