"""Seconds of each phase as arithmetic gives them: what is done how often, by how many, over which link (milliseconds).

It would catch a phase that is counted for the wrong number of updates, passes or ranks, which the published runs of
docs/estimates.md do not have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, engines, parameters, passes, rates, time
from gspo_hpc.planning.estimates.time import Sizes, Times

DEVICE = devices.find("H100")
GPUS = 32


def made(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "cluster": {"nodes": 4, "gpus_per_node": 8, "gpu": "H100"},
        "model": {"path": "Qwen2.5-7B"},
        "batch": {"micro_batch_tokens": 16384, "global_batch_size": 512, "num_generations": 16},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 8192},
        "optimizer": {"distributed": True},
    }
    return from_dict({**base, **{name: base.get(name, {}) | section for name, section in sections.items()}})


def sizes(config: Config) -> Sizes:
    arch = architecture.find(config)
    assert arch is not None
    return time.sizes(arch, config)


def estimated(config: Config) -> Times:
    return time.estimate(sizes(config), config, DEVICE, time.work(config, 2048, 2000.0), 4e5)


def test_old_logprobs_are_computed_for_all_updates_but_the_first_of_one_round() -> None:
    """A pass for the reference goes over the same tokens: it is the measure.

    Tokens with a high entropy are chosen in all of them, by a pass over all.
    """
    cases = [
        (4, 1, 1.0, 3 / 4),
        (2, 1, 1.0, 1 / 2),
        (4, 2, 1.0, 1.0),
        (1, 2, 1.0, 1.0),
        (4, 1, 0.2, 1.0),
        (2, 1, 0.5, 1.0),
    ]
    for updates, rounds, quantile, share in cases:
        kl = {"kl_beta": 0.01, "top_entropy_quantile": quantile}
        batch = {"steps_per_generation": updates, "num_iterations": rounds, "global_batch_size": 2048 // updates}
        config = made(batch=batch, algorithm=kl)
        found = estimated(config).seconds
        whole = found["reference"] - passes.reference(sizes(config), config, DEVICE)
        assert found["old_logprobs"] == pytest.approx(share * whole), (updates, rounds)
    assert "old_logprobs" not in estimated(made(batch={"steps_per_generation": 1})).seconds


def test_every_round_trains_on_all_completions_and_steps_as_often() -> None:
    one, two = (estimated(made(batch={"steps_per_generation": 4, "num_iterations": rounds})) for rounds in (1, 2))
    assert two.seconds["update"] == pytest.approx(2 * one.seconds["update"])
    assert two.model_flops == pytest.approx(2 * one.model_flops) and (one.updates, two.updates) == (4, 8)


def test_what_is_computed_again_is_computed() -> None:
    """All of a forward pass with full recomputation, a part of it with selective recomputation."""
    config = made()
    model, work = sizes(config), time.work(config, 2048, 2000.0)
    forward = passes.forward_flops(model, config, work)
    products = forward / (GPUS * DEVICE.sustained_flops * rates.EFFICIENCY)
    found = {
        granularity: estimated(made(memory={"recompute_granularity": granularity})).seconds["update"]
        for granularity in (None, "selective", "full")
    }
    assert found["full"] - found[None] == pytest.approx(products)
    assert 0.1 * products < found["selective"] - found[None] < 0.5 * products


def test_checkpoints_are_saved_every_so_many_updates() -> None:
    config = made(checkpoint={"interval": 2}, batch={"steps_per_generation": 4})
    once = passes.save(sizes(config), config, DEVICE)
    assert estimated(config).seconds["save"] == pytest.approx(2 * once)
    assert estimated(made(checkpoint={"interval": 2})).seconds["save"] == pytest.approx(once / 2)
    waited = made(checkpoint={"interval": 2, "async_save": False}, batch={"steps_per_generation": 4})
    assert estimated(waited).seconds["save"] > 5 * estimated(config).seconds["save"]  # a disk, not the host's memory


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_a_save_holds_up_the_rank_that_copies_most(model: str, distributed: bool, size: int) -> None:
    """What the plan of memory says that a rank has of weights and optimizer; one of those that are alike copies it."""
    grid = {"tensor_model_parallel_size": size, "expert_model_parallel_size": size if "A3B" in model else 1}
    grid |= {"sequence_parallel": size > 1}
    config = made(model={"path": model}, parallel=grid, optimizer={"distributed": distributed})
    arch = architecture.find(config)
    assert arch is not None
    held = parameters.state(arch, config, 0)
    copied = (held.weights + held.optimizer) / DEVICE.host_bytes_per_s
    assert passes.save(sizes(config), config, DEVICE) == pytest.approx(copied, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "nodes", "longest"), [("H100", 4, "network"), ("H100", 1, "host"), ("L40S", 4, "network")]
)
def test_weights_are_kept_while_the_next_ones_come(gpu: str, nodes: int, longest: str) -> None:
    """Server mode: over nodes the first rank's broadcast takes longest; within one the copy that owners keep does."""
    cluster = {"nodes": nodes, "gpu": gpu}
    config, device = made(cluster=cluster, rollout={"mode": "server", "engines_per_node": 1}), devices.find(gpu)
    model = sizes(config)
    rate = device.host_bytes_per_s if longest == "host" else rates.SYNC_LINK * device.network_bytes_per_s
    assert passes.sync(model, config, device) == pytest.approx(2 * model.parameters / rate)


