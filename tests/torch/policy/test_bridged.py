"""What can be known of mcore-bridge's models without it, which needs GPUs: what attention is told, and what is said."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.packing import Sample
from gspo_hpc.models.architecture import outline
from gspo_hpc.ops.batch import build, part
from gspo_hpc.ops.weight_parts import Scratch
from gspo_hpc.policy import bridged, passes, provider
from gspo_hpc.policy.bridged import sequences
from tests.torch.ops.test_batch import batches, group


@given(batches(), st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_attention_is_told_where_samples_begin(drawn: Any, multiple: int) -> None:
    """By the positions: they begin at 0 where a sample does, and at every token of the padding."""
    groups, samples = drawn
    batch = part(build(groups, samples, share_prompts=False), 0, 1, multiple)
    told = sequences(batch)
    ends = told.cu_seqlens_q.tolist()
    used = int((batch.segments[:, 1] + batch.segments[:, 3]).sum())
    assert ends[: len(samples)] == (batch.positions[:used] == 0).nonzero()[:, 0].tolist()
    assert ends[len(samples)] == used and ends[-1] == batch.tokens.numel() and len(ends) - len(samples) in (1, 2)
    assert told.max_seqlen_q == max(b - a for a, b in zip(ends, ends[1:], strict=False))
    assert told.cu_seqlens_q.dtype == torch.int32 and told.qkv_format == "thd"


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({}, 64),
        ({"hc_count": None}, 64),
        ({"hc_count": 4}, 256),
        ({"enable_hyper_connections": True, "num_residual_streams": 3, "hc_count": 0}, 192),
    ],
)
def test_stages_of_several_residual_streams_receive_all_of_them(settings: dict[str, Any], width: int) -> None:
    """A receive of another size than the send hangs in NCCL."""
    same = {"hidden_size": 64, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    chunk: Any = SimpleNamespace(config=SimpleNamespace(**same, **settings))
    assert passes._stage_shape(chunk, build({}, [], share_prompts=False)) == [0, 1, width]


def test_an_empty_micro_batch_is_a_sample_of_one_token() -> None:
    assert sequences(build({}, [], share_prompts=False)).cu_seqlens_q.tolist() == [0, 1]


def test_shared_prompts_do_not_go_unnoticed() -> None:
    made = group(0, 4, [3, 2], seed=0)
    samples = [Sample(0, index, 4, length) for index, length in enumerate((3, 2))]
    with pytest.raises(AssertionError, match="prompts are shared"):
        sequences(build({0: made}, samples, share_prompts=True))


def test_without_the_package_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcore_bridge", None)  # as if it were not installed
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Glm4MoeForCausalLM"], "num_attention_heads": 8, "hidden_size": 64, "vocab_size": 99,'
        ' "num_hidden_layers": 2}'
    )
    config = from_dict({"model": {"path": str(tmp_path), "provider": "mcore_bridge"}})
    with pytest.raises(ValueError, match="pip install mcore-bridge transformer-engine"):
        provider.make(outline(tmp_path), config)


def test_memory_has_room_for_the_largest_tensor_before_the_first_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library says no sizes in advance; the files of the model do, which may have another type."""
    weights = {"a": torch.ones(3), "b": torch.ones(7, 11), "c": torch.ones(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    export = SimpleNamespace(export_weights=lambda chunks: ((n, t.bfloat16()) for n, t in weights.items()))
    monkeypatch.setattr(bridged, "_settings", lambda config: SimpleNamespace(bridge=export))
    made = bridged.Bridged(from_dict({"model": {"path": str(tmp_path), "dtype": "bfloat16"}}))
    memory, asked = Scratch(torch.device("cpu")), list[int]()
    monkeypatch.setattr(memory, "reserve", asked.append)
    for _ in range(2):
        found = {name: one.clone() for (part,) in made.stream([], memory) for name, one in part.tensors()}
        assert found.keys() == weights.keys() and all(torch.equal(found[n], t.bfloat16()) for n, t in weights.items())
    assert asked == [2 * 77] * 2
