"""First values of adapters beside what peft draws (2 s): another spread, or one draw for all layers or seeds."""

from __future__ import annotations

import peft
import pytest
import torch

from gspo_hpc.policy.adapters.matrices import first_values

INPUTS, OUTPUTS, RANK = 768, 512, 16
NAME = "model.layers.{}.self_attn.q_proj.{}"


def of_peft(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the matrices that peft adds to a layer."""
    torch.manual_seed(3)
    model = peft.get_peft_model(torch.nn.Sequential(layer), peft.LoraConfig(r=RANK, target_modules=["0"]))
    found = {name: value for name, value in model.named_parameters() if "lora_" in name}
    return {"lora_A" if "lora_A" in name or "embedding_A" in name else "lora_B": value for name, value in found.items()}


def test_a_has_the_spread_of_pefts_and_b_is_zero() -> None:
    theirs = of_peft(torch.nn.Linear(INPUTS, OUTPUTS))
    ours = first_values(1)(NAME.format(0, "lora_A"), (RANK, INPUTS))
    assert ours.shape == theirs["lora_A"].shape
    assert ours.std().item() == pytest.approx(theirs["lora_A"].std().item(), rel=0.03)
    assert ours.abs().max().item() == pytest.approx(theirs["lora_A"].abs().max().item(), rel=0.01)
    assert abs(ours.mean().item()) < 5e-4
    assert not theirs["lora_B"].any() and not first_values(1)(NAME.format(0, "lora_B"), (OUTPUTS, RANK)).any()


def test_of_an_embedding_a_is_zero_and_b_normal_as_in_peft() -> None:
    theirs = of_peft(torch.nn.Embedding(INPUTS, OUTPUTS))
    zero = first_values(1)("model.embed_tokens.lora_A", (RANK, INPUTS))
    normal = first_values(1)("model.embed_tokens.lora_B", (OUTPUTS, RANK))
    assert not zero.any() and not theirs["lora_A"].any()
    assert normal.std().item() == pytest.approx(theirs["lora_B"].std().item(), rel=0.05)
    assert normal.abs().max().item() > 3  # unlike a uniform one


def test_values_depend_on_seed_and_layer_alone() -> None:
    def drawn(seed: int, layer: int) -> torch.Tensor:
        return first_values(seed)(NAME.format(layer, "lora_A"), (RANK, INPUTS))

    first = drawn(1, 0)
    torch.manual_seed(99)
    assert torch.equal(first, drawn(1, 0))
    for other in (drawn(2, 0), drawn(1, 1)):
        both = torch.stack([first.flatten(), other.flatten()])
        assert abs(torch.corrcoef(both)[0, 1].item()) < 0.05
