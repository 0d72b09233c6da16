"""Uneven pipeline stages, copied key-value heads, engines over nodes: what the plan says of them, and its fixes (5 s).

tests/torch/policy/test_divisions.py holds the conditions themselves against Megatron-Core.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.config import loader
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config, Memory, Parallel, as_dict, replace
from gspo_hpc.launch import checks
from gspo_hpc.models import architecture
from gspo_hpc.planning import divisions, layouts
from gspo_hpc.planning.estimates import activations, devices, engines, time
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan

FIRST, LAST = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


def made(model: str = "Qwen3-235B-A22B", nodes: int = 32, **sections: dict[str, Any]) -> Config:
    cluster = {"nodes": nodes, "gpus_per_node": 8, "gpu": "H100-80GB"}
    return from_dict({"cluster": cluster, "model": {"path": model}, **sections})


def pipeline(stages: int, **more: Any) -> Parallel:
    return Parallel(pipeline_model_parallel_size=stages, **more)


@given(st.integers(1, 100), st.integers(1, 16))
def test_even_ends_are_the_evenest_that_there_are(layers: int, stages: int) -> None:
    ends = divisions.even_ends(layers, stages)
    if layers < stages:
        assert ends is None
        return
    assert ends is not None
    found = divisions.layers_per_stage(layers, pipeline(stages, **dict(zip((FIRST, LAST), ends, strict=True))))
    assert found is not None and sum(found) == layers and found[-1] <= found[0]
    assert ends != (None, None) or layers % stages == 0
    if layers % stages == 0:
        assert len(set(found)) == 1
        return
    shares = range(1, layers)
    others = [
        max(share, -(-(layers - share * (stages - 2)) // 2)) for share in shares if layers - share * (stages - 2) > 1
    ]
    assert max(found) <= min(others)


@given(
    st.integers(1, 100),
    st.integers(1, 8),
    st.none() | st.integers(1, 3),
    st.none() | st.integers(1, 30),
    st.none() | st.integers(1, 30),
)
def test_the_layers_of_all_stages_are_those_of_the_model(
    layers: int, stages: int, chunks: int | None, first: int | None, last: int | None
) -> None:
    parallel = pipeline(stages, virtual_pipeline_model_parallel_size=chunks, **{FIRST: first, LAST: last})
    counts = divisions.layers_per_stage(layers, parallel)
    if counts is None:
        with pytest.raises(ValueError, match=f"{layers} layers cannot be divided"):
            divisions.layers_of_stage(layers, parallel, 0)
        return
    stages_of = [divisions.layers_of_stage(layers, parallel, stage) for stage in range(stages)]
    assert [len(own) for own in stages_of] == counts
    assert sorted(layer for own in stages_of for layer in own) == list(range(layers))
    assert counts[0] == (first or counts[0]) and counts[-1] == (last or counts[-1])


def test_two_stages_of_given_layers_have_no_virtual_pipeline() -> None:
    """Megatron-Core would divide by the number of stages between them."""
    both = {FIRST: 4, LAST: 4}
    assert divisions.layers_per_stage(8, pipeline(2, **both)) == [4, 4]
    assert divisions.layers_per_stage(8, pipeline(2, virtual_pipeline_model_parallel_size=2, **both)) is None
    one = {LAST: 4, "virtual_pipeline_model_parallel_size": 2}
    assert divisions.layers_per_stage(8, pipeline(2, **one)) == [4, 4]
    assert divisions.layers_per_stage(12, pipeline(3, virtual_pipeline_model_parallel_size=2, **both)) == [4, 4, 4]


@pytest.mark.parametrize(("head_dim", "divided"), [(16, False), (14, True)])
def test_ranks_hold_whole_rows_of_queries_keys_and_values(head_dim: int, divided: bool) -> None:
    """7 heads and 1 key-value head on 7 ranks: 9 heads of rows, which 7 ranks share only where 7 divides a head."""
    found = architecture.find(from_dict({"model": {"path": "Qwen3-0.6B"}}))
    assert found is not None
    arch = dataclasses.replace(found, num_attention_heads=7, num_key_value_heads=1, head_dim=head_dim)
    assert divisions.trainer_divides_heads(arch, 7) is divided


@pytest.mark.parametrize(
    ("stages", "alone", "together"),
    [(4, 22, {FIRST: 23, LAST: 23}), (8, 10, {FIRST: 11, LAST: 11}), (16, 4, {FIRST: 5, LAST: 5})],
)
def test_a_fix_gives_the_ends_of_a_pipeline_other_layers(stages: int, alone: int, together: dict[str, int]) -> None:
    """94 layers, as people cut them."""
    ep = {"expert_model_parallel_size": 8}
    refused = made(parallel={"pipeline_model_parallel_size": stages} | ep, memory={"recompute_granularity": "full"})
    (broken,) = [item for item in make_plan(refused).broken if "memory" not in item.rule]
    assert broken.rule == "pipeline_parallel_layers" and "num_hidden_layers (94) of the model" in broken.message
    plain = replace(refused, cluster=replace(refused.cluster, gpu=None))  # without memory, whatever else it needs
    offered = [str(fix) for fix in search.find(plain, limit=20)]
    assert f"parallel.{LAST}={alone}" in offered
    pair = " ".join(f"parallel.{name}={count}" for name, count in together.items())
    assert pair in offered or " ".join(reversed(pair.split())) in offered
    for ends in ({LAST: alone}, together):
        assert make_plan(replace(plain, parallel=replace(plain.parallel, **ends))).valid


@pytest.mark.parametrize(
    ("given_sizes", "rule", "words"),
    [
        ({FIRST: 20}, "uneven_pipeline_layers", f"{FIRST} (20) of 4 stages"),
        (
            {FIRST: 30, LAST: 11},
            "uneven_pipeline_layers",
            "leave 7 of num_hidden_layers (48) of the model for 2 others",
        ),
        ({FIRST: 47, LAST: 47}, "uneven_pipeline_layers", "leave -46 of"),
        (
            {FIRST: 9, LAST: 9, "virtual_pipeline_model_parallel_size": 3},
            None,
            "",
        ),
        (
            {FIRST: 12, LAST: 12, "virtual_pipeline_model_parallel_size": 5},
            "uneven_pipeline_chunks",
            f"{FIRST} (12) must be divisible by virtual_pipeline_model_parallel_size (5)",
        ),
        (
            {FIRST: 4, LAST: 4, "virtual_pipeline_model_parallel_size": 2},
            None,
            "",
        ),
        (
            {FIRST: 10, LAST: 12, "virtual_pipeline_model_parallel_size": 2},
            "uneven_pipeline_chunks",
            "the 13 layers of every other stage must be divisible by virtual_pipeline_model_parallel_size (2)",
        ),
    ],
)
def test_uneven_stages_that_cannot_be(given_sizes: dict[str, int], rule: str | None, words: str) -> None:
    """48 layers on four stages."""
    plan = make_plan(made("Qwen3-30B-A3B", 4, parallel={"pipeline_model_parallel_size": 4} | given_sizes))
    found = [item for item in plan.broken if item.rule.startswith("uneven")]
    assert {item.rule for item in found} == ({rule} if rule else set())
    assert rule is None or words in found[0].message


def test_a_virtual_pipeline_of_two_stages_has_one_end_set() -> None:
    parallel = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, FIRST: 20}
    assert not [item for item in make_plan(made("Qwen3-30B-A3B", 4, parallel=parallel)).broken if "uneven" in item.rule]
    both = made("Qwen3-30B-A3B", 4, parallel=parallel | {LAST: 28})
    (broken,) = [item for item in make_plan(both).broken if "uneven" in item.rule]
    assert broken.rule == "uneven_pipeline_two_stages" and broken.message.endswith("give one")


def test_groups_of_layers_that_are_computed_again_are_whole() -> None:
    """Megatron-Core asks for a layer that is not there where the last group is not whole."""
    memory = {"recompute_granularity": "full", "recompute_num_layers": 5}
    parallel = {"pipeline_model_parallel_size": 4}
    (broken,) = [
        i for i in make_plan(made("Qwen3-30B-A3B", 4, parallel=parallel, memory=memory)).broken if "rec" in i.rule
    ]
    assert broken.rule == "recompute_groups_whole" and "(5) must divide the 12 layers" in broken.message
    uneven = parallel | {FIRST: 3}  # 3 layers, and 15 in each of the others
    for count, whole in ((3, True), (15, False)):
        plan = make_plan(made("Qwen3-30B-A3B", 4, parallel=uneven, memory=memory | {"recompute_num_layers": count}))
        messages = [item.message for item in plan.broken if item.rule == "recompute_groups_whole"]
        assert messages == [] if whole else "(15) must divide the 3 layers" in messages[0]
    for other in ({"recompute_num_layers": 4}, {"recompute_method": "block"}, {"recompute_granularity": "selective"}):
        plan = make_plan(made("Qwen3-30B-A3B", 4, parallel=parallel, memory=memory | other))
        assert not [item for item in plan.broken if "recompute" in item.rule]
    uneven = pipeline(4, **{FIRST: 6, LAST: 6})
    assert divisions.groups(48, uneven, Memory(recompute_num_layers=5)) == 3
    assert divisions.groups(48, uneven, Memory(recompute_num_layers=5, recompute_method="block")) == 5
    assert (
        divisions.groups(48, pipeline(2, virtual_pipeline_model_parallel_size=3), Memory(recompute_num_layers=9)) == 8
    )


def test_the_fullest_stage_sets_the_pace() -> None:
    arch = architecture.find(made("Qwen3-30B-A3B"))
    assert arch is not None
    device = devices.find("H100-80GB")
    batch = {"global_batch_size": 8192, "num_generations": 8, "micro_batch_tokens": 8192}
    updates = {}
    for ends in ({}, {FIRST: 24, LAST: 8}):
        config = made("Qwen3-30B-A3B", 4, parallel={"pipeline_model_parallel_size": 4} | ends, batch=batch)
        times = time.estimate(time.sizes(arch, config), config, device, time.work(config, 8192), 10**6)
        updates[bool(ends)] = times.seconds["update"]
    # 24 layers in place of 12 and the output layer, which takes as long as five, and twice as many experts; the
    # optimizer has no part in it.
    assert 24 / 17 < updates[True] / updates[False] <= 24 / 12


def test_what_ranks_gather_takes_time_and_memory() -> None:
    """The same model with as many key-value heads as ranks, and with half as many: then the product is gathered."""
    config = made("Qwen3-30B-A3B", 1, parallel={"tensor_model_parallel_size": 8, "sequence_parallel": True})
    arch, device = architecture.find(config), devices.find("H100-80GB")
    assert arch is not None and arch.num_key_value_heads == 4
    given_work = time.work(config, 8192)
    sizes = time.sizes(arch, config)
    gathering, alone = (
        time.estimate(one, config, device, given_work, 10**6).seconds["update"]
        for one in (sizes, sizes._replace(cache_heads=8))
    )
    assert gathering > alone
    more = dataclasses.replace(arch, num_key_value_heads=8)
    whole = (arch.num_attention_heads + 2 * arch.num_key_value_heads) * arch.head_dim
    kept = [activations.layer(one, config, 0).attention for one in (arch, more)]
    part = (more.num_attention_heads + 2 * more.num_key_value_heads) * more.head_dim / 8
    assert kept[0] - kept[1] == whole - part  # one head of keys and values on each rank in both
    assert activations.gathered_product(more, 8) == 0.0


def test_ranks_that_share_key_value_heads_are_told_so() -> None:
    parallel = {"tensor_model_parallel_size": 8, "sequence_parallel": True}
    plan = make_plan(made("Qwen3-30B-A3B", 1, parallel=parallel))
    assert any("fewer key-value heads (4) than tensor_model_parallel_size (8): 2 ranks" in note for note in plan.notes)
    four = make_plan(made("Qwen3-30B-A3B", 1, parallel=parallel | {"tensor_model_parallel_size": 4}))
    assert not any("fewer key-value heads" in note for note in four.notes)


def test_an_engine_of_a_whole_node_with_fewer_key_value_heads_is_planned() -> None:
    config = made("Qwen3-30B-A3B", 1, rollout={"tensor_parallel_size": 8}, parallel={"expert_model_parallel_size": 8})
    plan = make_plan(config)
    assert not [item for item in plan.broken if "memory" not in item.rule]
    assert plan.layout["num_engines"] == 1 and plan.memory is not None and plan.memory.cache_tokens > 0


RUN = {
    "run": {"max_steps": 10},
    "data": {"train": "rows.jsonl"},
    "reward": {"functions": [{"function": "number_match"}]},
    "batch": {"global_batch_size": 2048, "num_generations": 8, "micro_batch_tokens": 4096},
}


@pytest.mark.parametrize(("size", "engines", "nodes"), [(16, 16, 2), (32, 8, 4)])
def test_an_engine_over_nodes_is_planned_and_not_run(size: int, engines: int, nodes: int) -> None:
    config = made("Llama-3.1-70B", rollout={"tensor_parallel_size": size}, **RUN)
    plan = make_plan(config)
    assert not [item for item in plan.broken if "memory" not in item.rule], plan.broken
    assert (plan.layout["num_engines"], plan.layout["nodes_per_engine"]) == (engines, nodes)
    assert [item.feature for item in plan.not_run] == ["engine_over_nodes"]
    with pytest.raises(ValueError, match="no engine over nodes: give rollout.tensor_parallel_size=8") as refused:
        checks.require(config)
    assert "\n" not in str(refused.value)
    on_one_node = replace(config, rollout=replace(config.rollout, tensor_parallel_size=8))
    assert "nodes_per_engine" not in make_plan(on_one_node).layout


@pytest.mark.parametrize(
    ("nodes", "rollout", "words"),
    [
        (3, {"tensor_parallel_size": 16}, "cluster.nodes (3) must be divisible by rollout.tensor_parallel_size (16)"),
        (4, {"tensor_parallel_size": 16, "engines_per_node": 1}, "rollout.engines_per_node (1) must be left out"),
        (4, {"tensor_parallel_size": 12}, "gpus_per_node (8) must be a multiple or a divisor of"),
        (
            4,
            {"tensor_parallel_size": 16, "engines_per_node": 1, "mode": "server"},
            "leave none of gpus_per_node (8) to train",
        ),
    ],
)
def test_engines_over_nodes_that_cannot_be(nodes: int, rollout: dict[str, Any], words: str) -> None:
    plan = make_plan(from_dict({"cluster": {"nodes": nodes, "gpus_per_node": 8}, "rollout": rollout}))
    assert any(words in item.message for item in plan.broken), plan.broken


def test_an_engine_over_nodes_is_slower_a_token_and_holds_more() -> None:
    arch, device = architecture.find(made("Llama-3.1-70B")), devices.find("H100-80GB")
    assert arch is not None
    told = {}
    for size in (8, 16):
        config = made("Llama-3.1-70B", 4, rollout={"tensor_parallel_size": size}, **RUN)
        plan = make_plan(config)
        given_work = time.work(config, 64)
        assert plan.memory is not None
        told[size] = (
            engines.step_seconds(time.sizes(arch, config), config, device, 1.0, 100.0, given_work),
            plan.memory.cache_tokens,
            plan.memory.host["engine_weights_asleep"],
        )
    assert told[16][0] > told[8][0] and told[16][1] > told[8][1]
    assert told[16][2] == pytest.approx(told[8][2] / 2, rel=0.03)  # of a node, which now has half of a model


def test_no_fix_makes_an_engine_that_cannot_be_run() -> None:
    """Half of the GPUs on each node would leave an engine of 8 on two of them."""
    batch = {"global_batch_size": 64, "num_generations": 8, "micro_batch_tokens": 4096}  # 8 prompts for 16 ranks
    cluster, rollout = {"nodes": 2, "gpus_per_node": 8}, {"tensor_parallel_size": 8}
    refused = from_dict({"cluster": cluster, "rollout": rollout, "batch": batch})
    offered = search.find(refused, limit=50)
    assert offered and not make_plan(refused).valid
    for fix in offered:
        changed = {change.key: change.value for change in fix.changes}
        gpus, size = changed.get("cluster.gpus_per_node", 8), changed.get("rollout.tensor_parallel_size", 8)
        assert size <= gpus, str(fix)


def test_a_suggestion_cuts_layers_that_stages_do_not_divide() -> None:
    keep = frozenset({"parallel.pipeline_model_parallel_size", "parallel.context_parallel_size"})
    batch = {"global_batch_size": 512, "num_generations": 8, "micro_batch_tokens": 8192}
    lengths = {"max_prompt_length": 1024, "max_response_length": 3072}
    for given_ends, expected in (({}, (11, 11)), ({FIRST: 10, LAST: 12}, (10, 12)), ({FIRST: 10, LAST: 13}, (11, 11))):
        parallel = {"pipeline_model_parallel_size": 8} | given_ends
        config = made(nodes=32, parallel=parallel, batch=batch, rollout=lengths)
        found = layouts.find(config, keep, limit=3)
        assert found
        for layout in found:
            at = loader.from_dict(overridden(config, layout.settings))
            assert make_plan(at).valid
            assert (getattr(at.parallel, FIRST), getattr(at.parallel, LAST)) == expected


def overridden(config: Config, settings: dict[str, Any]) -> dict[str, Any]:
    """Content of the config with these settings, as if they were pasted behind it."""
    raw: dict[str, Any] = as_dict(config)
    for key, value in settings.items():
        section, name = key.split(".")
        raw[section][name] = value
    return raw


@pytest.mark.parametrize(("wanted", "whole"), [(5, 5), (6, 5), (4, 1), (1, 1), (99, 5)])
def test_groups_are_whole_on_stages_with_different_layers(wanted: int, whole: int) -> None:
    """10 + 15 + 15 + 15 + 10 layers: 3 divides the stages between and not the ends, so 5 is what divides all."""
    parallel = pipeline(5, **{FIRST: 10, LAST: 10})
    memory = Memory(recompute_granularity="full", recompute_num_layers=wanted)
    assert divisions.layers_per_stage(65, parallel) == [10, 15, 15, 15, 10]
    assert divisions.groups(65, parallel, memory) == whole


@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 8, 14, 28, 56])
def test_an_engine_has_whole_heads_of_queries(ranks: int) -> None:
    """28 heads of queries and 4 of keys and values: 8 GPUs could share the latter, and not the former."""
    arch = architecture.find(made("Qwen2.5-7B"))
    assert arch is not None and (arch.num_attention_heads, arch.num_key_value_heads) == (28, 4)
    assert divisions.engine_divides_heads(arch, ranks) == (ranks in (1, 2, 4, 28))
