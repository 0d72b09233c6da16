"""Nodes that only generate, and generation beside training: planned, with their own rules, and refused by `train`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_hpc.cli import main
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.config.schema import Config
from gspo_hpc.launch import checks
from gspo_hpc.planning import asynchrony, ranks
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import devices, engines, time
from gspo_hpc.planning.exactness import assess
from gspo_hpc.planning.plan import make_plan

PRESET = Path(__file__).parents[3] / "configs" / "qwen2.5_7b_tp2.yaml"
MIXTURE = PRESET.with_name("qwen3_30b_a3b_ep8.yaml")
APART = ["cluster.nodes=4", "cluster.generation_nodes=1", "rollout.mode=server", "batch.global_batch_size=384"]


def made(nodes: int, generation: int, **rollout: Any) -> Config:
    return from_dict(
        {
            "cluster": {"nodes": nodes, "gpus_per_node": 8, "gpu": "H100", "generation_nodes": generation},
            "rollout": {"mode": "server", **rollout},
        }
    )


def test_whole_nodes_generate_and_the_others_train() -> None:
    plan = make_plan(load(PRESET, APART))
    assert plan.valid, plan.broken
    assert plan.quantities["world_size"] == 24 and plan.layout["generation_nodes"] == 1
    assert plan.layout["engines_per_node"] == plan.layout["num_engines"] == 8
    seats = ranks.seats(plan.layout)
    assert len(seats) == 24 and {seat.node for seat in seats} == {0, 1, 2}
    assert all(seat.engine is None for seat in seats)
    assert engines.count(made(4, 1)) == 8 and engines.count(made(4, 2, engines_per_node=3)) == 6
    assert engines.count(made(4, 2, tensor_parallel_size=4)) == 4
    assert plan.memory is not None and "engine_weights_asleep" not in plan.memory.host
    assert "engine_asleep" not in plan.memory.phase("update").parts


@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from([None, 1, 2, 3]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, 1, 2, 5, 8]),
)
@example(2, 8, 3, None, 0, False, None)
@example(3, 4, 8, None, 2, True, None)
@example(3, 8, 8, None, 2, True, 4)
@settings(max_examples=200, deadline=None)
def test_estimates_count_the_engines_of_the_layout(
    nodes: int, gpus: int, size: int, engines_per_node: int | None, generation: int, server: bool, others: int | None
) -> None:
    rollout = {"tensor_parallel_size": size, "engines_per_node": engines_per_node}
    cluster = {"nodes": nodes, "gpus_per_node": gpus, "generation_nodes": generation * server}
    if generation and server and others is not None:
        cluster["generation_gpus_per_node"] = others
    config = from_dict({"cluster": cluster, "rollout": rollout | {"mode": "server" if server else "colocate"}})
    plan = make_plan(config)
    if plan.valid:
        assert engines.count(config) == plan.layout["num_engines"] > 0
        used = nodes if not cluster["generation_nodes"] else generation
        own = cluster.get("generation_gpus_per_node", gpus)
        assert plan.layout["num_engines"] * size <= used * own, "GPUs that there are"
        assert plan.quantities["world_size"] == config.world_size
        if cluster["generation_nodes"]:
            assert config.num_ranks == config.world_size + generation * own
            drawn = ranks.engine_gpus(plan.layout)
            assert {gpu for gpus_of_engine in drawn for gpu in gpus_of_engine} <= {*range(own)}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ([*APART, "rollout.tensor_parallel_size=16"], "generation_nodes_hold_engines"),
        (["cluster.nodes=2", "cluster.generation_nodes=1"], "generation_nodes_need_server"),
        (["cluster.generation_nodes=1", "rollout.mode=server"], "generation_nodes_leave_some_to_train"),
        ([*APART, "rollout.engines_per_node=9"], "generation_nodes_hold_engines"),
        ([*APART, "cluster.generation_gpus_per_node=2", "rollout.engines_per_node=3"], "generation_nodes_hold_engines"),
        (
            [*APART, "cluster.generation_gpus_per_node=2", "rollout.tensor_parallel_size=4"],
            "generation_nodes_hold_engines",
        ),
        (["cluster.generation_gpus_per_node=2"], "generation_gpus_need_nodes"),
        (["slurm.generation_partition=l40"], "generation_options_need_nodes"),
        ([*APART, "cluster.generation_gpus_per_node=2", "slurm.gres=gpu:h100:8"], "generation_gres_is_given"),
        ([*APART, "slurm.generation_sbatch={nodes: 3}"], "sbatch_options_are_free"),
        (["rollout.max_staleness=1"], "staleness_needs_server"),
        (["rollout.mode=server"], "server_engines_given"),
    ],
)
def test_what_cannot_be_is_refused(settings: list[str], rule: str) -> None:
    plan = make_plan(load(PRESET, settings))
    assert rule in {item.rule for item in plan.broken}, plan.broken


@pytest.mark.parametrize(("engines", "size"), [(8, 1), (4, 2), (2, 4), (7, 1)])
def test_engines_may_have_all_gpus_of_a_node_that_only_generates(engines: int, size: int) -> None:
    """No rank trains there: the eighth GPU of a node would be idle."""
    words = [f"rollout.engines_per_node={engines}", f"rollout.tensor_parallel_size={size}"]
    plan = make_plan(load(PRESET, [*APART, *words]))
    assert not plan.broken and plan.layout["num_engines"] == engines


@pytest.mark.parametrize(("others", "engines"), [(2, 2), (4, 4), (16, 16)])
def test_nodes_that_generate_may_have_other_gpus(others: int, engines: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPUs that train stay the same, and so do batches and what a trainer needs."""
    words = [
        *APART,
        f"cluster.generation_gpus_per_node={others}",
        "slurm.gres=gpu:8",
        f"slurm.generation_gres=gpu:{others}",
    ]
    plan, alike = make_plan(load(PRESET, words)), make_plan(load(PRESET, APART))
    assert not plan.broken and plan.quantities == alike.quantities
    assert plan.layout["num_engines"] == plan.layout["engines_per_node"] == engines
    assert plan.memory is not None and alike.memory is not None
    assert plan.memory.phases == alike.memory.phases
    grows = sum(plan.memory.host.values()) - sum(alike.memory.host.values())
    assert grows > 0 if others > 8 else grows <= 0, "a node of more engines needs more host memory"
    assert plan.memory.host["processes"] * 8 == alike.memory.host["processes"] * max(8, others)
    found, one = (asynchrony._times(load(PRESET, given), None, Models(), None) for given in (words, APART))
    assert found is not None and one is not None and found.gpus == 24 + others
    slower = found.seconds["generation"] - one.seconds["generation"]
    assert slower < 0 if others > 8 else slower > 0
    assert found.seconds["update"] == one.seconds["update"]
    main.main(["plan", str(PRESET), *words])
    page = " ".join(capsys.readouterr().out.split())
    assert f"3 x 8 GPUs, and 1 x {others} for generation" in page


