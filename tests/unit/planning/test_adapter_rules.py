"""Rules of adapters: the layers that they can be on, and the combinations that are refused.

It takes a second, and catches a config that a rank would refuse only when it builds the model, or one that it would
train in another way than it says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import engine_arguments
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.models import adapter_table, catalog
from gspo_hpc.models.architecture import find
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan
from tests.unit.planning.test_planned_only import WHOLE


def broken(adapter: dict[str, Any], **sections: Any) -> list[tuple[str, str]]:
    """The rules that the config of a whole run breaks, with their messages."""
    found = make_plan(from_dict({**WHOLE, **sections, "adapter": {"type": "lora", **adapter}}))
    return [(str(item.rule), item.message) for item in found.broken]


@pytest.mark.parametrize(
    ("adapter", "sections", "rule", "words"),
    [
        ({"targets": ["q_proj", "u_proj"]}, {}, "adapter_targets_known", "nearest: up_proj"),
        ({"targets": []}, {}, "adapter_targets_known", "nothing would be trained"),
        ({"targets": ["lm_head"]}, {}, "adapter_targets_known", "computed in chunks"),
        ({"targets": ["embed_token"]}, {}, "adapter_targets_known", "nearest: embed_tokens"),
        (
            {"targets": ["all-linear", "embed_tokens"]},
            {"model": {"path": "Qwen3-4B"}},
            "adapter_embedding_apart",
            "whose head is the embedding's weight",
        ),
        (
            {"targets": ["embed_tokens"], "engine": "adapters"},
            {},
            "adapter_engine",
            "places for adapters on embed_tokens",
        ),
        ({"targets": ["q_proj", "gate"]}, {}, "adapter_targets_known", "routers stay as they are"),
        ({"targets": ["w2"]}, {}, "adapter_targets_known", "here its name is down_proj"),
        ({"dropout": 0.05}, {}, "adapter_dropout", "(0.05) must be 0"),
        ({"rank": 1025}, {}, "adapter_rank", "(1025) must be at most 1024"),
        ({"targets": ["embed_tokens"], "rank": 4097}, {}, "adapter_rank", "(4097) must be at most 4096"),
        ({"rank": 513}, {"model": {"path": "Qwen3-30B-A3B"}}, "adapter_rank", "(513) must be at most 512"),
        ({}, {"model": {"path": "Qwen3.5-4B"}}, "adapter_known_layers", "no adapters for this family of models"),
        ({}, {"model": {"path": "Qwen3-8B", "layers": "transformer_engine"}}, "adapter_layers_of_torch", "fuse a norm"),
        ({"engine": "adapters"}, {"rollout": {"dtype": "float32"}}, "adapter_engine", "in 16 bits, and engines have"),
        ({"engine": "adapters", "rank": 513}, {}, "adapter_engine", "ranks up to 512, and adapter.rank is 513"),
        ({"engine": "adapters"}, {"rollout": {"engine": {"enable_lora": False}}}, "adapter_engine", "is false"),
        (
            {"engine": "adapters"},
            {"rollout": {"engine": {"max_lora_rank": 8}}},
            "adapter_engine",
            "max_lora_rank, which",
        ),
    ],
)
def test_what_is_refused(adapter: dict[str, Any], sections: dict[str, Any], rule: str, words: str) -> None:
    ((found, message),) = broken(adapter, **sections)
    assert found == rule and words in message


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"rank": 16, "alpha": 16.0}, "adapter.rank, adapter.alpha are given without adapter.type"),
        ({"rank": 8}, "adapter.rank is given without adapter.type"),  # its default
        ({"path": "nowhere"}, "adapter.path is given without adapter.type, so the whole model would be trained"),
    ],
)
def test_adapters_without_their_type_are_not_left_out_in_silence(adapter: dict[str, Any], words: str) -> None:
    """The whole model was trained, and a folder that is not there was not missed."""
    config = from_dict({**WHOLE, "adapter": adapter})
    (found,) = make_plan(config).broken
    assert str(found.rule) == "adapter_type_given" and words in found.message
    assert "adapter.type=lora" in {str(fix) for fix in search.find(config)}
    assert make_plan(from_dict({**WHOLE, "adapter": adapter | {"type": None}})).valid


def test_fp8_and_another_provider_are_refused() -> None:
    fp8 = broken({}, model={"path": "Qwen3-8B", "fp8": "hybrid"})
    assert [rule for rule, _ in fp8] == ["adapter_layers_of_torch"]
    bridged = broken({}, model={"path": "Qwen3-8B", "provider": "mcore_bridge"})
    assert "adapter_own_provider" in [rule for rule, _ in bridged]


def test_what_breaks_no_rule() -> None:
    assert broken({"targets": ["v_proj", "q_proj"], "rank": 1}) == [] == broken({"rank": 1024})
    assert broken({"targets": ["embed_tokens"], "rank": 4096}) == [] == broken({"targets": ["embed_tokens", "o_proj"]})
    unused = make_plan(from_dict({**WHOLE, "adapter": {"type": None, "dropout": 0.5, "targets": ["nothing"]}}))
    assert unused.valid, "nothing of the section counts where there is no adapter"


def test_targets_are_those_of_the_model_in_its_order() -> None:
    arch = find(from_dict({"model": {"path": next(name for name in catalog.names() if name.endswith("Qwen3-8B"))}}))
    assert arch is not None
    some = adapter_table.adapted_linears(arch, ["v_proj", "q_proj", "down_proj"], 3)
    names = [[part.module for part in linear.parts] for linear in some]
    assert names == [
        ["model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.v_proj"],
        ["model.layers.3.mlp.down_proj"],
    ]
    every = adapter_table.adapted_linears(arch, ["all-linear"], 0)
    shapes = [(part.target, part.inputs, part.outputs) for linear in every for part in linear.parts]
    assert shapes[:4] == [
        ("q_proj", 4096, 4096),
        ("k_proj", 4096, 1024),
        ("v_proj", 4096, 1024),
        ("o_proj", 4096, 4096),
    ]
    assert shapes[4:] == [("gate_proj", 4096, 12288), ("up_proj", 4096, 12288), ("down_proj", 12288, 4096)]


@pytest.mark.parametrize(
    ("adapter", "sections", "experts", "beside"),
    [
        ({"type": "lora"}, {}, False, True),
        ({"type": "lora"}, {"model": {"dtype": "float16"}}, False, True),
        ({"type": "lora"}, {"model": {"dtype": "float32"}}, False, False),
        ({"type": "lora"}, {"rollout": {"dtype": "float32"}}, False, False),
        ({"type": "lora"}, {}, True, False),
        ({"type": "lora", "rank": 1024}, {}, False, False),
        ({"type": "lora", "engine": "merged"}, {}, False, False),
        ({"type": "lora"}, {"rollout": {"engine": {"enable_lora": False}}}, False, False),
        ({"type": "lora"}, {"rollout": {"engine": {"worker_extension_cls": "mine.Worker"}}}, False, False),
        ({"type": "lora"}, {"rollout": {"engine": {"lora_target_modules": ["q_proj"]}}}, False, False),
        ({"type": "lora"}, {"run": {"deterministic": True}}, False, False),
        ({"type": "lora", "engine": "adapters"}, {"run": {"deterministic": True}}, False, True),
        ({"type": "lora"}, {"rollout": {"mode": "server"}}, False, False),
        ({"type": "lora", "targets": ["q_proj", "embed_tokens"]}, {}, False, False),
        ({}, {}, False, False),
    ],
)
def test_the_way_into_engines_follows_from_precision(
    adapter: dict[str, Any], sections: dict[str, Any], experts: bool, beside: bool
) -> None:
    """In 16 bits as vLLM's own, where it can have them and need not add in a fixed order; else merged."""
    config = from_dict({"cluster": {"platform": "cuda"}, **sections, "adapter": adapter})
    assert engine_arguments.adapters_beside_weights(config, experts=experts) is beside


