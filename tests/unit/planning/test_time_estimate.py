"""Seconds: limits that arithmetic gives, directions that must hold, and the page against published runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, engines, passes, rates, time
from gspo_hpc.planning.estimates.time import Sizes, Times, Work

PROJECT = Path(__file__).parents[3]


def made(model: str = "Qwen2.5-7B", nodes: int = 4, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "cluster": {"nodes": nodes, "gpus_per_node": 8, "gpu": "H100"},
        "model": {"path": model},
        "batch": {"micro_batch_tokens": 16384, "global_batch_size": 512, "num_generations": 16},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 8192},
        "optimizer": {"distributed": True},
    }
    return from_dict({**base, **{name: base.get(name, {}) | section for name, section in sections.items()}})


def sizes(config: Config) -> Sizes:
    arch = architecture.find(config)
    assert arch is not None
    return time.sizes(arch, config)


def estimated(config: Config, tokens: float = 2000.0, cache: float = 4e5) -> Times:
    work = time.work(config, 2048, tokens)
    return time.estimate(sizes(config), config, devices.find("H100"), work, cache)


def test_the_update_takes_the_operations_over_what_is_reached() -> None:
    config = made(memory={"recompute_granularity": "full"}, batch={"share_prompts": False})
    times = estimated(config)
    device = devices.find("H100")
    least = 4 / 3 * times.model_flops / (32 * device.sustained_flops * rates.EFFICIENCY)
    assert least < times.seconds["update"] < 1.3 * least  # gradients are summed, too
    told = times.to_json()
    assert told["update_mfu"] == pytest.approx(times.model_flops / times.seconds["update"] / 32 / 989e12)
    assert told["seconds_per_rollout"] == pytest.approx(sum(times.seconds.values()))
    # 6 N operations a token, and some for attention's scores
    assert 6 * 7.07e9 * times.tokens < times.model_flops < 1.35 * 6 * 7.6e9 * times.tokens


def test_a_token_takes_as_long_as_reading_what_it_needs() -> None:
    config, device = made(), devices.find("H100")
    model, work = sizes(config), Work(2048, 16, 500.0, 2000.0, 8192)
    alone = engines.step_seconds(model, config, device, 1.0, 0.0, work)
    reading = 2 * model.parameters / (device.memory_bytes_per_s * rates.BANDWIDTH)
    assert reading < alone < 2 * reading
    mixture = sizes(made("Qwen3-30B-A3B"))
    few = engines.step_seconds(mixture, config, device, 1.0, 0.0, work)
    many = engines.step_seconds(mixture, config, device, 256.0, 0.0, work)
    assert many > 3 * few  # one token meets 8 experts of 128, many meet all


@given(st.floats(50, 8000), st.integers(16, 20000))
@settings(max_examples=60, deadline=None)
def test_lengths_have_the_mean_and_the_end_that_they_must(mean: float, completions: int) -> None:
    work = Work(completions, 16, 500.0, mean, 8192)
    found = engines.lengths(work)
    assert found == sorted(found) and found[-1] <= 8192
    assert sum(found) / len(found) == pytest.approx(mean, rel=1e-3)
    assert found[-1] <= engines.longest_of(work) + 1e-6 or completions < len(found)


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.floats(100, 4000),
)
@settings(max_examples=40, deadline=None)
def test_more_of_anything_takes_longer(tp: int, pp: int, tokens: float) -> None:
    parallel = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": tp > 1,
    }
    config = made(parallel=parallel)
    times = estimated(config, tokens)
    assert all(seconds >= 0 for seconds in times.seconds.values())
    longer = estimated(config, tokens * 1.5)
    assert longer.seconds["generation"] > times.seconds["generation"]
    assert longer.seconds["update"] > times.seconds["update"]
    assert estimated(config, tokens, cache=2e4).seconds["generation"] >= times.seconds["generation"]
    twice = estimated(made(nodes=8, parallel=parallel), tokens)
    assert twice.rollout < times.rollout < 2.0 * twice.rollout
    slow = replace(config, memory=replace(config.memory, recompute_granularity="full"))
    assert estimated(slow, tokens).seconds["update"] > times.seconds["update"]
    assert "reference" not in times.seconds
    assert "reference" in estimated(made(parallel=parallel, algorithm={"kl_beta": 0.01}), tokens).seconds


def test_a_run_has_hours_and_a_price() -> None:
    config = made(run={"max_steps": 100})
    told = estimated(config).to_json(price=2.0)
    assert told["gpu_hours"] == pytest.approx(told["hours"] * 32) and told["cost"] == pytest.approx(
        told["gpu_hours"] * 2
    )
    assert estimated(made()).to_json(price=2.0)["cost"] is None


def test_the_page_is_what_the_estimates_say_now_and_predictions_are_within_the_aim() -> None:
    command = [sys.executable, "tools/estimates.py", "--check"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = [
        line
        for line in (PROJECT / "docs/estimates.md").read_text().splitlines()
        if line.startswith("| [") and "](estimates/" in line
    ]
    errors = {line.split("|")[1]: float(line.split("|")[6].strip().rstrip("%")) for line in rows}
    known = [errors[line.split("|")[1]] for line in rows if "| prediction |" in line]
    assert len(known) == 23 and max(map(abs, known)) <= 30, rows
    inferred = [errors[line.split("|")[1]] for line in rows if "| prediction, length from its update |" in line]
    assert len(inferred) == 7 and sum(abs(error) <= 30 for error in inferred) >= 6, rows


def test_gpus_set_apart_generate_and_do_not_train() -> None:
    """Half of them: the update takes twice as long, and what is made a GPU counts all."""
    memory = {"recompute_granularity": "full"}
    server = {"mode": "server", "engines_per_node": 4}
    apart, alone = made(rollout=server, memory=memory), made(cluster={"gpus_per_node": 4}, memory=memory)
    few = made(rollout=server | {"engines_per_node": 6}, memory=memory)
    found, other = estimated(apart), estimated(alone)
    assert found.seconds["update"] == pytest.approx(other.seconds["update"])
    assert 1.9 < found.seconds["update"] / estimated(made(memory=memory)).seconds["update"] < 2.1
    assert estimated(few).seconds["generation"] < found.seconds["generation"]
    assert estimated(few).seconds["update"] > 1.9 * found.seconds["update"]
    weights = estimated(made(rollout=server, optimizer={"distributed": False})).seconds["save"] / 7  # of 2 + 12 bytes
    own, twice = (times.seconds["save"] - weights for times in (found, estimated(few)))
    assert twice == pytest.approx(2 * own), "each copies twice as much of the state that all share"
    assert (found.gpus, found.trainers) == (32, 16)
    assert found.to_json()["update_mfu"] == pytest.approx(other.to_json()["update_mfu"])
    assert found.to_json()["tokens_per_s_per_gpu"] == pytest.approx(found.tokens / found.rollout / 32)


@pytest.mark.parametrize("absurd", [None, 0, -1, "many", True])
def test_sequences_at_once_that_cannot_be_are_the_default(absurd: object) -> None:
    rollout = {"engine": {"max_num_seqs": absurd}}
    assert estimated(made(rollout=rollout)).seconds == estimated(made()).seconds
    assert estimated(made(rollout={"engine": {"max_num_seqs": 2}})).rollout > estimated(made()).rollout


def test_the_range_is_the_spread_of_errors() -> None:
    """The rows whose lengths are published span it, and no others: published over estimated seconds."""
    lines = (PROJECT / "docs/estimates.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| [") and "](estimates/" in line]
    shares = [float(row[3]) / float(row[5]) for row in rows if "length from its update" not in row[2]]
    fitted = [row[2].strip() for row in rows if "length from its update" in row[2]]
    assert fitted and not any(role.startswith("calibration") for role in fitted)
    assert len(shares) == 27 and rates.RANGE == pytest.approx((min(shares), max(shares)), abs=0.005), shares
    times = estimated(made())
    assert times.range == (times.rollout * rates.RANGE[0], times.rollout * rates.RANGE[1])
    assert times.to_json()["seconds_per_rollout_range"] == list(times.range)


EXPERTS = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}


def _mixture(**parallel: Any) -> Times:
    config = made("Qwen3-30B-A3B", 4, parallel=parallel, memory={"recompute_granularity": "full"})
    return estimated(config)


def test_slices_of_experts_cost_what_they_send_and_read() -> None:
    """Experts on ranks of their own are faster than slices of every expert, and than all experts on every rank."""
    tensor = {"tensor_model_parallel_size": 8, "sequence_parallel": True}
    sliced = _mixture(**tensor)  # every rank has an eighth of each expert
    whole = _mixture(**tensor, **EXPERTS)
    assert whole.seconds["update"] < 0.8 * sliced.seconds["update"]
    spread, all_on_one = _mixture(**EXPERTS), _mixture()
    assert spread.seconds["update"] < all_on_one.seconds["update"]
    few = made("Qwen3-30B-A3B", 4, batch={"micro_batch_tokens": 9216}, rollout={"max_response_length": 8192})
    many = made("Qwen3-30B-A3B", 4, batch={"micro_batch_tokens": 73728}, rollout={"max_response_length": 8192})
    assert estimated(few).seconds["update"] > 1.1 * estimated(many).seconds["update"]
    dense = [estimated(made(batch={"micro_batch_tokens": tokens})).seconds["update"] for tokens in (9216, 73728)]
    assert dense[0] == pytest.approx(dense[1])


def test_ranks_that_share_an_expert_gather_each_others_tokens() -> None:
    """There and back: for each of a rank's own tokens, those of the seven others, as often as they have experts."""
    parallel = {"tensor_model_parallel_size": 8, "sequence_parallel": True}
    config, device = made("Qwen3-30B-A3B", 4, parallel=parallel), devices.find("H100")
    model = sizes(config)
    gathered = 2 * 1000 / 8 * model.top_k * model.layers_with_experts * model.hidden * 2 * 7
    found = passes._dispatching(model, config, passes.grid(config), device, 1000.0)
    assert found == pytest.approx(gathered / (device.node_bytes_per_s * rates.LINK))


