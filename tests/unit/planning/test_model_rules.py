"""Recomputation: names and numbers that Megatron takes, and when it is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.planning.rules.model import RECOMPUTED


def plan(memory: dict[str, Any], **parallel: int) -> Plan:
    sizes = {f"{name}_parallel_size": size for name, size in parallel.items()}
    raw = {"model": {"path": "Qwen2.5-32B"}, "cluster": {"gpus_per_node": 8}, "parallel": sizes, "memory": memory}
    return make_plan(from_dict(raw))


def messages(found: Plan) -> list[str]:
    return [item.message for item in found.broken]


def broken(found: Plan) -> list[str]:
    return [item.rule for item in found.broken]


def test_modules_that_are_none_are_refused_with_the_nearest() -> None:
    refused = plan({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlpp"]})
    (text,) = messages(refused)
    assert broken(refused) == ["recompute_modules_known"]
    assert text.startswith("memory.recompute_modules: mlpp is no part") and "; nearest: mlp; known: core_attn" in text
    all_but_one = [name for name in RECOMPUTED if name != "moe_act"]
    assert plan({"recompute_granularity": "selective", "recompute_modules": all_but_one}).valid


@pytest.mark.parametrize(
    ("model", "modules", "rule", "words"),
    [
        ({"path": "Qwen3-30B-A3B"}, ["moe_act"], None, None),
        (
            {"path": "Qwen3-30B-A3B", "layers": "torch"},
            ["moe_act"],
            "recompute_moe_act_needs",
            "moe_act needs a model with experts",
        ),
        ({"path": "Qwen3-8B"}, ["moe_act"], "recompute_moe_act_needs", "moe_act needs a model with experts"),
        (
            {"path": "Qwen3-8B", "fp8": "hybrid"},
            ["layernorm"],
            "recompute_delayed_fp8",
            "model.fp8_recipe: delayed cannot be combined",
        ),
        ({"path": "Qwen3-8B", "fp8": "hybrid", "fp8_recipe": "blockwise"}, ["layernorm"], None, None),
    ],
)
def test_modules_that_the_layers_do_not_have(
    model: dict[str, str], modules: list[str], rule: str | None, words: str | None
) -> None:
    memory = {"recompute_granularity": "selective", "recompute_modules": modules}
    refused = from_dict({"model": model, "memory": memory})
    found = messages(make_plan(refused))
    assert broken(make_plan(refused)) == ([rule] if rule else [])
    assert [words in text for text in found] == [True] if words else found == []
    assert not words or "memory.recompute_modules=[core_attn]" in [str(fix) for fix in search.find(refused)]


@pytest.mark.parametrize(
    ("layers", "sizes", "most"),
    [
        (999, {}, "at most 64: layers of the model (64) / pipeline_model_parallel_size (1)"),
        (9, {"pipeline_model": 8}, "at most 8: "),
        (5, {"pipeline_model": 8, "virtual_pipeline_model": 2}, "at most 4: "),
        (4, {"pipeline_model": 8, "virtual_pipeline_model": 2}, None),
        (8, {"pipeline_model": 8}, None),
    ],
)
def test_no_more_layers_are_computed_again_than_a_stage_has(
    layers: int, sizes: dict[str, int], most: str | None
) -> None:
    refused = plan({"recompute_granularity": "full", "recompute_num_layers": layers}, **sizes)
    found = messages(refused)
    assert broken(refused) == ([] if most is None else ["recompute_num_layers"])
    if most is None:
        assert found == []
    else:
        (text,) = found
        assert f"memory.recompute_num_layers ({layers}) must be {most}" in text


@pytest.mark.parametrize(
    ("stages", "granularity", "warned"),
    [(4, None, False), (8, None, True), (8, "full", False), (8, "selective", False)],
)
def test_deep_pipelines_want_recomputation(stages: int, granularity: str | None, warned: bool) -> None:
    found = plan({"recompute_granularity": granularity}, pipeline_model=stages)
    assert found.valid
    told = [text for text in found.warnings if "memory.recompute_granularity=full" in text]
    assert len(told) == warned
    assert not warned or "pipeline_model_parallel_size (8) is above 4" in told[0]


@pytest.mark.parametrize(("stages", "warned"), [(4, False), (5, True)])
def test_a_pipeline_is_deep_from_the_size_on_that_the_warning_names(stages: int, warned: bool) -> None:
    raw = {
        "model": {"path": "Qwen3-14B"},
        "cluster": {"nodes": stages, "gpus_per_node": 8},
        "parallel": {"pipeline_model_parallel_size": stages},
        "memory": {"recompute_granularity": None},
    }
    found = make_plan(from_dict(raw))
    assert found.valid
    assert [f"({stages}) is above 4" in text for text in found.warnings if "recompute_granularity=full" in text] == (
        [True] if warned else []
    )
