"""A teacher in the plan: what is refused, what follows from it by itself, and its memory and time.

It would catch a teacher that has the sizes of the model in the estimates, one that the layout does not divide, and a
run that has neither a teacher's weight nor a reward and starts all the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.cli.pages.plan import _passes
from gspo_hpc.config.derived import rewards_count, teacher_config
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.machine import Parallel
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, parameters, time
from gspo_hpc.planning.plan import make_plan


def config(teacher: str = "Qwen2.5-14B", **sections: Any) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"max_steps": 8},
        "model": {"path": "Qwen2.5-7B"},
        "cluster": {"gpus_per_node": 8, "gpu": "H100-80GB"},
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "batch": {"global_batch_size": 64, "num_generations": 8, "micro_batch_tokens": 8192, "steps_per_generation": 2},
        "optimizer": {"distributed": True},
        "data": {"train": "rows.jsonl"},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 4096},
        "algorithm": {"teacher": teacher, "kl_beta": 1.0},
    }
    return from_dict({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def broken(given: Config) -> list[str]:
    return [item.message for item in make_plan(given).broken]


def test_one_completion_a_prompt_is_enough_for_a_teacher_alone() -> None:
    """Nothing is compared within a group; beside rewards it is, and one completion has none."""
    single = {"batch": {"num_generations": 1}}
    assert broken(config(**single)) == []
    graded = config(**single, reward={"functions": [{"function": "number_match"}]})
    assert any("num_generations (1) must be at least 2" in one for one in broken(graded))


def test_a_teacher_alone_is_a_whole_signal() -> None:
    plan = make_plan(config())
    assert plan.valid and plan.missing == ()
    assert not any("kl_beta" in text or "clipping is inert" in text for text in plan.warnings)
    assert make_plan(config(algorithm={"teacher": None})).missing == ("reward.functions",)
    graded = config(reward={"functions": [{"function": "number_match", "weight": 0.0}]})
    assert not rewards_count(graded) and not any("every weight" in text for text in make_plan(graded).warnings)
    assert rewards_count(config(reward={"functions": [{"function": "number_match"}]}))
    assert rewards_count(from_dict({}))


def test_the_estimator_is_the_one_whose_gradient_is_the_reverse_divergence() -> None:
    assert config().algorithm.kl_estimator == "unbiased"
    assert config(algorithm={"kl_placement": "reward"}).algorithm.kl_estimator == "k1"
    assert from_dict({"algorithm": {"kl_beta": 0.1}}).algorithm.kl_estimator == "k3"
    other = make_plan(config(algorithm={"kl_estimator": "k3"}))
    assert other.valid and any("algorithm.kl_estimator k3 in the loss does not have" in text for text in other.warnings)
    assert not any("kl_estimator" in text for text in make_plan(config(algorithm={"kl_estimator": "k2"})).warnings)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"algorithm": {"kl_beta": 0.0}}, "algorithm.teacher needs a weight: set algorithm.kl_beta above 0"),
        ({"algorithm": {"reference_interval": 4}}, "would make the policy its own teacher"),
        ({"algorithm": {"teacher": "deepseek-ai/DeepSeek-V3"}}, "cannot be run by this version"),
        ({"model": {"provider": "mcore_bridge"}}, "algorithm.teacher needs model.provider own"),
        ({"algorithm": {"teacher": "Qwen2.5-0.5B"}}, "vocab_size (151936) of algorithm.teacher must be at least"),
        (
            {
                "parallel": {
                    "pipeline_model_parallel_size": 4,
                    "tensor_model_parallel_size": 2,
                    "sequence_parallel": True,
                }
            }
            | {"model": {"path": "Qwen3-0.6B"}, "algorithm": {"teacher": "Qwen3-235B-A22B"}},
            "algorithm.teacher has the trainer's layout: num_hidden_layers (94) of the teacher must be divisible by",
        ),
        (
            {"parallel": {"teacher_tensor_model_parallel_size": 16}},
            "algorithm.teacher has a layout of its own (parallel.teacher_...): num_attention_heads (40) of the teacher",
        ),
        (
            {"parallel": {"teacher_pipeline_model_parallel_size": 3}},
            "world_size (8) must be divisible by its tensor (2) x pipeline (3) x context (1) parallel size = 6",
        ),
        (
            {"parallel": {"teacher_pipeline_model_parallel_size": 5}},
            "algorithm.teacher has a layout of its own (parallel.teacher_...): num_hidden_layers (48) of the teacher",
        ),
        ({"rollout": {"dynamic_sampling": True}}, "rollout.dynamic_sampling replaces groups whose rewards are equal"),
        ({"data": {"eval": "rows.jsonl"}}, "data.eval gives prompts for evaluation, and no reward function grades"),
        ({"data": {"train_ratio": 0.9}}, "data.train_ratio gives prompts for evaluation, and no reward function"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(sections: dict[str, dict[str, Any]], expected: str) -> None:
    found = broken(config(**sections))
    assert [message for message in found if expected in message] and "\n" not in "".join(found)


def test_evaluation_is_graded_by_a_function_that_has_no_part_in_training() -> None:
    graded = {"functions": [{"function": "number_match", "weight": 0.0}]}
    assert broken(config(data={"eval": "rows.jsonl"}, reward=graded)) == []


def test_memory_and_time_are_those_of_its_own_size() -> None:
    small, large, none = config("Qwen2.5-7B"), config("Qwen2.5-32B"), config(algorithm={"teacher": None})
    plans = {name: make_plan(one) for name, one in (("small", small), ("large", large), ("none", none))}
    memory = {name: plan.memory for name, plan in plans.items()}
    assert memory["small"] is not None and memory["large"] is not None and memory["none"] is not None
    weights = {name: memory[name].phase("teacher").parts["teacher"] for name in ("small", "large")}  # type: ignore[union-attr]
    assert 4.0 < weights["large"] / weights["small"] < 4.6
    state = parameters.state(make_arch(small), small, 0)
    assert weights["small"] == state.weights
    assert "optimizer" not in memory["small"].phase("teacher").parts, "the trainer is away meanwhile"
    assert memory["large"].host["teacher"] == 8 * weights["large"] and "teacher" not in memory["none"].host
    assert "reference_and_policy" not in memory["large"].host and "reference_and_policy" in memory["none"].host
    device = devices.card(large.cluster)
    assert device is not None
    seconds = {
        name: time.estimate(time.sizes(make_arch(one), one), one, device, time.work(one, 128), 1e6).seconds["reference"]
        for name, one in (("small", small), ("large", large))
    }
    assert 3.5 < seconds["large"] / seconds["small"] < 5.0


def test_memory_and_time_are_those_of_its_own_layout() -> None:
    """Cut in four, a rank holds a quarter of what it holds whole; the trainer's own part of the plan stays the same."""
    shared = make_plan(config("Qwen2.5-32B"))
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    cut = config("Qwen2.5-32B", parallel=sizes | {"teacher_tensor_model_parallel_size": 8})
    piped = config("Qwen2.5-32B", parallel=sizes | {"teacher_pipeline_model_parallel_size": 4})
    whole = shared.memory
    assert whole is not None
    for given in (cut, piped):
        plan = make_plan(given)
        assert plan.valid and plan.memory is not None
        parts, before = plan.memory.phase("teacher").parts, whole.phase("teacher").parts
        assert 0.2 < parts["teacher"] / before["teacher"] < 0.31
        assert plan.memory.phase("update").parts == whole.phase("update").parts
        assert plan.memory.host["teacher"] == 8 * parts["teacher"]
        assert plan.quantities == shared.quantities
    lines = [line for key, line in _passes(make_plan(cut), cut) if key == "reference"]
    assert lines == ["micro_batch_tokens 8,192, of the teacher Qwen2.5-32B with TP 8, PP 1, CP 1, EP 1"]
    device = devices.card(cut.cluster)
    assert device is not None
    seconds = [
        time.estimate(time.sizes(make_arch(one), one), one, device, time.work(one, 128), 1e6).seconds
        for one in (config("Qwen2.5-32B"), cut)
    ]
    assert seconds[0]["reference"] != seconds[1]["reference"] and seconds[0]["update"] == seconds[1]["update"]


