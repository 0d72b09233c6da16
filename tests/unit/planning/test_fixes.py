"""Fixes: the worked cases, and against brute force that what is offered fixes and that nothing near is missed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config, in_range, keys, plain_type, replace
from gspo_hpc.planning.builder import Broken
from gspo_hpc.planning.fixes import by_type, distances, search
from gspo_hpc.planning.fixes.change import Change, Fix, is_nearly_alone
from gspo_hpc.planning.plan import holds, make_plan
from gspo_hpc.planning.plan import judge as judge_plan
from gspo_hpc.planning.rules.data import DataRule
from gspo_hpc.planning.settings import divisors


def config(nodes: int, gpus: int = 1, tp: int = 1, **batch: int) -> Config:
    cluster = {"nodes": nodes, "gpus_per_node": gpus}
    return from_dict({"cluster": cluster, "parallel": {"tensor_model_parallel_size": tp}, "batch": batch})


def sizes(mbs: int, gbs: int, spg: int, group: int) -> dict[str, int]:
    return {
        "micro_batch_size": mbs,
        "global_batch_size": gbs,
        "steps_per_generation": spg,
        "num_generations": group,
    }


@pytest.mark.parametrize(
    ("refused", "nearest", "never"),
    [
        (config(16, tp=2, **sizes(1, 16, 2, 4)), ["batch.global_batch_size=32"], "steps_per_generation"),
        (
            config(8, **sizes(2, 32, 2, 4)),
            ["batch.micro_batch_size=1", "batch.global_batch_size=64", "batch.num_generations=2"],
            "steps_per_generation",
        ),
        (config(8, **sizes(1, 16, 1, 4)), ["batch.global_batch_size=32"], "batch.steps_per_generation=2 "),
        (
            config(8, global_batch_size=32, steps_per_generation=8, num_generations=7, micro_batch_tokens=9216),
            ["batch.global_batch_size=35"],
            "steps_per_generation",
        ),
    ],
)
def test_the_worked_cases(refused: Config, nearest: list[str], never: str) -> None:
    offered = [str(fix) for fix in search.find(refused)]
    assert offered[: len(nearest)] == nearest
    assert not any(f"{text} ".startswith(f"batch.{never}") or text == never.strip() for text in offered)


@pytest.mark.parametrize(
    ("gpus", "groups", "together"),
    [(4, [3], "batch.num_generations=6 batch.global_batch_size=6"), (64, [7, 9], "")],
)
def test_gpus_that_are_set_apart(gpus: int, groups: list[int], together: str) -> None:
    refused = from_dict(
        {
            "cluster": {"gpus_per_node": gpus},
            "rollout": {"mode": "server", "engines_per_node": 1},
            "batch": sizes(1, gpus - 1, 1, 8),
        }
    )
    assert "evenly divisible by the number of generations per prompt (8)" in make_plan(refused).broken[-1].message
    offered = search.find(refused, limit=100)
    alone = [fix.changes[0].value for fix in offered if str(fix).startswith("batch.num_gen") and len(fix.changes) < 2]
    assert alone[: len(groups)] == sorted(groups, key=lambda n: abs(n / 8 - 1) if n > 8 else 8 / n - 1)
    pairs = {" ".join(sorted(str(fix).split(), reverse=True)) for fix in offered}
    assert not together or together in pairs


def test_a_valid_plan_needs_none() -> None:
    assert search.find(config(8, tp=2, **sizes(1, 16, 2, 4))) == []


def test_both_of_two_that_exclude_each_other_can_go() -> None:
    both = from_dict({"batch": sizes(1, 16, 2, 4) | {"micro_batch_tokens": 8192}})
    offered = [str(fix) for fix in search.find(both)]
    assert {"batch.micro_batch_tokens=null", "batch.micro_batch_size=null"} <= set(offered)
    disagree = from_dict({"batch": sizes(1, 16, 2, 4) | {"generation_batch_size": 16}})
    offered = [str(fix) for fix in search.find(disagree)]
    assert "batch.generation_batch_size=32" in offered and "batch.steps_per_generation=1" in offered


def test_a_rollout_smaller_than_its_updates() -> None:
    batch = {"global_batch_size": 1, "num_generations": 1, "steps_per_generation": 1, "generation_batch_size": 2}
    offered = search.find(from_dict({"batch": batch | {"micro_batch_tokens": 2048}}), limit=1000)
    assert offered and all(change.value is None or change.value > 0 for fix in offered for change in fix.changes)


def test_a_fix_can_be_pasted() -> None:
    (fix, *_) = search.find(config(16, tp=2, **sizes(1, 16, 2, 4)))
    assert fix.changes[0].before == 16 and fix.warnings == 0
    overlapped = from_dict({"parallel": {"overlap_param_gather": True, "overlap_grad_reduce": True}})
    texts = [str(fix) for fix in search.find(overlapped)]
    assert texts[:2] == ["optimizer.distributed=true", "parallel.overlap_param_gather=false"]


def test_sequences_are_cut_to_what_the_model_has_places_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    lengths = {"max_prompt_length": 512, "max_response_length": 1000}
    offered = search.find(from_dict({"model": {"path": str(tmp_path)}, "rollout": lengths}))
    assert [str(fix) for fix in offered][:2] == ["rollout.max_response_length=512", "rollout.max_prompt_length=24"]


@st.composite
def refusable(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Draw the content of a config file: short to read when a test fails."""
    few = st.sampled_from([1, 1, 1, 2, 2, 3, 4])
    batch: dict[str, Any] = {
        "global_batch_size": draw(st.integers(1, 64)),
        "num_generations": draw(st.integers(1, 9)),
        "steps_per_generation": draw(st.none() | st.integers(1, 4)),
        "generation_batch_size": draw(st.none() | st.none() | st.integers(1, 128)),
    }
    if draw(st.booleans()):
        batch["micro_batch_size"] = draw(st.integers(1, 4))
    else:
        batch["micro_batch_tokens"] = draw(st.sampled_from([1024, 4096, 8192]))
    rollout: dict[str, Any] = {
        "tensor_parallel_size": draw(st.sampled_from([1, 1, 2])),
        "engines_per_node": draw(st.none() | st.integers(1, 4)),
        "max_prompt_length": 512,
        "max_response_length": draw(st.sampled_from([512, 1500, 1536])),
    }
    if draw(st.booleans()):
        rollout["mode"] = draw(st.sampled_from(["colocate", "server"]))
    parallel = {
        f"{name}_parallel_size": draw(few) for name in ("tensor_model", "pipeline_model", "context", "expert_model")
    }
    cluster = {"nodes": draw(st.integers(1, 6)), "gpus_per_node": draw(st.sampled_from([1, 2, 4, 8]))}
    return {"cluster": cluster, "parallel": parallel, "batch": batch, "rollout": rollout}


