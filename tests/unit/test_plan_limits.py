"""What libraries would refuse once a job runs: the plan does it before, with numbers and a mend."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gspo_hpc import mends
from gspo_hpc.config import Config
from gspo_hpc.config_file import from_dict
from gspo_hpc.plan import Plan, make_plan

FLEX: dict[str, dict[str, Any]] = {
    "cluster": {"nodes": 2, "gpus_per_node": 8},
    "model": {"path": "Qwen3-30B-A3B"},
    "parallel": {"expert_model_parallel_size": 8},
    "moe": {"token_dispatcher": "flex"},
}


def made(base: dict[str, dict[str, Any]], **sections: dict[str, Any]) -> Config:
    return from_dict({**base, **{name: base.get(name, {}) | section for name, section in sections.items()}})


def limits(plan: Plan) -> list[str]:
    return [item.message for item in plan.broken]


# ---- Megatron's flex dispatcher ------------------------------------------------------------------


def test_flex_where_it_can_be() -> None:
    assert make_plan(made(FLEX)).valid
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}  # and experts' matrices, too: 2 x 8 ranks
    assert make_plan(made(FLEX, parallel=tensor)).valid
    assert make_plan(made(FLEX, parallel={"expert_model_parallel_size": 16})).valid
    small = {"cluster": {"gpus_per_node": 4}, "parallel": {"expert_model_parallel_size": 4}}  # a group stays on a node
    assert make_plan(made(FLEX, **small)).valid


@pytest.mark.parametrize(
    ("sections", "told", "mend"),
    [
        ({"cluster": {"platform": "cpu"}}, "need GPUs", "moe.token_dispatcher=alltoall"),
        ({"model": {"dtype": "float32"}}, "in bfloat16 only, and model.dtype is float32", "model.dtype=bfloat16"),
        ({"moe": {"router_dtype": "float64"}}, "moe.router_dtype is float64", "moe.router_dtype=float32"),
        ({"moe": {"router_dtype": None}}, "moe.router_dtype is not given", "moe.router_dtype=float32"),
        (
            {"parallel": {"expert_model_parallel_size": 1}},
            r"expert tensor \(1\) x expert \(1\) parallel size = 1 above 1",
            "parallel.expert_model_parallel_size=2",
        ),
        (
            {"cluster": {"nodes": 4, "gpus_per_node": 4}},
            r"gpus_per_node \(4\) must be divisible by 8 of the expert tensor \(1\) x expert \(8\)",
            "moe.token_dispatcher=alltoall",
        ),
        (
            {"parallel": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 8}},
            r"expert_tensor_parallel_size \(8\) x the model's experts of a token \(8\) = 64 must be at most 32",
            "moe.token_dispatcher=alltoall",
        ),
    ],
)
def test_what_flex_needs(sections: dict[str, dict[str, Any]], told: str, mend: str) -> None:
    config = made(FLEX, **sections)
    messages = limits(make_plan(config))
    assert any(re.search(told, message) for message in messages), messages
    offered = [str(one) for one in mends.find(config)]
    assert mend in offered, offered


def test_groups_that_deepep_has_no_kernels_for() -> None:
    nodes = {"cluster": {"nodes": 3}, "model": {"path": "nobody/knows"}}
    (message,) = limits(make_plan(made(FLEX, **nodes, parallel={"expert_model_parallel_size": 24})))
    assert "expert tensor (1) x expert (24) parallel size = 24 must be one of 2, 4, 8, 16, 32" in message


def test_flex_has_no_effect_on_a_model_without_experts() -> None:
    dense = made(FLEX, model={"path": "Qwen3-8B", "dtype": "float32"}, parallel={"expert_model_parallel_size": 1})
    assert make_plan(dense).valid
