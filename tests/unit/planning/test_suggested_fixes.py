"""Fixes of plans that lack memory are what `suggest` finds, on clusters and models drawn at random (25 s).

They would catch a list without suggest's first layout, without one of its remedies where no layout fits, with a fix
that breaks a rule, or with the same change told twice.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning import layouts
from gspo_hpc.planning.fixes import repair, search
from gspo_hpc.planning.fixes.change import Change, Fix, without_repeated
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import value_of, with_value
from gspo_hpc.planning.suggest import remedies

BATCH = {"num_generations": 8, "global_batch_size": 128, "steps_per_generation": 4, "micro_batch_tokens": 16384}
LENGTHS = {"max_prompt_length": 1024, "max_response_length": 8192}
MODELS = ["Qwen3-4B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.1-8B"]
MEMORY = ["trainer_fits_gpu_memory", "engine_fits_gpu_memory", "kv_cache_holds_longest_sequence"]


def made(model: str, cluster: dict[str, Any], **sections: dict[str, Any]) -> Config:
    rollout = LENGTHS | sections.pop("rollout", {})
    batch = BATCH | sections.pop("batch", {})
    return from_dict({"model": {"path": model}, "cluster": cluster, "batch": batch, "rollout": rollout, **sections})


def drawn(seed: int) -> Config:
    draw = random.Random(seed)
    cluster = {"nodes": draw.choice([1, 1, 2, 3]), "gpus_per_node": draw.choice([1, 2, 4, 8])}
    card = draw.choice(["A100-40GB", "A100-80GB", "H100", "H200", "L40S", 40, 64, 80, 96])
    cluster |= {"gpu": card} if isinstance(card, str) else {"gpu_memory_gb": card}
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True} if cluster["gpus_per_node"] % 2 == 0 else {}
    return made(draw.choice(MODELS), cluster, parallel=draw.choice([{}, parallel]))


def changes(fix: Fix) -> dict[str, Any]:
    return {change.key: change.value for change in fix.changes}


def changed(config: Config, settings: dict[str, Any]) -> Config:
    for key, value in settings.items():
        config = with_value(config, key, value)
    return config


def direction(fix: Fix) -> frozenset[tuple[str, Any]]:
    numbers = {type(part) for change in fix.changes for part in (change.before, change.value)} <= {int, float}
    return frozenset((one.key, one.value > one.before if numbers else one.value) for one in fix.changes)


def test_fixes_of_memory_have_what_suggest_finds() -> None:
    seen = {"layout": 0, "remedies": 0}
    for seed in range(24):
        config = drawn(seed)
        broken = {str(item.rule) for item in make_plan(config).broken}
        if not broken.intersection(MEMORY):
            continue
        fixes = repair.offered(config)
        offered = [changes(fix) for fix in fixes]
        for one in offered:
            assert make_plan(changed(config, one)).valid, (seed, one)
        several = [direction(fix) for fix in fixes if len(fix.changes) > 1]
        assert len(several) == len({*several}), (seed, several)
        best = layouts.find(config, limit=1)
        if best:
            first = {key: value for key, value in best[0].settings.items() if value != value_of(config, key)}
            assert first in offered, (seed, first)
            assert not any("model.path" in one for one in offered), (seed, "a layout fits")
            seen["layout"] += 1
            continue
        for remedy in remedies.find(config):
            assert any(remedy.changes.items() <= one.items() for one in offered), (seed, remedy.changes)
            assert layouts.Search(changed(config, remedy.changes)).ranked(1)
            assert make_plan(changed(config, remedy.changes | remedy.layout)).valid
            seen["remedies"] += 1
        of_models = ["model.path" in one for one in offered]
        assert of_models == sorted(of_models), (seed, "another model comes last")
        assert all("another layout" not in item.message for item in make_plan(config).broken)
    assert min(seen.values()) > 3, seen


def test_no_layout_of_one_node_holds_experts_and_suggest_names_machines_and_a_model() -> None:
    """A card of 288 GB and the smallest model of all were offered."""
    fixes = [changes(fix) for fix in repair.offered(made("Qwen3-30B-A3B", {"gpus_per_node": 8, "gpu_memory_gb": 64}))]
    kinds = ("cluster.", "model.", "adapter.")
    named = [{key: value for key, value in fix.items() if key.startswith(kinds)} for fix in fixes]
    machines, others = [{"cluster.nodes": 2}, {"cluster.gpu_memory_gb": 80}], [{"adapter.type": "lora"}]
    assert named == [*machines, *others, {"model.path": "Qwen3-14B"}]


def test_a_model_that_fits_as_it_is_comes_after_machines_that_need_another_layout() -> None:
    """Qwen3-4B was the first fix, since nothing else is enough alone but another card."""
    memory = {"recompute_granularity": "full", "offload_optimizer": True}
    rollout = {"max_response_length": 4096}
    config = made("Qwen3-8B", {"gpus_per_node": 1, "gpu": "H100"}, memory=memory, rollout=rollout)
    fixes = [changes(fix) for fix in repair.offered(config)]
    assert {"model.path": "Qwen3-4B"} in fixes and len(fixes) > 3
    assert ["model.path" in fix for fix in fixes] == sorted("model.path" in fix for fix in fixes)


def test_the_memory_of_a_card_counts_before_its_name() -> None:
    config = made("Qwen3-30B-A3B", {"gpus_per_node": 8, "gpu_memory_gb": 64, "gpu": "H100"})
    assert {"cluster.gpu_memory_gb": 80} in [one.changes for one in remedies.find(config)]


def test_shorter_responses_are_looked_for_only_where_the_shortest_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, Any]] = []
    best = remedies._best

    def noted(config: Config, asked: remedies.Asked, settings: dict[str, Any]) -> layouts.Candidate | None:
        tried.append(settings)
        return best(config, asked, settings)

    monkeypatch.setattr(remedies, "_best", noted)
    short = made("Qwen3-30B-A3B", {"gpus_per_node": 8, "gpu_memory_gb": 64})
    assert remedies._shorter(short, remedies.Asked()) == [] and len(tried) == 1
    long = made("Qwen3-4B", {"gpus_per_node": 1, "gpu": "H100"}, rollout={"max_response_length": 500_000})
    long = with_value(long, "batch.micro_batch_tokens", 501_024)
    (found,) = remedies._shorter(long, remedies.Asked())[:1]
    assert remedies._best(long, remedies.Asked(), found.changes) is not None
    twice = changed(long, {key: 2 * value for key, value in found.changes.items()})
    assert not layouts.Search(twice).ranked(1), "longer ones fit, too"


def test_what_suggest_finds_is_told_even_where_each_of_its_changes_is_in_another_fix() -> None:
    """Recomputation and offloading were each in a pair with less for engines, and the layout has all three."""
    rollout = {"engine": {"gpu_memory_utilization": 0.97}}
    batch = {"micro_batch_tokens": 9216, "steps_per_generation": 1}
    config = made("Qwen2.5-1.5B", {"gpus_per_node": 1, "gpu": "RTX5090-32GB"}, rollout=rollout, batch=batch)
    (best,) = layouts.find(config, limit=1)
    first = {key: value for key, value in best.settings.items() if value != value_of(config, key)}
    offered = [changes(fix) for fix in repair.offered(config)]
    assert first in offered and any(one.items() < first.items() for one in offered)


def test_a_remedy_that_leaves_more_stands_beside_one_that_may_run_out_of_memory() -> None:
    few, more = (
        Fix((Change("cluster.gpu_memory_gb", 32, memory), Change("parallel.tensor_model_parallel_size", 1, 4)))
        for memory in (180, 186)
    )
    assert without_repeated([few, more]) == [few]
    assert without_repeated([few, more, more], kept=[few, more]) == [few, more]


@pytest.mark.parametrize("nodes", [1, 2])
def test_engines_set_apart_are_told_once_and_after_what_guesses_nothing(nodes: int) -> None:
    """With 1, 2, 3, 4 and 5 engines a node they were the first five fixes."""
    cluster = {"nodes": nodes, "gpus_per_node": 8, "generation_nodes": nodes}
    fixes = [str(fix) for fix in repair.offered(made("Qwen3-8B", cluster, rollout={"mode": "server"}))]
    engines = [fix for fix in fixes if "engines_per_node" in fix]
    assert len(engines) == (nodes == 1)
    first = "cluster.generation_nodes=0 rollout.mode=colocate" if nodes == 1 else "cluster.generation_nodes=1"
    assert fixes[0] == first and f"cluster.nodes={nodes + 1}" in fixes


@pytest.mark.parametrize("lengths", [(4096, 8192), (4096, 4096), (8192, 16384), (3000, 3000)])
def test_each_of_two_lengths_may_be_the_one_that_stays_near(lengths: tuple[int, int]) -> None:
    """Only fixes that shorten responses most were offered where prompts are too long beside them."""
    prompt, response = lengths
    rollout = {"max_prompt_length": prompt, "max_response_length": response}
    config = made("Qwen2.5-Math-7B", {"gpus_per_node": 8}, rollout=rollout, batch={"micro_batch_tokens": 32768})
    found = [changes(fix) for fix in search.find(config) if len(fix.changes) == 2]
    pairs = [(one["rollout.max_prompt_length"], one["rollout.max_response_length"]) for one in found]
    assert all(sum(pair) == 4096 for pair in pairs)
    assert any(a > b for a, b in pairs) and any(a < b for a, b in pairs), pairs