@pytest.mark.parametrize(("interval", "told"), [(3, False), (4, False), (5, True), (8, True)])
def test_checkpoints_further_apart_than_rollouts_are_warned_of(interval: int, told: bool) -> None:
    """Nothing is saved while a rollout is sampled ahead, which is all but once in a rollout."""
    words = ["rollout.max_staleness=1", "batch.steps_per_generation=4", f"checkpoint.interval={interval}"]
    found = make_plan(load(PRESET, [*APART, *words])).warnings
    assert (
        any(f"checkpoint.interval ({interval}) is above the updates of a rollout (4)" in text for text in found) == told
    )


def test_one_rollout_ahead_is_run_and_more_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", str(PRESET), *APART, "rollout.max_staleness=1"]) == 3
    page = " ".join(capsys.readouterr().out.split())
    assert "4 x 8 GPUs, 1 of the nodes for generation" in page
    assert "not run by this version" not in page
    assert "on the nodes that only generate, 3" in page and "side by side" in page
    checks.require(load(PRESET, APART))
    warned = [checks.require(load(PRESET, [*APART, f"rollout.max_staleness={count}"])).warnings for count in (1, 2)]
    assert [any("nothing faster" in text for text in texts) for texts in warned] == [False, True]


IN_FLIGHT = "rollout.in_flight_updates=true"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([*APART, "rollout.max_staleness=1"], None),
        ([*APART, "rollout.max_staleness=0"], "in_flight_needs_one_ahead"),
        ([*APART, "rollout.max_staleness=2"], "in_flight_needs_one_ahead"),
        (["rollout.max_staleness=0"], "in_flight_needs_one_ahead"),
        ([*APART, "rollout.max_staleness=1", "environment.name=guess_number"], None),
    ],
)
def test_weights_that_come_in_flight_need_engines_that_are_ahead(words: list[str], rule: str | None) -> None:
    plan = make_plan(load(PRESET, [*words, IN_FLIGHT]))
    assert [item.rule for item in plan.broken] == ([] if rule is None else [rule])
    assert all(item.rule != rule for item in make_plan(load(PRESET, words)).broken)