def test_without_a_distributed_optimizer_every_rank_steps_all_of_its_weights() -> None:
    apart, alone = made(), made(optimizer={"distributed": False})
    model, state = sizes(apart), 20.0  # bytes of a parameter that are read and written
    found = [passes.optimizer(model, config, DEVICE) for config in (alone, apart)]
    each = state * model.parameters / (DEVICE.memory_bytes_per_s * rates.BANDWIDTH)
    assert found[0] - found[1] == pytest.approx(each * (1 - 1 / GPUS))


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 2), (4, 4), (28, 4)])
def test_heads_that_are_fewer_than_gpus_are_read_by_each(ranks: int, copies: int) -> None:
    """Qwen2.5-7B has 4 key-value heads and 28 of queries: a quarter of the cache is the least that a GPU reads."""
    config = made(cluster={"gpus_per_node": 28}, rollout={"tensor_parallel_size": ranks})
    model, work = sizes(config), time.work(config, 2048, 2000.0)
    near, far = (engines.step_seconds(model, config, DEVICE, 64.0, seen, work) for seen in (1e5, 2e5))
    kept = 64 * 1e5 * model.cache_bytes / copies
    assert far - near == pytest.approx(kept / (DEVICE.memory_bytes_per_s * rates.BANDWIDTH))


def test_ranks_that_have_the_same_key_value_head_send_all_of_it_over_context_ranks() -> None:
    """Qwen2.5-7B has 4 of them: a rank of 28 sends as much as a rank of 4."""
    model, alone = sizes(made()), passes.Grid(tp=4, pp=1, cp=1, ep=1, etp=4, replicas=1, node=64)

    def context(tp: int) -> float:
        two, one = (passes._talking(model, alone._replace(tp=tp, cp=cp), DEVICE, 1e6) for cp in (2, 1))
        return two - one

    assert context(1) == pytest.approx(4 * context(4)) and context(28) == pytest.approx(context(4))


