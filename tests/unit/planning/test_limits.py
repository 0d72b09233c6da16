"""The plan refuses what libraries would refuse once a job runs, with numbers and a fix."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import pytest
import yaml

from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import Plan, make_plan

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
    places = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "expert_model_parallel_size": 2}
    assert make_plan(made(FLEX, parallel=places)).valid  # a token goes to 4 x 8 = 32 places, which is the most
    small = {"cluster": {"gpus_per_node": 4}, "parallel": {"expert_model_parallel_size": 4}}  # a group stays on a node
    assert make_plan(made(FLEX, **small)).valid


@pytest.mark.parametrize(
    ("sections", "told", "fix"),
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
            r"gpus_per_node \(4\) must be divisible by 8: DeepEP wants that many of the expert tensor \(1\) x",
            "moe.token_dispatcher=alltoall",
        ),
        (
            {"parallel": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 8}},
            r"expert_tensor_parallel_size \(8\) x the model's experts of a token \(8\) = 64 must be at most 32",
            "moe.token_dispatcher=alltoall",
        ),
    ],
)
def test_what_flex_needs(sections: dict[str, dict[str, Any]], told: str, fix: str) -> None:
    config = made(FLEX, **sections)
    messages = limits(make_plan(config))
    assert any(re.search(told, message) for message in messages), messages
    offered = [str(one) for one in search.find(config)]
    assert fix in offered, offered


def test_groups_that_deepep_has_no_kernels_for() -> None:
    nodes = {"cluster": {"nodes": 3}, "model": {"path": "nobody/knows"}}
    (message,) = limits(make_plan(made(FLEX, **nodes, parallel={"expert_model_parallel_size": 24})))
    assert "expert tensor (1) x expert (24) parallel size = 24 must be one of 2, 4, 8, 16, 32" in message


def test_flex_has_no_effect_on_a_model_without_experts() -> None:
    dense = made(FLEX, model={"path": "Qwen3-8B", "dtype": "float32"}, parallel={"expert_model_parallel_size": 1})
    assert make_plan(dense).valid


# ---- vLLM ----------------------------------------------------------------------------------------

ENGINE: dict[str, dict[str, Any]] = {
    "rollout": {"max_prompt_length": 1024, "max_response_length": 3072},
    "cluster": {"gpu": "H100"},
    "model": {"path": "Qwen3-0.6B"},
}


def with_engine(**engine: Any) -> Config:
    return made(ENGINE, rollout={"engine": engine})


@pytest.mark.parametrize(
    ("engine", "rule", "words", "fix"),
    [
        (
            {"max_model_len": 2048},
            "argument_is_free",
            "rollout.engine.max_model_len (2048) cannot be given: it follows from rollout.max_prompt_length and "
            "rollout.max_response_length, 1024 + 3072 = 4096",
            "rollout.engine.max_model_len=null",
        ),
        ({"seed": 3}, "argument_is_free", "(3) cannot be given: it follows from run.seed", "rollout.engine.seed=null"),
        (
            {"gpu_memory_utilization": 80},
            "argument_value",
            "rollout.engine.gpu_memory_utilization (80) must be above 0 and at most 1",
            "rollout.engine.gpu_memory_utilization=null",
        ),
        (
            {"gpu_memory_utilization": "all"},
            "argument_value",
            "(all) must be above 0",
            "rollout.engine.gpu_memory_utilization=null",
        ),
        (
            {"max_num_seqs": 0},
            "argument_value",
            "max_num_seqs (0) must be a whole number, 1 or more",
            "rollout.engine.max_num_seqs=null",
        ),
        (
            {"max_num_seqs": 512, "max_num_batched_tokens": 256},
            "tokens_hold_sequences",
            "max_num_batched_tokens (256) must be at least rollout.engine.max_num_seqs (512)",
            "rollout.engine.max_num_batched_tokens=512",
        ),
        (
            {"max_num_batched_tokens": 2048, "enable_chunked_prefill": False},
            "tokens_hold_longest_sequence",
            "max_num_batched_tokens (2048) must be at least max_prompt_length + max_response_length (4096)",
            "rollout.engine.max_num_batched_tokens=4096",
        ),
        (
            {"gpu_memory_utilisation": 0.5},
            "argument_spelling",
            "rollout.engine.gpu_memory_utilisation is no argument of vLLM; nearest: gpu_memory_utilization",
            "rollout.engine.gpu_memory_utilisation=null",
        ),
        (
            {"pipeline_parallel_size": 2},
            "argument_value",
            "(2) must be 1",
            "rollout.engine.pipeline_parallel_size=null",
        ),
        ({"data_parallel_size": 4}, "argument_value", "(4) must be 1", "rollout.engine.data_parallel_size=null"),
        (
            {"enable_sleep_mode": False},
            "argument_value",
            "(False) must be true",
            "rollout.engine.enable_sleep_mode=null",
        ),
        (
            {"skip_tokenizer_init": True},
            "argument_value",
            "reward functions need text",
            "rollout.engine.skip_tokenizer_init=null",
        ),
    ],
)
def test_what_vllm_would_refuse_or_contradicts_a_setting(
    engine: dict[str, Any], rule: str, words: str, fix: str
) -> None:
    """And what is offered can be typed behind the command."""
    config = with_engine(**engine)
    (broken,) = make_plan(config).broken
    assert broken.rule == f"engine_{rule}" and words in broken.message, broken.message
    assert fix in [str(one) for one in search.find(config)], list(map(str, search.find(config)))
    text = yaml.safe_dump({**ENGINE, "rollout": ENGINE["rollout"] | {"engine": engine}})
    for one in search.find(config):
        if len(one.changes) == 1:
            assert make_plan(from_text(text, str(one))).valid, str(one)


def from_text(text: str, *overrides: str) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load(file.name, overrides)


def test_what_vllm_takes_is_let_through() -> None:
    taken = {"gpu_memory_utilization": 0.8, "max_num_seqs": 256, "max_num_batched_tokens": 4096, "enforce_eager": True}
    assert make_plan(with_engine(**taken, enable_chunked_prefill=False, enable_sleep_mode=True)).valid
    assert with_engine(gpu_memory_utilization=None) == made(ENGINE)


# ---- patience --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "told"), [(899.0, False), (900.0, True), (1200.0, True)])
def test_an_engine_that_hangs_needs_to_be_seen_before_its_rank(engine: float, told: bool) -> None:
    warnings = make_plan(from_dict({"faults": {"engine_timeout": engine}})).warnings
    assert told == any(f"faults.engine_timeout ({engine:g} s) is not below" in text for text in warnings), warnings