BRUTE = {
    "batch.global_batch_size": range(1, 400),
    "batch.steps_per_generation": range(1, 100),
    "batch.num_generations": range(2, 100),
    "batch.micro_batch_size": range(1, 65),
    "batch.generation_batch_size": range(1, 400),
    "parallel.tensor_model_parallel_size": range(1, 49),
    "parallel.pipeline_model_parallel_size": range(1, 49),
    "parallel.context_parallel_size": range(1, 49),
    "parallel.expert_model_parallel_size": range(1, 49),
    "rollout.tensor_parallel_size": range(1, 9),
    "rollout.engines_per_node": range(1, 9),
    "cluster.nodes": range(1, 65),
    "cluster.gpus_per_node": range(1, 65),
}


def changed(base: Config, key: str, value: int) -> Config:
    section, name = key.split(".")
    return replace(base, **{section: replace(getattr(base, section), **{name: value})})


def is_a_fix(base: Config, after: Config) -> bool:
    """Return whether every rule holds, and this version runs all that it runs of the config before."""
    plan = judge_plan(after, memory=True, enough=0)
    if plan.broken:
        return False
    return {item.feature for item in plan.not_run} <= {item.feature for item in judge_plan(base).not_run}


def judge(base: Config, offered: list[Fix], keys: list[str]) -> None:
    """Every fix fixes; wherever one of `keys` alone can, by brute force, it is offered; a batch size is the nearest."""
    for fix in offered:
        after = base
        for change in fix.changes:
            section, name = change.key.split(".")
            assert getattr(getattr(after, section), name) == change.before != change.value
            after = changed(after, change.key, change.value)
        assert make_plan(after).valid, str(fix)
        assert set(after.missing()) <= set(base.missing()), str(fix)
    singles: dict[str, list[int]] = {}
    for change in (fix.changes[0] for fix in offered if len(fix.changes) == 1):
        value, (section, name) = change.value, change.key.split(".")
        if value is None and section == "batch":  # the size that follows from the others then
            value = make_plan(changed(base, change.key, None)).quantities[name]
        singles.setdefault(change.key, []).extend([] if value is None else [value])
    for key in keys:
        section, name = key.split(".")
        now = getattr(getattr(base, section), name)
        if now is None or (key in singles and section != "batch"):
            continue  # not given: a default that stands for something else
        found = [value for value in BRUTE[key] if is_a_fix(base, changed(base, key, value))]
        if key not in singles:
            assert not found, (key, found[:5], [str(fix) for fix in offered[:5]])
        elif found:
            least = min(abs(math.log(value / now)) for value in found)
            assert min(abs(math.log(value / now)) for value in singles[key]) <= least + 1e-9, (key, now, found[:9])