def test_a_layout_of_the_teacher_has_nothing_of_the_trainers_stages() -> None:
    trainers = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers_in_first_pipeline_stage": 12,
    }
    given = Parallel(**trainers, teacher_pipeline_model_parallel_size=4, teacher_tensor_model_parallel_size=2)
    its = given.of_teacher()
    assert (its.pipeline_model_parallel_size, its.tensor_model_parallel_size, its.sequence_parallel) == (4, 2, True)
    assert its.virtual_pipeline_model_parallel_size is its.num_layers_in_first_pipeline_stage is None
    same = Parallel(**trainers, teacher_pipeline_model_parallel_size=2)
    assert same.of_teacher() is same, "the trainer's own size, with its stages"


def test_a_layout_without_a_teacher_is_told() -> None:
    alone = {"teacher": None}
    given = config(algorithm=alone, parallel={"teacher_context_parallel_size": 2})
    assert any(
        "parallel.teacher_context_parallel_size (2) is of the layout" in one for one in make_plan(given).warnings
    )
    assert not any("is of the layout" in one for one in make_plan(config(algorithm=alone)).warnings)


def test_a_teacher_of_adapters_has_none_itself() -> None:
    adapted = config("Qwen2.5-14B", adapter={"type": "lora", "rank": 64}, optimizer={"distributed": False})
    assert teacher_config(adapted).adapter.type is None and teacher_config(adapted).model.path == "Qwen2.5-14B"
    plain = config("Qwen2.5-14B")
    assert parameters.teacher_weights(adapted, 0) == parameters.teacher_weights(plain, 0) > 0


def make_arch(given: Config) -> architecture.Architecture:
    found = architecture.find(given)
    assert found is not None
    return found