@pytest.mark.parametrize("experts", [2, 4, 8])
def test_tokens_that_stay_on_their_node_are_sent_over_its_links_once(experts: int) -> None:
    """Nodes with more GPUs than a group of experts has make none of it slower: there and back, to the other ranks."""
    config, device = made("Qwen3-30B-A3B", 4, parallel={"expert_model_parallel_size": experts}), devices.find("H100")
    model = sizes(config)
    sent = 2 * 1000 * model.top_k * model.layers_with_experts * model.hidden * 2 * (experts - 1) / experts
    found = passes._dispatching(model, config, passes.grid(config), device, 1000.0)
    assert found == pytest.approx(sent / (device.node_bytes_per_s * rates.LINK))


def test_tokens_that_leave_the_node_cost_more() -> None:
    within = _mixture(expert_model_parallel_size=8)
    over = _mixture(expert_model_parallel_size=32)
    assert over.seconds["update"] > 1.1 * within.seconds["update"]


@pytest.mark.parametrize("tokens", [500.0, 2000.0, 6000.0])
def test_side_by_side_takes_the_longer_of_both(tokens: float) -> None:
    apart: dict[str, dict[str, Any]] = {"cluster": {"generation_nodes": 2}, "memory": {"recompute_granularity": "full"}}
    turns = estimated(made(**apart, rollout={"mode": "server"}), tokens)
    beside = estimated(made(**apart, rollout={"mode": "server", "max_staleness": 1}), tokens)
    assert turns.rollout == pytest.approx(sum(turns.seconds.values())) and not turns.side_by_side
    between = beside.seconds["sync"] + beside.seconds["other"]
    work = sum(beside.seconds.values()) - beside.seconds["generation"] - between
    assert beside.rollout == pytest.approx(between + max(beside.seconds["generation"], work))
    assert beside.rollout < turns.rollout and beside.seconds["generation"] == turns.seconds["generation"]
    assert (beside.gpus, beside.trainers) == (32, 16)
    more = estimated(made(cluster={"generation_nodes": 3}, rollout={"mode": "server"}), tokens)
    assert more.seconds["generation"] < turns.seconds["generation"]


def test_eager_mode_slows_generation_and_nothing_else() -> None:
    graphs, eager = estimated(made()), estimated(made(rollout={"engine": {"enforce_eager": True}}))
    assert eager.seconds["generation"] > 1.1 * graphs.seconds["generation"]
    assert {**eager.seconds, "generation": 0} == {**graphs.seconds, "generation": 0}
    assert estimated(made(rollout={"engine": {"enforce_eager": False}})).seconds == graphs.seconds


def test_the_last_stage_has_the_output_layer_as_well() -> None:
    """The output layer of Qwen3-30B-A3B takes as long as several of its layers, for which all other stages wait."""
    stages = 8
    piped = made("Qwen3-30B-A3B", parallel={"pipeline_model_parallel_size": stages})
    model = sizes(piped)
    last = model.token_flops / stages + model.output_flops
    mean = (model.token_flops + model.output_flops) / stages
    assert passes._unevenness(model, piped) == pytest.approx(last / mean) and last > 1.5 * mean
    assert passes._unevenness(model, made("Qwen3-30B-A3B")) == 1.0