@given(refusable())
@settings(max_examples=300, deadline=None)
def test_a_plan_holds_if_no_rule_is_broken(given: dict[str, dict[str, Any]]) -> None:
    """The quick question that brute force asks below, against the whole plan."""
    base = from_dict(given)
    assert holds(base) == make_plan(base).valid


# 28 GPUs hold 4 engines of 2 and make 14 DP groups, which 14 prompts can be dealt to.
ONLY_28 = {
    "cluster": {"nodes": 1, "gpus_per_node": 1},
    "parallel": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 1,
    },
    "batch": {
        "global_batch_size": 28,
        "num_generations": 4,
        "steps_per_generation": 2,
        "generation_batch_size": None,
        "micro_batch_tokens": 1024,
    },
    "rollout": {
        "tensor_parallel_size": 2,
        "engines_per_node": 4,
        "max_prompt_length": 512,
        "max_response_length": 512,
    },
}


ONLY_OVER_NODES = {  # with one GPU on a node, an engine of two reaches over both
    "cluster": {"nodes": 2, "gpus_per_node": 2},
    "parallel": {"context_parallel_size": 2},
    "batch": {"global_batch_size": 2, "num_generations": 2, "micro_batch_tokens": 1024},
    "rollout": {"tensor_parallel_size": 2, "max_prompt_length": 512, "max_response_length": 512},
}


ONLY_SIX = {  # of eight GPUs one or two have to train: one prompt is dealt to no more
    "cluster": {"nodes": 1, "gpus_per_node": 8},
    "batch": {"global_batch_size": 2, "num_generations": 2, "micro_batch_tokens": 1024},
    "rollout": {"mode": "server", "engines_per_node": 1, "max_prompt_length": 512, "max_response_length": 512},
}


@example(ONLY_SIX, "rollout.tensor_parallel_size")
@example(ONLY_28, "cluster.gpus_per_node")
@example(ONLY_OVER_NODES, "cluster.gpus_per_node")
@given(refusable(), st.sampled_from(sorted(BRUTE)))
@settings(max_examples=200, deadline=None)  # others in every run
def test_every_fix_fixes_and_brute_force_finds_no_other_kind(given: dict[str, dict[str, Any]], key: str) -> None:
    """Many configurations, one setting by brute force in each, and some pairs."""
    base = from_dict(given)
    if not make_plan(base).valid:
        judge(base, search.find(base, limit=1000, room=40), [key])


@given(refusable())
@settings(max_examples=12, deadline=None)  # others in every run
def test_all_that_is_offered_and_all_settings(given: dict[str, dict[str, Any]]) -> None:
    base = from_dict(given)
    if not make_plan(base).valid:
        judge(base, search.find(base, limit=1000), sorted(BRUTE))


LARGE = {"nodes": 2048, "gpus_per_node": 8}


@pytest.mark.parametrize("cluster", [{"nodes": 1, "gpus_per_node": 8}, LARGE, {"nodes": 99_991, "gpus_per_node": 256}])
@pytest.mark.parametrize(
    "batch", [sizes(1, 12, 2, 5), sizes(3, 20, 1, 7), sizes(1, 735134400, 735134400, 19), sizes(1, 999999937, 2, 3)]
)
def test_more_gpus_and_larger_numbers_take_no_more_plans(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, int], batch: dict[str, int]
) -> None:
    """The rules are asked a bounded number of times, which is what takes time, whatever the numbers."""
    made = 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal made
        made += 1
        return judge_plan(*arguments, **more)

    monkeypatch.setattr(search, "judge", counted)
    config = from_dict({"cluster": cluster, "batch": batch})
    assert search.find(config) and 0 < made < 3500, made