def test_experts_that_several_weights_chose_are_not_repeated() -> None:
    words = ["rollout.mode=server", "rollout.engines_per_node=1", "rollout.max_staleness=1", IN_FLIGHT]
    for replay, refused in (("rollout", True), ("off", False)):
        broken = {item.rule for item in make_plan(load(MIXTURE, [*words, f"moe.router_replay={replay}"])).broken}
        assert ("in_flight_without_choices" in broken) is refused, broken


def test_a_save_waits_for_no_rollout_whose_weights_come_in_flight() -> None:
    words = [*APART, "rollout.max_staleness=1", "batch.steps_per_generation=4", "checkpoint.interval=8"]
    told = [make_plan(load(PRESET, [*words, *more])).warnings for more in ([], [IN_FLIGHT])]
    assert [any("checkpoint.interval (8)" in text for text in texts) for texts in told] == [True, False]
    assert assess(load(PRESET, [*words, "cluster.platform=cpu"])).grade != "checkpoint-exact"
    reasons = assess(load(PRESET, [*words, IN_FLIGHT])).reasons
    assert any("which weights sample a token" in reason for reason in reasons)


def test_weights_that_come_in_flight_cost_the_reading_of_what_is_unfinished() -> None:
    """Engines begin their rollout when training on the one before begins, and read again what is there when it ends."""
    seconds = {}
    for nodes in (1, 3):
        words = ["cluster.nodes=4", f"cluster.generation_nodes={nodes}", "rollout.mode=server"]
        words += ["rollout.max_staleness=1", "batch.global_batch_size=384", "batch.steps_per_generation=4"]
        for more in ([], [IN_FLIGHT]):
            config = load(PRESET, [*words, *more])
            plan = make_plan(config)
            assert plan.valid, plan.broken
            found, _ = time.of_plan(config, plan)
            assert found is not None
            seconds[nodes, bool(more)] = found.seconds
    training = {key: sum(found[name] for name in ("update", "save")) for key, found in seconds.items()}
    assert seconds[1, False]["generation"] > training[1, False] and seconds[3, False]["generation"] < training[3, False]
    assert seconds[3, True] == seconds[3, False], "the engines are done before"
    config = load(PRESET, APART)
    given = time.work(config, int(make_plan(config).quantities["generation_batch_size"]) * 4)
    device = devices.card(config.cluster)
    assert device is not None
    all_read = given._replace(turns=2.0, reply_tokens=given.response_tokens)
    whole = engines.prefill(time.sizes_of(config), config, device, all_read)
    assert 0.01 * whole < seconds[1, True]["generation"] - seconds[1, False]["generation"] < whole


def test_choices_of_a_pass_that_is_left_out_cannot_be_repeated() -> None:
    for staleness, replay, refused in ((1, "old_logprobs", True), (0, "old_logprobs", False), (1, "rollout", False)):
        words = [f"rollout.max_staleness={staleness}", f"moe.router_replay={replay}"]
        broken = {item.rule for item in make_plan(load(PRESET, [*APART, *words])).broken}
        assert ("staleness_without_old_choices" in broken) is refused, broken


def test_entropies_of_weights_that_are_gone_choose_no_tokens() -> None:
    for staleness, share, refused in ((1, 0.2, True), (0, 0.2, False), (1, 1.0, False)):
        words = [f"rollout.max_staleness={staleness}", f"algorithm.top_entropy_quantile={share}"]
        broken = {item.rule for item in make_plan(load(PRESET, [*APART, "algorithm.name=gspo_token", *words])).broken}
        assert ("staleness_without_entropies" in broken) is refused, broken


def _told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["plan", str(PRESET), *words, "--json"]) == 3
    told: dict[str, Any] = json.loads(capsys.readouterr().out)["time"]
    return told


