"""The plan of reward models: what it refuses, with the numbers, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.pages import ranks as rank_page
from gspo_hpc.cli.pages import render
from gspo_hpc.config import loader, paths
from gspo_hpc.planning.estimates import time
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.planning.ranks import engine_gpus

ASKED = "reward.functions=[{function: reward_model}]"
PRESET = paths.PRESETS / "qwen2.5_7b_tp2.yaml"
SIZES = {
    **{"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
    **{"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
}


def plan_of(model: str, *more: str) -> Plan:
    return make_plan(loader.load(PRESET, [f"reward.models={model}", ASKED, *more]))


def broken(plan: Plan) -> dict[str, str]:
    return {str(one.rule): one.message for one in plan.broken}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


def test_a_model_that_fits_is_counted_in_every_phase() -> None:
    plan = plan_of("[{name: a, path: Qwen2.5-7B}]")
    without = make_plan(loader.load(PRESET, ["reward.functions=[{function: number_match}]"]))
    assert not plan.broken and plan.memory is not None and without.memory is not None
    phases = {phase.name: phase.parts for phase in plan.memory.phases}
    for phase in without.memory.phases:
        more = sum(phases[phase.name].values()) - phase.total
        assert more == (0 if phase.name == "load" else phases["reward_model"]["reward_asleep"]), phase.name
    own = phases["reward_model"]
    awake = own["reward_weights"] + own["reward_working"] + own["reward_cache"] + own["reward_asleep"]
    assert awake == pytest.approx(0.5 * plan.memory.card, rel=1e-6)
    assert own["reward_weights"] == pytest.approx(2 * 7.07e9, rel=0.01)  # without the rows of a head
    assert plan.memory.host["reward_weights_asleep"] == 8 * own["reward_weights"]


def test_the_seconds_of_scoring_grow_with_the_model_and_with_replies() -> None:
    def seconds(model: str) -> float:
        config = loader.load(PRESET, [f"reward.models={model}", ASKED])
        found, _ = time.of_plan(config, make_plan(config))
        assert found is not None and "reward_model" in found.seconds
        return found.seconds["reward_model"]

    small, large = seconds("[{name: a, path: Qwen3-0.6B}]"), seconds("[{name: a, path: Qwen2.5-7B}]")
    asked = seconds("[{name: a, path: Qwen2.5-7B, kind: generative}]")
    assert 3.2 < small < large < asked
    without = loader.load(PRESET, ["reward.functions=[{function: number_match}]"])
    found, _ = time.of_plan(without, make_plan(without))
    assert found is not None and "reward_model" not in found.seconds


@pytest.mark.parametrize(
    ("more", "rule", "words"),
    [
        ("gpu_memory_utilization: 0.1", "reward_model_fits_gpu_memory", "gives it 7.9: give 0.22 to 0.9"),
        ("gpu_memory_utilization: 1.0", "reward_model_fits_gpu_memory", "stay taken: give 0.22 to 0.9"),
        ("placement: apart", "reward_model_place", "placement apart needs rollout.mode server"),
        ("tensor_parallel_size: 2", "reward_model_place", "(2) must be at most rollout.tensor_parallel_size (1)"),
        ("engine: {dtype: half}", "reward_model_arguments", "engine.dtype cannot be given: it follows from dtype"),
        ("max_length: 40000", "reward_model_length", "max_length is 40000 and must fit max_position_embeddings"),
        ("max_length: 512, kind: generative", "reward_model_length", "(512) must be below max_length 512"),
    ],
)
def test_what_cannot_score_is_refused(more: str, rule: str, words: str) -> None:
    assert words in broken(plan_of(f"[{{name: a, path: Qwen2.5-7B, {more}}}]"))[rule]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rollout.mode=server", "placement colocate needs rollout.mode colocate"),
        ("environment.name=guess", "environment makes conversations"),
        ("rollout.unfinished=drop", "give rollout.unfinished=wait"),
    ],
)
def test_what_leaves_no_phase_to_score_in_is_refused(setting: str, words: str) -> None:
    more = ["rollout.engines_per_node=4"] if "server" in setting else []
    found = [one.message for one in plan_of("[{name: a, path: Qwen2.5-7B}]", setting, *more).broken]
    assert any(words in message for message in found), found


SERVER = ("rollout.mode=server", "rollout.engines_per_node=2")


def test_a_model_set_apart_has_gpus_behind_each_engine_and_takes_nothing_of_others() -> None:
    model = "{name: a, path: Qwen2.5-7B, placement: apart, gpu_memory_utilization: 0.9}"
    plan = plan_of(f"[{model}]", *SERVER)
    without = make_plan(loader.load(PRESET, ["reward.functions=[{function: number_match}]", *SERVER]))
    assert not plan.broken and plan.memory is not None and without.memory is not None, plan.broken
    assert (plan.layout["gpus_set_apart_per_node"], without.layout["gpus_set_apart_per_node"]) == (4, 2)
    assert plan.quantities["world_size"] == 4 and plan.layout["reward_model_gpus_per_engine"] == 1
    assert engine_gpus(plan.layout) == [(4,), (6,)]
    phases = {phase.name: phase for phase in plan.memory.phases}
    generation = next(phase for phase in without.memory.phases if phase.name == "generation")
    assert phases["generation"] == generation
    scoring = phases["reward_model"].parts
    assert set(scoring) == {
        *("reward_weights", "reward_working", "reward_cache", "reward_process", "buckets", "cuda_and_nccl")
    }
    assert phases["reward_model"].total < plan.memory.card
    assert not any("reward_asleep" in phase.parts for phase in plan.memory.phases)
    assert "reward_weights_asleep" not in plan.memory.host
    told = [" ".join(line.split()) for line in render.lines(rank_page.page(plan.layout))]
    assert {"engines on every node: GPUs 4 | 6", "reward models on every node: GPUs 5 | 7"} <= {*told}
    found = [one.message for one in plan_of(f"[{model.replace('0.9', '1.0')}]", *SERVER).broken]
    assert len(found) == 1 and "stay taken: give 0.22 to 0.9" in found[0], found


def test_the_seconds_of_a_model_set_apart_go_on_beside_training() -> None:
    def times(*more: str) -> time.Times:
        config = loader.load(PRESET, [f"reward.models={model}", ASKED, *more])
        found, _ = time.of_plan(config, make_plan(config))
        assert found is not None
        return found

    model = "[{name: a, path: Qwen2.5-7B, kind: generative, placement: apart}]"
    together, ahead = times(*SERVER), times(*SERVER, "rollout.max_staleness=1")
    scoring = ahead.seconds["reward_model"]
    assert scoring == together.seconds["reward_model"] > 1
    rest = {name: size for name, size in ahead.seconds.items() if name not in ("generation", "reward_model")}
    between = rest["sync"] + rest["other"]
    side = ahead.seconds["generation"] + scoring, sum(rest.values()) - between
    assert ahead.rollout == pytest.approx(max(side) + between)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("rollout.engines_per_node=4",), "(rollout.tensor_parallel_size (1) + 1 of reward.models) = 8 GPUs set apart"),
        (
            ("cluster.generation_nodes=1", "cluster.nodes=2", "rollout.engines_per_node=5"),
            "= 10 GPUs are more than gpus_per_node (8)",
        ),
        (
            ("cluster.generation_nodes=1", "cluster.nodes=2", "rollout.tensor_parallel_size=8"),
            "leaves none of gpus_per_node (8)",
        ),
    ],
)
def test_gpus_that_are_not_there_for_a_model_set_apart_are_told(more: tuple[str, ...], words: str) -> None:
    found = [one.message for one in plan_of("[{name: a, path: Qwen2.5-7B, placement: apart}]", SERVER[0], *more).broken]
    assert any(words in message for message in found), found


def test_names_that_do_not_meet_are_told() -> None:
    def told(models: str, functions: str) -> list[str]:
        plan = make_plan(loader.load(PRESET, [f"reward.models={models}", f"reward.functions={functions}"]))
        return [one.message for one in plan.broken if one.rule == "reward_models_are_asked"]

    two = "[{name: a, path: Qwen2.5-7B}, {name: b, path: Qwen2.5-7B}]"
    assert "must name a model" in told(two, "[{function: reward_model}]")[-1]
    assert told(two, "[{function: reward_model, args: {model: a}}]")[0].startswith("no term of reward.functions asks")
    assert (
        "asks the model c, and reward.models has a, b" in told(two, "[{function: reward_model, args: {model: c}}]")[-1]
    )
    assert "is empty: give a model" in told("[]", "[{function: reward_model}]")[0]
    same = "[{name: a, path: Qwen2.5-7B}, {name: a, path: Qwen2.5-7B}]"
    assert told(same, "[{function: reward_model, args: {model: a}}]") == [
        "two reward.models are called a: give each a name of its own"
    ]
    assert told(two, "[{function: reward_model, args: {model: a}}, {function: reward_model, args: {model: b}}]") == []


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({}, "generative", "is a Qwen2ForSequenceClassification, which kind generative does not take"),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "classification",
            "does not take: give kind generative with a template",
        ),
        ({"architectures": ["Qwen2ForRewardModel"]}, "classification", "is a Qwen2ForRewardModel, which no kind takes"),
        ({"id2label": {"0": "a", "1": "b"}}, "classification", "has 2 labels: it must have one"),
        ({"id2label": None}, "classification", "has 2 labels"),
        ({}, "classification", None),
    ],
)
def test_the_file_says_what_a_model_is(changed: dict[str, Any], kind: str, words: str | None, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SIZES | changed))
    found = broken(plan_of(f"[{{name: a, path: {folder}, kind: {kind}}}]"))
    assert ("reward_model_kind" in found) == (words is not None) and (words or "") in found.get("reward_model_kind", "")


def test_heads_must_be_divided(folder: Path) -> None:
    more = ["rollout.tensor_parallel_size=4"]
    assert not plan_of(f"[{{name: a, path: {folder}, tensor_parallel_size: 4}}]", *more).broken
    (folder / "config.json").write_text(json.dumps(SIZES | {"num_attention_heads": 6}))
    found = broken(plan_of(f"[{{name: a, path: {folder}, tensor_parallel_size: 4}}]", *more))
    assert found["reward_model_division"].startswith("reward.models a: num_attention_heads (6) of this model must be")
