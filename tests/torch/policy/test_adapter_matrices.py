"""First values of adapters beside what peft draws, and merged weights beside float64 (3 s).

They would catch another spread, one draw for all layers or seeds, and a weight in 16 bits that is rounded twice.
"""

from __future__ import annotations

import peft
import pytest
import torch

from gspo_hpc.policy.adapters import lora
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merged_weight_of_16_bits_is_rounded_once(dtype: torch.dtype) -> None:
    """A product that is rounded first moves a fifth of the elements by a step; sums in fp32 move the rare near-ties."""
    generator = torch.Generator().manual_seed(5)
    weight, a, b = (
        torch.randn(shape, generator=generator) * size
        for shape, size in (((OUTPUTS, INPUTS), 0.02), ((RANK, INPUTS), 0.03), ((OUTPUTS, RANK), 0.03))
    )
    weight = weight.to(dtype)
    exact = weight.double() + 2.0 * (b.double() @ a.double())
    allowed = exact.numel() // 1000  # sums of fp32 that fall on the other side of a middle
    assert (lora.added(weight, lora.product(a, b), 2.0) != exact.to(dtype)).sum().item() < allowed
    twice = weight + (2.0 * (b @ a)).to(dtype)
    assert (twice != exact.to(dtype)).sum().item() > 100 * allowed
    rows = lora.added_to_rows(weight, b.t().contiguous(), a.t().contiguous(), 2.0)
    assert (rows != exact.to(dtype)).sum().item() < allowed