@given(st.integers(1, 10**6))
def test_divisors(number: int) -> None:
    found = divisors(number)
    assert list(found) == sorted({n for n in found if number % n == 0})
    assert {n for n in range(1, 200) if number % n == 0} <= set(found)
    assert {number // n for n in found} == set(found)


KEPT = ("run.seed", "optimizer.min_lr")  # never changed; not above the rate of the same config


@pytest.mark.parametrize("key", sorted(keys()))
def test_a_new_rule_about_any_setting_gets_values_that_the_setting_takes(key: str) -> None:
    """The numbers of the message are among the values: catches a type that the search for fixes cannot deal with."""
    number = "0.25" if plain_type(keys()[key].annotation) is float and in_range(keys()[key], 0.25) else "2"
    found = by_type.candidates(Config(), [Broken(DataRule.DATA_FILLS_ROLLOUT, f"{key} must be {number} or less")])
    section, name = key.split(".")
    for value in found.get(key, ()):
        assert getattr(getattr(from_dict({section: {name: value}}), section), name) == value
    if plain_type(keys()[key].annotation) in (int, float) and section != "algorithm" and key not in KEPT:
        assert float(number) in found[key]


def test_the_longest_response_that_fits_is_offered_to_one_in_thirty(tmp_path: Path) -> None:
    """The distance to it is halved until then: a value that fits may be far below."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 30_000}))
    lengths, key = {"max_prompt_length": 512, "max_response_length": 100_000}, "rollout.max_response_length"
    refused = from_dict({"model": {"path": str(tmp_path)}, "rollout": lengths})
    known = Fix((Change(key, 100_000, 1000),))
    (found,) = search.Search(refused, None, make_plan(refused))._grown(key, [known])
    value = found.changes[0].value
    assert 29_488 * (1 - 1 / 30) < value <= 29_488 and make_plan(changed(refused, key, value)).valid


def test_a_change_that_brings_a_warning_is_two_farther() -> None:
    change = Change("batch.global_batch_size", 16, 32)
    assert Fix((change,)).distance == 1.0 and Fix((change,), warnings=2).distance == 5.0


@pytest.mark.parametrize(
    ("value", "alike"), [(8190, True), (8196, True), (8040, True), (7900, True), (8400, True), (9600, False)]
)
def test_a_pair_whose_first_is_nearly_a_fix_alone_is_left_out(value: int, alike: bool) -> None:
    """Within a fiftieth of a value that is enough by itself, and where that alone is no farther than both."""
    key, other = "rollout.max_response_length", Change("batch.micro_batch_tokens", 4096, 4100)
    singles = [Fix((Change(key, 16384, 8192),))]
    pair = Fix((Change(key, 16384, value), other))
    assert is_nearly_alone(pair, singles) == alike
    assert not is_nearly_alone(Fix((other,)), singles)


@pytest.mark.parametrize("refused", [config(1, gpus=8, **sizes(3, 40, 3, 6)), config(2, 8, 4, **sizes(2, 12, 3, 5))])
def test_two_changes_are_at_most_twice_as_far_as_the_nearest_one(refused: Config) -> None:
    offered = search.find(refused, limit=100)
    nearest = min(fix.distance for fix in offered if len(fix.changes) == 1)
    pairs = [fix.distance for fix in offered if len(fix.changes) == 2]
    assert pairs and max(pairs) <= 2 * nearest


def test_another_model_is_farther_than_a_doubling_of_anything() -> None:
    """It is another experiment: nodes, which are hard to have, come first."""
    model = distances.between("model.path", "models/Qwen3-8B", "models/Qwen3-4B")
    assert all(distances.between(key, 8, 16) < model for key in distances._WEIGHTS if key != "model.path")
    assert model < distances.between("model.path", "models/Qwen3-8B", "models/Qwen3-1.7B")
    assert model < distances.between("model.path", "models/Qwen3-8B", "models/Qwen2.5-3B")
    assert distances.between("cluster.gpu", "H10", "H100-80GB") < distances.between("cluster.gpu", "H10", "L40S-48GB")


READILY = [  # what people change, the most readily first: a step counts a doubling
    "optimizer.distributed",
    "memory.recompute_granularity",
    "memory.offload_optimizer",
    "batch.micro_batch_size",
    "batch.global_batch_size",
    "batch.steps_per_generation",
    "batch.num_generations",
    "rollout.tensor_parallel_size",
    "rollout.max_response_length",
    "rollout.max_prompt_length",
    "parallel.expert_model_parallel_size",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "cluster.nodes",
    "cluster.gpus_per_node",
    "cluster.gpu",
    "model.path",
]


def test_settings_are_changed_in_the_order_in_which_people_would() -> None:
    weights = [distances.weight(key) for key in READILY]
    assert weights == sorted(weights) and len({*weights[3:]}) == len(weights[3:])
    assert distances.weight("batch.steps_per_generation") > distances.weight("batch.generation_batch_size")


@pytest.mark.parametrize(
    ("model", "kin", "other"),
    [
        ("Llama-3.1-8B", "Llama-3.2-3B", "Qwen3-8B"),
        ("Qwen2.5-14B", "Qwen2.5-7B", "Qwen3-14B"),
        ("Qwen2.5-72B", "Qwen2.5-32B", "Llama-3.1-70B"),
        ("Qwen3-14B", "Qwen3-8B", "Qwen2.5-14B"),
    ],
)
def test_another_size_of_a_model_is_nearer_than_another_model_of_its_size(model: str, kin: str, other: str) -> None:
    assert distances.between("model.path", model, kin) < distances.between("model.path", model, other)


def test_one_more_setting_is_not_worth_a_hundredth_of_another() -> None:
    """A length was changed by 4 tokens of 1,024, so that another could be 7,172 instead of 7,168."""
    prompt, response, longer = (
        Change(f"rollout.max_{part}_length", before, value)
        for part, before, value in (("prompt", 1024, 1020), ("response", 8192, 7172), ("response", 8192, 7168))
    )
    assert Fix((longer,)).distance < Fix((prompt, response)).distance
