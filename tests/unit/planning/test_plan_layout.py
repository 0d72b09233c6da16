"""The plan's layout: engines and GPUs set apart, the two grids of ranks, and what the model's config.json allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.derived import router_replay
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.plan import make_plan


def sizes(mbs: int, gbs: int, spg: int, group: int) -> dict[str, int]:
    return {
        "micro_batch_size": mbs,
        "global_batch_size": gbs,
        "steps_per_generation": spg,
        "num_generations": group,
    }


def rules(c: Config) -> set[str]:
    return {str(item.rule) for item in make_plan(c).broken}


def messages(c: Config) -> str:
    return "\n".join(item.message for item in make_plan(c).broken)


# ---- GPUs set apart, engines, grid ---------------------------------------------------------------


def server(nodes: int, gpus: int, engines: int | None, mbs: int, gbs: int, group: int) -> Config:
    return from_dict(
        {
            "cluster": {"nodes": nodes, "gpus_per_node": gpus},
            "rollout": {"mode": "server", "engines_per_node": engines},
            "batch": sizes(mbs, gbs, 1, group),
        }
    )


def test_gpus_set_apart_for_generation() -> None:
    refused = server(1, 4, 1, 1, 3, 8)
    assert make_plan(refused).quantities["world_size"] == 3
    assert (
        "The global train batch size (3 x 1) must be evenly divisible by the number of generations per prompt (8)"
        in (messages(refused))
    )
    assert rules(refused) == {"rollout_groups_whole", "update_groups_whole"}
    for mbs, gbs, group in ((1, 3, 3), (2, 6, 3), (2, 6, 6)):  # the fixes
        assert rules(server(1, 4, 1, mbs, gbs, group)) == set()
    assert "The global train batch size (56 x 1) must be evenly divisible" in messages(server(8, 8, 1, 1, 56, 6))
    assert rules(server(8, 8, 1, 1, 56, 8)) == set()
    assert rules(server(1, 4, None, 1, 3, 3)) == {"server_engines_given"}
    assert rules(server(1, 4, 4, 1, 3, 3)) == {"server_leaves_gpus_to_train"}
    two = from_dict(
        {
            "cluster": {"gpus_per_node": 8},
            "rollout": {"mode": "server", "engines_per_node": 3, "tensor_parallel_size": 2},
        }
    )
    assert make_plan(two).quantities["world_size"] == 2


@pytest.mark.parametrize(
    ("gpus", "tp", "engines", "broken", "per_node"),
    [
        (8, 1, None, set(), 8),
        (8, 2, None, set(), 4),
        (8, 2, 2, set(), 2),
        (8, 3, None, {"rollout_tensor_parallel_divides_node"}, 2),
        (8, 1, 3, {"engines_fit_node"}, 3),
        (8, 4, 4, {"engines_fit_node"}, 4),
        (8, 12, None, {"rollout_tensor_parallel_divides_node"}, 1),
    ],
)
def test_engines_fit_their_node(gpus: int, tp: int, engines: int | None, broken: set[str], per_node: int) -> None:
    c = from_dict(
        {
            "cluster": {"nodes": 3, "gpus_per_node": gpus},
            "rollout": {"tensor_parallel_size": tp, "engines_per_node": engines},
        }
    )
    plan = make_plan(c)
    assert {item.rule for item in plan.broken} == broken
    assert plan.layout["engines_per_node"] == per_node and plan.layout["num_engines"] == 3 * per_node


def test_both_grids_tile_the_world() -> None:
    c = from_dict(
        {
            "cluster": {"nodes": 2, "gpus_per_node": 8},
            "parallel": {
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 4,
                "pipeline_model_parallel_size": 2,
            },
        }
    )
    plan = make_plan(c)
    assert (plan.quantities["dp_size"], plan.quantities["expert_dp_size"]) == (4, 1)  # ETP follows TP
    assert (plan.layout["data_parallel_size"], plan.layout["expert_data_parallel_size"]) == (4, 1)
    one = from_dict({"cluster": {"gpus_per_node": 6}, "parallel": {"expert_model_parallel_size": 4}})
    assert rules(one) == {"expert_world_size_divides"}
    assert "expert_dp_size would be 1.5" in messages(one)


def test_context_parallel_cuts_the_sequence_in_two_pieces_a_rank() -> None:
    c = {
        "cluster": {"gpus_per_node": 4},
        "parallel": {"context_parallel_size": 4},
        "rollout": {"max_prompt_length": 8, "max_response_length": 8},
    }
    assert rules(from_dict(c)) == set()
    c["rollout"] = {"max_prompt_length": 8, "max_response_length": 4}
    assert rules(from_dict(c)) == {"context_parallel_sequence"}
    assert rules(from_dict({"parallel": {"sequence_parallel": True}})) == {"sequence_parallel_needs_tensor_parallel"}


def test_sixteen_thousand_gpus() -> None:
    c = from_dict(
        {
            "cluster": {"nodes": 2048, "gpus_per_node": 8},
            "parallel": {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 8},
            "batch": sizes(1, 256 * 16, 4, 16),
        }
    )
    plan = make_plan(c, rows=10**9)
    assert plan.valid and plan.quantities["dp_size"] == 256 and plan.layout["num_engines"] == 16384


# ---- the model's config.json ---------------------------------------------------------------------

POSITIONS = "longest_sequence_fits_positions"
MODEL = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
}


def with_model(
    folder: Path, parallel: dict[str, int], rollout: dict[str, int] | None = None, **change: Any
) -> set[str]:
    (folder / "config.json").write_text(json.dumps(MODEL | change))
    return rules(
        from_dict(
            {
                "cluster": {"gpus_per_node": 48},
                "parallel": parallel,
                "model": {"path": str(folder)},
                "rollout": rollout or {},
            }
        )
    )


def test_heads_layers_and_experts_divide(tmp_path: Path) -> None:
    assert with_model(tmp_path, {}) == set()
    assert with_model(tmp_path, {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 3}) == set()
    for groups in (1, 2, 4, None):  # two or more ranks compute with each; None: as many as heads
        assert with_model(tmp_path, {"tensor_model_parallel_size": 8}, num_key_value_heads=groups) == set()
    six = {"num_attention_heads": 24, "intermediate_size": 96}
    assert with_model(tmp_path, {"tensor_model_parallel_size": 6}, **six) == {"tensor_parallel_kv_heads"}  # 4 of them
    assert with_model(tmp_path, {"tensor_model_parallel_size": 4}, intermediate_size=66) == {
        "tensor_parallel_intermediate_size"
    }
    assert with_model(tmp_path, {"tensor_model_parallel_size": 4}, num_attention_heads=6) == {"tensor_parallel_heads"}
    assert with_model(tmp_path, {"pipeline_model_parallel_size": 4}) == {"pipeline_parallel_layers"}
    assert with_model(tmp_path, {"expert_model_parallel_size": 4}) == {"expert_parallel_experts"}  # no experts at all
    assert with_model(tmp_path, {"expert_model_parallel_size": 4}, num_experts=8) == set()
    assert with_model(tmp_path, {"expert_model_parallel_size": 4}, num_local_experts=6) == {"expert_parallel_experts"}
    etp = {"expert_tensor_parallel_size": 4}
    assert with_model(tmp_path, etp, num_experts=8, moe_intermediate_size=64) == set()
    assert with_model(tmp_path, etp, num_experts=8, moe_intermediate_size=66) == {
        "expert_tensor_parallel_intermediate_size"
    }


def test_experts_on_tensor_parallel_ranks_need_sequence_parallelism(tmp_path: Path) -> None:
    tp = {"tensor_model_parallel_size": 2}
    assert with_model(tmp_path, tp) == set()
    assert with_model(tmp_path, tp, num_experts=8) == {"experts_need_sequence_parallel"}
    assert with_model(tmp_path, tp | {"sequence_parallel": True}, num_experts=8) == set()


@pytest.mark.parametrize(
    ("asked", "platform", "whose"),
    [
        ("off", "cuda", "off"),
        ("auto", "cuda", "rollout"),
        ("auto", "cpu", "old_logprobs"),
        ("rollout", "cuda", "rollout"),
        ("old_logprobs", "cuda", "old_logprobs"),
    ],
)
def test_whose_experts_are_repeated(asked: str, platform: str, whose: str) -> None:
    assert router_replay(from_dict({"moe": {"router_replay": asked}, "cluster": {"platform": platform}})) == whose


def test_the_engine_on_the_cpu_does_not_tell_its_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_experts": 8}))
    on_cpu = {"cluster": {"platform": "cpu"}, "model": {"path": str(tmp_path)}, "moe": {"router_replay": "rollout"}}
    assert "moe.router_replay" in make_plan(from_dict(on_cpu)).broken[0].message
    assert rules(from_dict(on_cpu | {"moe": {"router_replay": "auto"}})) == set()
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert rules(from_dict(on_cpu)) == set()  # without experts it has no effect


def test_what_models_of_mcore_bridge_need() -> None:
    on_gpus = {"model": {"provider": "mcore_bridge"}, "batch": {"share_prompts": False}}
    assert rules(from_dict(on_gpus)) == set()
    two = {"parallel": {"context_parallel_size": 2}, "cluster": {"gpus_per_node": 2}}
    torch = {"model": {"provider": "mcore_bridge", "layers": "torch"}}
    for section, rule, words in (
        ({"batch": {"share_prompts": True}}, "share_prompts", "batch.share_prompts=false"),
        ({"cluster": {"platform": "cpu"}}, "needs_transformer_engine", "needs GPUs"),
        (torch, "needs_transformer_engine", "layers of Transformer Engine"),
        (two, "context_parallel", "context_parallel_size (2)"),
        ({"moe": {"router_replay": "rollout"}}, "router_replay", "moe.router_replay (rollout)"),
    ):
        (broken,) = make_plan(from_dict(on_gpus | section)).broken
        assert broken.rule == f"mcore_bridge_{rule}" and words in broken.message


def test_what_overlapping_and_float16_need() -> None:
    gather = {"parallel": {"overlap_param_gather": True, "overlap_grad_reduce": True}}
    assert rules(from_dict(gather)) == {"overlap_param_gather_needs"}
    assert rules(from_dict(gather | {"optimizer": {"distributed": True}})) == set()
    half = {"cluster": {"gpus_per_node": 2}, "model": {"dtype": "float16"}}
    assert rules(from_dict(half)) == set()
    assert rules(from_dict(half | {"parallel": {"expert_model_parallel_size": 2}})) == {"float16_expert_parallel"}


def test_what_transformer_engine_and_fp8_need() -> None:
    cpu = {"cluster": {"platform": "cpu"}}
    assert rules(from_dict({"model": {"layers": "transformer_engine"}})) == set()
    assert rules(from_dict(cpu | {"model": {"layers": "transformer_engine"}})) == {"transformer_engine_needs_gpus"}
    assert rules(from_dict({"model": {"fp8": "hybrid"}})) == set()
    assert rules(from_dict(cpu | {"model": {"fp8": "hybrid"}})) == {"fp8_needs_transformer_engine"}
    assert rules(from_dict({"model": {"fp8": "e4m3", "layers": "torch"}})) == {"fp8_needs_transformer_engine"}
    assert rules(from_dict({"model": {"fp8": "e4m3", "dtype": "float16"}})) == {"fp8_needs_transformer_engine"}
    assert "model.fp8: e4m3 needs GPUs" in messages(from_dict({"model": {"fp8": "e4m3", "dtype": "float32"}}))


def test_what_a_choice_of_attention_kernels_needs() -> None:
    for backend in ("flash", "fused", "unfused"):
        model = {"attention_backend": backend}
        assert rules(from_dict({"model": model})) == set()
        for refused in ({"model": model | {"layers": "torch"}}, {"model": model, "cluster": {"platform": "cpu"}}):
            (broken,) = make_plan(from_dict(refused)).broken
            assert broken.rule == "attention_backend_needs_te"
            assert "model.attention_backend=auto" in broken.message
    assert rules(from_dict({"cluster": {"platform": "cpu"}})) == set()


def test_norms_that_round_first_need_the_layers_of_torch() -> None:
    rounded = {"norms_in_fp32": False}
    (broken,) = make_plan(from_dict({"model": rounded})).broken
    assert broken.rule == "rounded_norms_need_torch" and "model.layers=torch" in broken.message
    assert rules(from_dict({"model": rounded | {"layers": "torch"}})) == set()
    assert rules(from_dict({"model": rounded, "cluster": {"platform": "cpu"}})) == set()


def test_a_virtual_pipeline_needs_stages_and_layers(tmp_path: Path) -> None:
    pp = {"pipeline_model_parallel_size": 3}
    assert with_model(tmp_path, {"virtual_pipeline_model_parallel_size": 2}) == {"virtual_pipeline_needs_pipeline"}
    assert with_model(tmp_path, pp | {"virtual_pipeline_model_parallel_size": 2}) == set()
    assert with_model(tmp_path, pp | {"virtual_pipeline_model_parallel_size": 4}) == {"pipeline_parallel_layers"}
    assert with_model(tmp_path, {}, {"tensor_parallel_size": 4}) == set()
    assert with_model(tmp_path, {}, {"tensor_parallel_size": 8}) == set()
    six = {"num_attention_heads": 24, "intermediate_size": 96}
    assert with_model(tmp_path, {}, {"tensor_parallel_size": 6}, **six) == {"rollout_tensor_parallel_kv_heads"}
    inner = {"rollout_tensor_parallel_inner_size"}
    assert with_model(tmp_path, {}, {"tensor_parallel_size": 8}, intermediate_size=68) == inner
    assert with_model(tmp_path, {}, {"tensor_parallel_size": 8}, num_experts=8, moe_intermediate_size=68) == inner
    nested = {"text_config": MODEL | {"num_hidden_layers": 5}}
    assert with_model(tmp_path, {"pipeline_model_parallel_size": 3}, **nested) == {"pipeline_parallel_layers"}


def test_the_longest_sequence_fits_the_positions(tmp_path: Path) -> None:
    long = {"max_prompt_length": 1024, "max_response_length": 1025}
    assert with_model(tmp_path, {}, long) == {POSITIONS}
    assert with_model(tmp_path, {}, long | {"max_response_length": 1024}) == set()
    assert with_model(tmp_path, {}, long, rope_scaling={"rope_type": "linear", "factor": 2.0}) == set()
    assert with_model(tmp_path, {}, long, rope_parameters={"rope_type": "default", "rope_theta": 1e4}) == {POSITIONS}


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    c = from_dict({"model": {"path": str(tmp_path)}})
    assert make_plan(c).valid and "not checked" in make_plan(c).notes[0]
    (tmp_path / "config.json").write_text("{")
    assert rules(c) == {"model_config_readable"}
    (tmp_path / "config.json").write_text("[]")
    assert rules(c) == {"model_config_readable"}