def test_float32_on_a_cpu_may_have_adapters_beside_weights() -> None:
    config = from_dict(
        {
            "cluster": {"platform": "cpu"},
            "model": {"dtype": "float32"},
            "adapter": {"type": "lora", "engine": "adapters"},
        }
    )
    assert engine_arguments.adapters_obstacle(config, experts=False) is None
    assert engine_arguments.adapters_beside_weights(config, experts=False)


@pytest.mark.parametrize(
    ("preset", "given", "engine", "ranks"),
    [
        ("qwen3_4b_lora_1gpu", 700, "adapters", [128, 320]),
        ("qwen3_14b_lora_1gpu", 700, "adapters", [256, 512]),
        ("qwen3_14b_lora_1gpu", 5000, "merged", [256, 512]),
    ],
)
def test_ranks_are_offered_in_steps_that_people_use(
    project: Path, preset: str, given: int, engine: str, ranks: list[int]
) -> None:
    """Less room in memory gave half of what is given, or half of that: nobody has ranks of 350 or 175."""
    config = load(project / "configs" / f"{preset}.yaml", [f"adapter.rank={given}", f"adapter.engine={engine}"])
    found = {one.value for fix in search.find(config) for one in fix.changes if one.key == "adapter.rank"}
    assert sorted(found) == ranks


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["q_proj", "v_porj"], ("q_proj", "v_proj")),
        (["v_porj", "lm_head", "q_proj"], ("v_proj", "q_proj")),
        (["w1", "w3"], ("gate_proj", "up_proj")),
        (["q_proj", "q_prj", "banana"], ("q_proj",)),
        (["all_linear"], ("all-linear",)),
        (["banana"], ("all-linear",)),
    ],
)
def test_the_fix_of_misspelt_targets_has_those_that_are_meant(given: list[str], meant: tuple[str, ...]) -> None:
    config = from_dict({**WHOLE, "adapter": {"type": "lora", "targets": given}})
    (change,) = search.find(config)[0].changes
    assert (change.key, tuple(change.value)) == ("adapter.targets", meant)