@pytest.mark.parametrize(
    ("four", "split"),
    [
        (["cluster.nodes=4", "batch.global_batch_size=512"], "cluster.generation_nodes"),
        (["cluster.nodes=4", "batch.global_batch_size=512", "cluster.gpus_per_node=4"], "cluster.generation_nodes"),
        (["cluster.nodes=1"], "rollout.engines_per_node"),
    ],
)
def test_a_line_says_whether_asynchrony_pays(four: list[str], split: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The seconds that it names are those of the plan that it names. One node had no line, though its GPUs divide."""
    told = _told(capsys, *four)
    words = told["asynchrony"].split("(")[1].split(")")[0].split()
    assert words[0].startswith(split) and words[1:] == ["rollout.mode=server", "rollout.max_staleness=1"]
    other = _told(capsys, *four, *words)
    assert f"would take {other['seconds_per_rollout']:,.1f} s a rollout" in told["asynchrony"]
    verdict = "pays" if other["seconds_per_rollout"] < told["seconds_per_rollout"] else "does not pay"
    assert told["asynchrony"].endswith(f"it {verdict}")
    turns = _told(capsys, *four, *words, "rollout.max_staleness=0")
    for one in (other, turns):
        assert f"take {other['seconds_per_rollout']:,.1f} s a rollout, taking turns" in one["asynchrony"]
        assert f"{turns['seconds_per_rollout']:,.1f} s" in one["asynchrony"]


def test_side_by_side_names_only_what_fits() -> None:
    """Two engines of two GPUs a node would be faster, and leave four to train, which cannot hold the optimizer."""
    batch = {"num_generations": 8, "global_batch_size": 512, "steps_per_generation": 4, "micro_batch_tokens": 16384}
    sections: dict[str, Any] = {
        "model": {"path": "Qwen3-14B"},
        "cluster": {"gpus_per_node": 8, "gpu": "H100"},
        "batch": batch,
        "rollout": {"max_prompt_length": 1024, "max_response_length": 4096, "tensor_parallel_size": 2},
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "memory": {"recompute_granularity": "full"},
        "optimizer": {"distributed": True},
    }
    config = from_dict(sections)
    splits = [split for _, split in asynchrony._splits(config, None, Models())]
    assert splits == ["rollout.engines_per_node=1"]
    apart = sections["rollout"] | {"mode": "server", "max_staleness": 1}
    for count, valid in ((1, True), (2, False)):
        assert make_plan(from_dict(sections | {"rollout": apart | {"engines_per_node": count}})).valid == valid


def test_there_is_no_line_where_neither_nodes_nor_gpus_can_be_divided() -> None:
    config = load(PRESET.parent / "qwen3_0.6b_1gpu.yaml")
    assert make_plan(config).valid and asynchrony.line(config, None, None) is None  # type: ignore[arg-type]


def test_there_is_no_line_without_gpus() -> None:
    config = load(Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml")
    assert asynchrony.line(config, None, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "verdict"), [(99.9, "pays"), (100.1, "does not pay"), (140.0, "does not pay")])
def test_side_by_side_pays_only_where_it_is_shorter(
    seconds: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, times = (
        load(PRESET, ["cluster.nodes=4"]),
        asynchrony.time.Times({"generation": 0.0}, 1, 1.0, 8, 8, 1.0, 1.0),
    )
    monkeypatch.setattr(asynchrony, "_splits", lambda *_: [(seconds, "cluster.generation_nodes=1")])
    line = asynchrony.line(config, replace(times, seconds={"generation": 100.0}), None)
    assert line is not None and line.endswith(f"it {verdict}")


def test_every_share_of_the_nodes_is_tried_from_an_eighth_to_three_quarters() -> None:
    """A half is seldom the best: what generates longer than it trains needs more."""
    config = load(PRESET, ["cluster.nodes=8", "cluster.gpu=H100"])
    found = [split.split("=") for _, split in asynchrony._splits(config, 7000.0, Models())]
    assert [int(n) for name, n in found if name == "cluster.generation_nodes"] == [1, 2, 3, 4, 5, 6]
    assert [int(n) for name, n in found if name == "rollout.engines_per_node"] == [1, 2, 3, 4, 5, 6]
    nodes = [seconds for seconds, split in asynchrony._splits(config, 7000.0, Models()) if "nodes" in split]
    assert nodes.index(min(nodes)) != 3
