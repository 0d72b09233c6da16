"""The plan accepts the layouts that Megatron-Core accepts and vLLM cuts, and no others (20 s).

Megatron is asked on the whole grid: its configuration, the rows that it gives a rank, and the layers that it counts.
What is caught: a rule that refuses what can run, or lets pass what ends a job when the model is built.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import divide

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning import divisions
from gspo_hpc.planning.estimates import parameters
from gspo_hpc.planning.plan import Models, judge

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 240240,
    "vocab_size": 128,
    "head_dim": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
REFUSALS = (AssertionError, ValueError, ZeroDivisionError)


def broken(folder: Path, model: dict[str, int], parallel: dict[str, Any], rollout: int = 1) -> set[str]:
    """Names of the rules that a plan of such a model breaks."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | model))
    ranks = parallel.get("tensor_model_parallel_size", 1) * parallel.get("pipeline_model_parallel_size", 1)
    raw = {
        "cluster": {"gpus_per_node": max(ranks, rollout)},
        "model": {"path": str(folder)},
        "parallel": parallel,
        "rollout": {"tensor_parallel_size": rollout},
    }
    names = {str(item.rule) for item in judge(from_dict(raw), models=Models()).broken}
    return {name for name in names if name.startswith(("tensor", "pipeline", "uneven", "rollout_tensor"))}


def test_heads_are_shared_as_megatron_shares_them(tmp_path: Path) -> None:
    accepted = 0
    for heads, size, tp in itertools.product((1, 2, 3, 4, 6, 8, 12), (2, 6), (1, 2, 3, 4, 6, 8, 12)):
        for groups in (n for n in range(1, heads + 1) if heads % n == 0):
            try:
                TransformerConfig(
                    num_layers=1,
                    hidden_size=64,
                    num_attention_heads=heads,
                    num_query_groups=groups,
                    kv_channels=size,
                    tensor_model_parallel_size=tp,
                )
                divide((heads + 2 * groups) * size, tp)  # as ColumnParallelLinear does with the rows of linear_qkv
                valid = True
            except REFUSALS:
                valid = False
            model = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": size}
            found = broken(tmp_path / "model", model, {"tensor_model_parallel_size": tp})
            assert valid == (not found), (model, tp, found)
            accepted += valid
    assert accepted > 100


def megatrons_layers(layers: int, parallel: dict[str, Any]) -> list[list[int]] | None:
    """Layers of every stage as Megatron counts them; None where it refuses, or they are not those of the model."""
    stages, chunks = parallel["pipeline_model_parallel_size"], parallel["virtual_pipeline_model_parallel_size"]
    try:
        config = TransformerConfig(
            num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32, **parallel
        )
        found = []
        for stage in range(stages):
            own = []
            for chunk in range(chunks) if chunks is not None else (None,):
                first = get_transformer_layer_offset(config, chunk, stage)
                own.append(list(range(first, first + get_num_layers_to_build(config, chunk, stage))))
            found.append(own)
    except REFUSALS:
        return None
    if not all(part for own in found for part in own):
        return None
    order = [found[stage][chunk] for chunk in range(chunks or 1) for stage in range(stages)]
    if list(itertools.chain(*order)) != list(range(layers)):
        return None
    sizes = [sum(map(len, own)) for own in found]
    wanted = (parallel["num_layers_in_first_pipeline_stage"], parallel["num_layers_in_last_pipeline_stage"])
    kept = all(want in (None, size) for want, size in zip(wanted, (sizes[0], sizes[-1]), strict=True))
    return [list(itertools.chain(*own)) for own in found] if kept else None


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_have_the_layers_that_megatron_gives_them(stages: int) -> None:
    accepted = 0
    ends = (None, 1, 2, 3, 4, 6)
    for layers, chunks, first, last in itertools.product(range(1, 13), (None, 1, 2, 3), ends, ends):
        if stages == 1 and chunks is not None:
            continue  # a rule of its own
        parallel = {
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": chunks,
            "num_layers_in_first_pipeline_stage": first,
            "num_layers_in_last_pipeline_stage": last,
        }
        expected = megatrons_layers(layers, parallel)
        settings = from_dict({"parallel": parallel}).parallel
        counts = divisions.layers_per_stage(layers, settings)
        assert (counts is None) == (expected is None), (layers, parallel, counts, expected)
        if expected is not None:
            accepted += 1
            assert [divisions.layers_of_stage(layers, settings, stage) for stage in range(stages)] == expected
    assert accepted > 10


def test_rules_of_stages_refuse_what_cannot_be_counted(tmp_path: Path) -> None:
    for stages, layers, chunks in itertools.product((1, 2, 3), (3, 4, 6), (None, 2)):
        for first, last in itertools.product((None, 1, 2, 4), repeat=2):
            if stages == 1 and chunks is not None:
                continue
            parallel = {
                "pipeline_model_parallel_size": stages,
                "virtual_pipeline_model_parallel_size": chunks,
                "num_layers_in_first_pipeline_stage": first,
                "num_layers_in_last_pipeline_stage": last,
            }
            found = broken(tmp_path / "model", {"num_hidden_layers": layers}, parallel)
            counts = divisions.layers_per_stage(layers, from_dict({"parallel": parallel}).parallel)
            assert bool(found) == (counts is None), (layers, parallel, found, counts)


def test_engines_copy_heads_as_vllm_does(tmp_path: Path) -> None:
    """The conditions are those of QKVParallelLinear and of the attention layers of vLLM's models."""
    for heads, size in itertools.product((4, 6, 8, 12), (1, 2, 3, 4, 6, 8, 12, 16)):
        for groups in (n for n in range(1, heads + 1) if heads % n == 0):
            model = {"num_attention_heads": heads, "num_key_value_heads": groups}
            found = broken(tmp_path / "model", model, {}, rollout=size)
            fits = groups % size == 0 if groups >= size else size % groups == 0
            assert (not found) == (heads % size == 0 and fits), (model, size, found)


def test_an_engine_over_copied_heads_holds_what_vllm_makes(tmp_path: Path) -> None:
    """Rows of vLLM's fused matrix: query heads divided, at least one key head and one value head on every GPU."""
    from gspo_hpc.models import architecture

    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_key_value_heads": 2, "intermediate_size": 16}))
    arch = architecture.read(tmp_path)
    hidden, size, inner = arch.hidden_size, arch.head_dim, arch.ffn_hidden_size
    for ranks in (1, 2, 4):
        rows = (arch.num_attention_heads // ranks + 2 * max(1, arch.num_key_value_heads // ranks)) * size
        layer = rows * hidden + arch.num_attention_heads // ranks * size * hidden + 3 * hidden * inner // ranks
        ends = (2 * arch.vocab_size + 2 * arch.num_layers + 1) * hidden // ranks  # norms too, though each GPU has all
        assert parameters.of_engine(arch, ranks) == layer * arch.num_layers + ends
