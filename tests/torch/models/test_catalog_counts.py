"""Shipped configurations, counted by transformers' own models without their memory."""

from __future__ import annotations

import pytest
import torch
import transformers

from gspo_hpc.models import catalog
from gspo_hpc.models.architecture import SUPPORTED, parse
from gspo_hpc.planning.estimates import parameters

# The others are only planned; tests/unit/models holds them to published counts.
TRAINED = [name for name in catalog.names() if catalog.content(name)["architectures"][0] in SUPPORTED]


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_are_those_of_transformers(name: str) -> None:
    raw = catalog.content(name)
    (family,) = raw["architectures"]
    settings = getattr(transformers, family.replace("ForCausalLM", "Config"))(**raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    assert type(model).__name__ == family
    assert model.num_parameters() == parameters.parameters(parse(raw))