def test_sums_of_gradients_beside_the_backward_pass_take_a_part_of_their_time() -> None:
    """`rates.OVERLAPPED` of it, 0.3, which docs/estimates.md has among the constants that nobody has calibrated."""
    alone = {"optimizer": {"distributed": False}}
    one, beside = (made(**alone, parallel={"overlap_grad_reduce": overlap}) for overlap in (False, True))
    whole = 2.0 * 4.0 * sizes(one).parameters / (DEVICE.network_bytes_per_s * rates.LINK)  # fp32, there and back
    saved = passes.optimizer(sizes(one), one, DEVICE) - passes.optimizer(sizes(beside), beside, DEVICE)
    assert saved == pytest.approx(whole * 0.7)


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen3-30B-A3B"])
def test_a_card_that_reaches_more_of_its_products_trains_faster_but_for_what_experts_take_besides(model: str) -> None:
    config = made(model={"path": model}, memory={"recompute_granularity": "full"})
    work = time.work(config, 2048, 2000.0)
    forward = passes.forward_flops(sizes(config), config, work)
    least, more = (
        passes.seconds(sizes(config), config, replace(DEVICE, products=products), forward, 1e6, 1, 4.0)
        for products in (1.0, 1.25)
    )
    operations = 4.0 * forward / (GPUS * DEVICE.sustained_flops * rates.EFFICIENCY)
    assert least - more == pytest.approx(operations * (1 - 1 / 1.25))
    assert (least == pytest.approx(operations)) == (model == "Qwen2.5-7B")


def test_a_card_of_which_engines_reach_less_bandwidth_reads_longer() -> None:
    """And adds nothing else to a step: one token of one sequence reads the weights and its part of the cache."""
    config = made()
    work = time.work(config, 2048, 2000.0)
    usual, slow = (
        engines.step_seconds(sizes(config), config, replace(DEVICE, reads=reads), 1.0, 500.0, work)
        for reads in (1.0, 0.5)
    )
    size = 2.0 * sizes(config).parameters + (work.prompt_tokens + 500.0) * sizes(config).cache_bytes
    assert slow - usual == pytest.approx(size / (DEVICE.memory_bytes_per_s * rates.BANDWIDTH))


def test_a_switch_takes_time_where_the_trainer_leaves_its_gpus() -> None:
    """A trainer that stays on them has none, nor one whose engines have others."""
    leaves, stays = made(), made(memory={"offload_trainer": False})
    apart = made(rollout={"mode": "server", "engines_per_node": 4})
    found = [estimated(config).seconds["other"] for config in (leaves, stays, apart)]
    assert found == [rates.OVERHEAD_SECONDS + rates.SWITCH_SECONDS, *[rates.OVERHEAD_SECONDS] * 2]


def test_a_sync_on_shared_gpus_has_seconds_beside_its_bytes() -> None:
    """Engines sleep and wake there; those with GPUs of their own go on, and on CPUs there is nothing to wake."""
    shared, cpu = made(), made(cluster={"platform": "cpu"}, optimizer={"distributed": False})
    apart = made(rollout={"mode": "server", "engines_per_node": 4})
    for config, seconds in ((shared, rates.SYNC_SECONDS), (apart, 0.0), (cpu, 0.0)):
        found = passes.sync(sizes(config), config, DEVICE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rates, "SYNC_SECONDS", 0.0)
            assert found - passes.sync(sizes(config), config, DEVICE) == pytest.approx(seconds)


def test_a_pipeline_waits_once_for_its_stages_and_less_in_chunks() -> None:
    """Micro-batches, b of them on p stages, take (1 + (p - 1) / b) times as long; v chunks wait a v-th."""

    def seconds(tokens: int, chunks: int | None = None) -> float:
        parallel = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": chunks}
        config = made(parallel=parallel, batch={"micro_batch_tokens": tokens})
        model = sizes(config)
        assert passes.grid(config).replicas == 8
        return passes.seconds(model, config, DEVICE, 1e18, 8 * 4 * 32768.0, 4, 3.0)

    in_one, in_two, in_four = seconds(32768), seconds(16384), seconds(8192)
    assert in_one / in_four == pytest.approx((1 + 3 / 1) / (1 + 3 / 4))
    assert in_two / in_four == pytest.approx((1 + 3 / 2) / (1 + 3 / 4))
    assert seconds(16384, 7) / in_two == pytest.approx((1 + 3 / (2 * 7)) / (1 + 3 / 2))
