"""Cut and put together again, every tensor is what it was, for any sizes of a model and any number of ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.models.architecture import SUPPORTED, Architecture, Experts, Rope
from gspo_hpc.models.weight_table import stage_table
from gspo_hpc.ops.weight_map import needs_whole, shard_shape, to_hf, to_shard, to_views


@st.composite
def architectures(draw: st.DrawFn, ranks: int) -> Architecture:
    """Heads and widths that `ranks` ranks can share, also fewer key-value heads; a vocabulary that they cannot."""
    family = draw(st.sampled_from(SUPPORTED))
    groups = draw(st.sampled_from([n for n in range(1, 2 * ranks + 1) if ranks % n == 0 or n % ranks == 0]))
    split = ranks // math.gcd(groups, ranks)  # ranks that share a group
    experts = None
    if "Moe" in family or "Mixtral" in family:
        shared = ranks * draw(st.integers(1, 3)) if family == "Qwen2MoeForCausalLM" else 0
        dense = tuple(draw(st.sets(st.integers(0, 2), max_size=2)))
        experts = Experts(4, 2, ranks * draw(st.integers(1, 3)), True, shared, dense)
    return Architecture(
        family=family,
        num_layers=3,
        hidden_size=draw(st.integers(1, 4)) * 2,
        ffn_hidden_size=ranks * draw(st.integers(1, 3)),
        num_attention_heads=groups * split * draw(st.integers(1, 3)),
        num_key_value_heads=groups,
        head_dim=draw(st.integers(1, 3)) * 2 * split,
        vocab_size=draw(st.integers(5, 17)),
        max_position_embeddings=8,
        norm_eps=1e-6,
        rope=Rope(1e4),
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=family.startswith("Qwen2"),
        qk_norm=family.startswith("Qwen3"),
        experts=experts,
    )


def apart(shards: list[torch.Tensor]) -> torch.Tensor:
    """Return the shards [size, *shard] in memory where something else lies behind each of them, as in a bucket."""
    memory = torch.full((len(shards), shards[0].numel() + 5), float("nan"))
    return torch.stack([one.flatten() for one in shards], out=memory[:, : shards[0].numel()]).unflatten(
        1, shards[0].shape
    )


@given(st.data(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_there_and_back(data: st.DataObject, ranks: int) -> None:
    arch = data.draw(architectures(ranks))
    names = []
    for entry in stage_table(arch, 0, arch.num_layers, True, True, ep_size=2):
        tensors = [torch.randn(shape) for shape in entry.shapes]
        shards = [to_shard(entry, tensors, arch, rank, ranks) for rank in range(ranks)]
        assert {tuple(shard.shape) for shard in shards} == {shard_shape(entry, arch, ranks)}, entry
        found = dict(to_hf(entry, torch.stack(shards), arch))
        assert found.keys() == set(entry.hf)
        for name, tensor in zip(entry.hf, tensors, strict=True):
            assert torch.equal(found[name], tensor), name
        for (_, shape, view), tensor in zip(to_views(entry, apart(shards), arch), tensors, strict=True):
            assert shape == tensor.shape and torch.equal(view.reshape(shape), tensor)
        if not needs_whole(entry, arch, ranks):  # also of several parameters of one shape, in memory with gaps
            several = torch.stack([apart(shards), apart(shards) + 1.0])
            for (name, shape, view), tensor in zip(to_views(entry, several, arch), tensors, strict=True):
                assert view.untyped_storage().data_ptr() == several.untyped_storage().data_ptr(), name
                assert torch.equal(view.reshape(2, *shape), torch.stack([tensor, tensor + 1.0]))
        names += entry.hf
    assert len(names) == len(set(names))


@given(st.data(), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_stages_hold_the_whole_model_between_them(data: st.DataObject, cut: int) -> None:
    """A tied head stands in the last stage a second time."""
    arch = data.draw(architectures(1))
    cut = min(cut, arch.num_layers - 1)
    first = stage_table(arch, 0, cut, True, False)
    last = stage_table(arch, cut, arch.num_layers - cut, False, True)
    whole = [name for entry in stage_table(arch, 0, arch.num_layers, True, True) for name in entry.hf]
    parts = [name for entry in (*first, *last) for name in entry.hf]
    assert sorted(parts) == sorted([*whole, *(["model.embed_tokens.weight"] if arch.tie_word_embeddings else [])])


@given(st.data(), st.sampled_from([1, 2, 4]))
@settings(max_examples=30, deadline=None)
def test_names_in_fused_layers(data: st.DataObject, ep_size: int) -> None:
    """The same parameters in the same order, under the names of Transformer Engine's modules in Megatron-Core."""
    arch = data.draw(architectures(1))
    plain = stage_table(arch, 0, arch.num_layers, True, True, ep_size)
    fused = stage_table(arch, 0, arch.num_layers, True, True, ep_size, fused=True)
    assert [replace(entry, name="") for entry in fused] == [replace(entry, name="") for entry in plain]
    per_rank = arch.experts.count // ep_size if arch.experts else 0
    for entry, before in zip(fused, plain, strict=True):
        layer = f"decoder.layers.{before.name.split('.')[2]}" if "layers" in before.name else ""
        if before.name.endswith("input_layernorm.weight"):
            assert entry.name == f"{layer}.self_attention.linear_qkv.layer_norm_weight"
        elif before.name.endswith("pre_mlp_layernorm.weight"):
            experts = arch.has_experts(int(before.name.split(".")[2]))
            kept = f"{layer}.pre_mlp_layernorm.weight"
            assert entry.name == (kept if experts else f"{layer}.mlp.linear_fc1.layer_norm_weight")
        elif entry.expert is not None:
            product = before.name.split(".")[-2]
            assert entry.name == f"{layer}.mlp.experts.{product}.weight{entry.expert % per_rank}"
        else:
            assert entry.name == before.name
