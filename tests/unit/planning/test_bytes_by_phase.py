"""Bytes of each phase as arithmetic gives them: whose they are, how often, on which stage (a second).

It would catch a part that is forgotten or counted twice where tests of directions and of whole runs are too coarse.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config import schema
from gspo_hpc.config.constants import GATHER_BUCKET_BYTES, NCCL_BYTES, TRANSFER_BUCKET_BYTES
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import (
    activations,
    devices,
    head,
    memory,
    moments,
    parameters,
    passes,
    phases,
    rates,
    time,
)
from gspo_hpc.planning.estimates.head import Head
from gspo_hpc.planning.estimates.memory import Estimate
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.suggest import savings

LAYERS = 28  # of Qwen2.5-7B


def made(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "cluster": {"nodes": 2, "gpus_per_node": 8, "gpu": "H100"},
        "model": {"path": "Qwen2.5-7B"},
        "batch": {"micro_batch_tokens": 16384, "global_batch_size": 256, "num_generations": 8},
        "rollout": {"tensor_parallel_size": 2, "max_prompt_length": 1024, "max_response_length": 7168},
        "optimizer": {"distributed": True},
    }
    return from_dict({**base, **{name: base.get(name, {}) | section for name, section in sections.items()}})


def replace_section(config: Config, name: str, **values: Any) -> Config:
    return schema.replace(config, **{name: schema.replace(getattr(config, name), **values)})


def arch_of(config: Config) -> Architecture:
    arch = architecture.find(config)
    assert arch is not None
    return arch


def estimated(config: Config) -> Estimate:
    return memory.estimate(arch_of(config), config, devices.find("H100"))


@pytest.mark.parametrize(
    "sizes", [{}, {"expert_model_parallel_size": 8}, {"expert_model_parallel_size": 8, "context_parallel_size": 2}]
)
def test_every_kind_of_group_has_buffers_of_nccl(sizes: dict[str, int]) -> None:
    """One for all ranks, and one for each way in which they share the model."""
    config = made(model={"path": "Qwen3-30B-A3B"}, parallel=sizes | {"expert_tensor_parallel_size": 1})
    held = estimated(config).phase("update").parts["cuda_and_nccl"]
    assert held == memory.CONTEXT + NCCL_BYTES * (1 + len(sizes))


def test_an_optimizer_that_waits_on_the_host_is_not_on_the_gpu_beside_what_stays() -> None:
    stays = {"offload_parts": ["weights", "gradients"]}
    held, away = (estimated(made(memory=stays | {"offload_optimizer": off})) for off in (False, True))
    for name in ("generation", "sync"):
        assert held.phase(name).parts["optimizer"] > 0 and away.phase(name).parts["optimizer"] == 0
    assert away.host["optimizer"] == 8 * held.phase("generation").parts["optimizer"]
    assert "optimizer" not in held.host


def test_log_prob_passes_are_counted_by_the_larger_of_their_budgets() -> None:
    kl = {"algorithm": {"kl_beta": 0.01}}
    names = ("micro_batch_tokens", "logprob_micro_batch_tokens", "reference_micro_batch_tokens")
    small = dict.fromkeys(names, 16384) | {"steps_per_generation": 2}  # with one there is no pass for old log-probs
    whole = estimated(made(batch=small, **kl)).phase("logprobs").parts
    for name in names[1:]:
        more = estimated(made(batch=small | {name: 65536}, **kl)).phase("logprobs").parts
        assert {key for key in more if more[key] > whole[key]} >= {"activations"}, name


def test_in_log_prob_passes_an_optimizer_that_waits_on_the_host_takes_nothing() -> None:
    stays = {"offload_parts": ["weights", "gradients"]}
    held, away = (estimated(made(memory=stays | {"offload_optimizer": off})) for off in (False, True))
    assert held.phase("logprobs").parts["optimizer"] > 0 and "optimizer" not in away.phase("logprobs").parts


def test_the_host_keeps_the_reference_and_the_policy_while_they_change_places() -> None:
    plain, kl = estimated(made()), estimated(made(algorithm={"kl_beta": 0.01}))
    assert "reference_and_policy" not in plain.host
    assert kl.host["reference_and_policy"] == 2 * 8 * kl.phase("update").parts["weights"]


def test_an_entropy_bonus_takes_a_block_of_probabilities() -> None:
    for item in (2, 4):
        plain, bonus = (head.Head(9000, 4096, 32000, item, with_bonus) for with_bonus in (False, True))
        block = bonus.backward_blocks - plain.backward_blocks
        assert 2 * block == plain.forward_blocks == bonus.forward_blocks > 0


def test_the_stage_that_needs_most_may_be_one_between() -> None:
    """With few layers at both ends, which have the embeddings and the head, the second holds most."""
    ends = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2}
    config = made(parallel={"pipeline_model_parallel_size": 4} | ends)
    found = estimated(config)
    assert found.stage == 1
    assert found.phase("update").parts["weights"] == parameters.state(arch_of(config), config, 1).weights


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize(("distributed", "sharers"), [(False, 1), (True, 16)])
def test_gradients_in_16_bits_have_copies_while_the_optimizer_steps(
    distributed: bool, sharers: int, offloaded: bool
) -> None:
    """Four bytes for each parameter that a rank's optimizer moves, in that phase and in no other."""
    config = made(
        optimizer={"grad_reduce_in_fp32": False, "distributed": distributed}, memory={"offload_optimizer": offloaded}
    )
    found, count = estimated(config), parameters.parameters(arch_of(config))
    (step,) = [phase for phase in found.phases if "gradient_copies" in phase.parts]
    assert step.name == "optimizer_step" and step.parts["gradients"] == 2 * count
    assert step.parts["gradient_copies"] == 4 * -(-count // sharers)
    plain = estimated(made(optimizer={"distributed": distributed}))
    assert all("gradient_copies" not in phase.parts and phase.name != "optimizer_step" for phase in plain.phases)


def test_a_layout_that_only_gradients_in_fp32_let_fit_is_suggested() -> None:
    """One GPU has all of the optimizer: 16 bits save two bytes a parameter, and take four while it steps."""
    config = made(
        cluster={"nodes": 1, "gpus_per_node": 1},
        model={"path": "Qwen2.5-3B"},
        rollout={"tensor_parallel_size": 1, "max_prompt_length": 256, "max_response_length": 256},
        batch={"micro_batch_tokens": 1024, "global_batch_size": 8},
        memory={"recompute_granularity": "full", "offload_optimizer": True},
    )
    wide, narrow = (
        estimated(replace_section(config, "optimizer", grad_reduce_in_fp32=value)) for value in (True, False)
    )
    assert narrow.phase("update").total < wide.phase("update").total < wide.peak.total < narrow.peak.total
    room = (wide.peak.total + narrow.peak.total) // 2
    device = replace(devices.find("H100"), memory=room)
    found = [one for one, _ in savings.fitting(arch_of(config), device, config, frozenset())]
    assert found and all(one.optimizer.grad_reduce_in_fp32 for one in found)


@pytest.mark.parametrize("parallel", [{}, {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 8}])
def test_weights_in_fp8_are_there_during_passes(parallel: dict[str, int]) -> None:
    """One byte for each that a layer multiplies by, and one for its transpose where there is a backward pass."""
    model = {"path": "Qwen3-30B-A3B" if "expert_model_parallel_size" in parallel else "Qwen2.5-7B"}
    plain, config = (made(model=model | fp8, parallel=parallel) for fp8 in ({}, {"fp8": "hybrid"}))
    found, before, arch = estimated(config), estimated(plain), arch_of(config)
    tp, ep = (parallel.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "expert"))
    heads = (arch.num_attention_heads * 2 + 2 * arch.num_key_value_heads) * arch.head_dim
    products = heads * arch.hidden_size // tp
    if arch.experts is None:
        products += 3 * arch.hidden_size * arch.ffn_hidden_size // tp
    else:
        products += 3 * arch.hidden_size * arch.experts.ffn_hidden_size * arch.experts.count // ep
    passes = {"update": 2, "head_backward": 2, "logprobs": 1, "probe": 1}
    for name, copies in passes.items():
        assert found.phase(name).parts["fp8_weights"] == pytest.approx(copies * products * arch.num_layers, rel=0.01)
    added = {phase.name for phase, one in zip(found.phases, before.phases, strict=True) if phase.parts != one.parts}
    assert added == set(passes)


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_keeps_the_keys_of_all_that_a_rank_s_queries_see(cp: int) -> None:
    """Queries and their result are its own; of the keys and values it gathers all, and keeps half a piece twice."""
    config = made(parallel={"context_parallel_size": cp})
    arch = arch_of(config)
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    found = activations.layer(arch, config, 0).attention - 4 * arch.head_dim  # sines and cosines
    assert found == pytest.approx(2 * queries + 2 * keys * (cp + 0.5))


@pytest.mark.parametrize("group", [1, 7, 14, 28])
def test_of_layers_that_are_computed_again_the_inputs_of_groups_are_kept(group: int) -> None:
    config = made(memory={"recompute_granularity": "full", "recompute_num_layers": group})
    arch = arch_of(config)
    kept = activations.kept(arch, config, list(range(LAYERS)))
    assert kept.held == LAYERS / group * arch.hidden_size
    assert kept.again == pytest.approx(group * activations.layer(arch, config, 0).total)


def test_fragmentation_is_that_of_dense_models_and_holds_for_mixtures(project: Path) -> None:
    """The share is the middle of two dense rows. Mixtures, which have no part in it, are then within the headroom."""
    text = (project / "docs" / "estimates.md").read_text("utf-8")
    rows = text.split("| published GiB |")[1].split("\n\n")[0].splitlines()[2:]
    shares = [[int(found) / 100 for found in re.findall(r"([+-]\d+)%", row)] for row in rows]
    dense, mixtures = (
        [above for row, above in zip(rows, shares, strict=True) if word in row]
        for word in ("calibration", "prediction")
    )
    assert len(dense) == 2 and len(mixtures) == 3 and all("A3B" in row for row in rows if "prediction" in row)
    assert phases.FRAGMENTATION == pytest.approx(statistics.median(tensors for tensors, _ in dense), abs=0.01)
    assert all(-phases.HEADROOM <= one <= phases.HEADROOM for _, one in mixtures), mixtures


def test_passes_with_smaller_budgets_keep_them() -> None:
    budgets = {"logprob_micro_batch_tokens": 8192, "reference_micro_batch_tokens": 65536}
    config = made(batch={"micro_batch_tokens": 32768} | budgets)
    smaller = savings._with_budget(config, 9216)
    assert smaller.micro_batch_tokens == smaller.reference_micro_batch_tokens == 9216
    assert smaller.logprob_micro_batch_tokens == 8192


@pytest.mark.parametrize("stages", [1, 2])
def test_the_head_that_two_stages_share_is_copied_by_the_first_alone(stages: int) -> None:
    """Qwen3-0.6B has one matrix for embedding and head: its last stage holds a copy, which a save leaves out."""
    parallel = {"pipeline_model_parallel_size": stages}
    config = made(model={"path": "Qwen3-0.6B"}, parallel=parallel, optimizer={"distributed": False})
    tied = arch_of(config)
    assert tied.tie_word_embeddings
    apart = replace(tied, tie_word_embeddings=False)
    shared = (2 + 12) * tied.vocab_size * tied.hidden_size  # weights of 16 bits, and what Adam keeps of them
    copied = [parameters.copied_by_node(arch, config, stages - 1) for arch in (apart, tied)]
    assert copied[0] - copied[1] == shared


@pytest.mark.parametrize(("gain", "named"), [(0.02, "memory.recompute_granularity=full"), (0.005, "offload")])
def test_what_hardly_leaves_more_is_not_named_as_what_to_lower(
    monkeypatch: pytest.MonkeyPatch, gain: float, named: str
) -> None:
    config, device = made(model={"path": "Qwen3-0.6B"}, batch={"micro_batch_tokens": 8192}), devices.find("H100")
    arch, found = arch_of(config), estimated(config)

    def estimate(_: Architecture, changed: Config, __: devices.Device) -> SimpleNamespace:
        more = gain if changed.memory.recompute_granularity else 0.1 if changed.memory.offload_optimizer else 0.0
        return SimpleNamespace(headroom=found.headroom + more)

    assert found.headroom >= 0 and make_plan(config).valid
    monkeypatch.setattr(savings.memory, "estimate", estimate)
    more = savings.roomier(arch, device, config, found, Models())
    assert more is not None and named in more[0]


def test_what_still_exceeds_the_gpu_is_not_named_as_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves more than before, and the run would run out of memory again."""
    config = made(model={"path": "Qwen3-0.6B"}, batch={"micro_batch_tokens": 8192})

    def estimate(_: Architecture, changed: Config, __: devices.Device) -> SimpleNamespace:
        lighter = 0.2 * (changed.memory.recompute_granularity is not None) + 0.4 * changed.memory.offload_optimizer
        return SimpleNamespace(headroom=-0.3 + lighter)

    monkeypatch.setattr(savings.memory, "estimate", estimate)
    before: Any = SimpleNamespace(headroom=-0.3)
    more = savings.roomier(arch_of(config), devices.find("H100"), config, before, Models())
    assert more == ("memory.offload_optimizer=true", pytest.approx(0.1))


@pytest.mark.parametrize(
    ("model", "ep", "etp", "piece", "shard"),
    [
        ("Qwen3-30B-A3B", 8, 1, 72, 0),
        ("Qwen3-235B-A22B", 8, 1, 288, 0),  # an expert has 36 MiB: those of 8 ranks are gathered at once
        ("Qwen3-235B-A22B", 32, 1, 11 * 36, 36),
        ("Qwen3-235B-A22B", 64, 1, 13 * 36, 36),
        ("Qwen3-235B-A22B", 64, 2, 13 * 36, 18),
        ("Mixtral-8x7B", 8, 1, 336, 336),  # one expert at a time
    ],
)
def test_experts_of_all_ranks_are_gathered_in_pieces(model: str, ep: int, etp: int, piece: int, shard: int) -> None:
    """Beside the memory into which they come a rank keeps its own, and an engine copies them where ranks cut them."""
    parallel = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    config = made(cluster={"nodes": 16}, model={"path": model}, parallel=parallel)
    arch, mib = arch_of(config), 1 << 20
    assert arch.experts is not None
    embedding = 2 * arch.vocab_size * arch.hidden_size
    assert memory._buckets(arch, config) == max(embedding, 2 * TRANSFER_BUCKET_BYTES["cuda"]) + shard * mib
    layer = 3 * arch.experts.count * arch.experts.ffn_hidden_size * arch.hidden_size  # of which a worker has half
    least = memory._largest_parameter(arch) * 3
    assert memory._loading(arch, config) == max(least, layer + max(piece * mib, GATHER_BUCKET_BYTES["cuda"]))


@pytest.mark.parametrize(("ep", "piece"), [(8, 288), (32, 11 * 36), (64, 13 * 36)])
def test_pieces_of_experts_are_gathered_while_the_last_ones_are_loaded(
    ep: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer of the two counts, with a message for each piece: no two of them fit into half of the memory."""
    parallel = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    config = made(cluster={"nodes": 16}, model={"path": "Qwen3-235B-A22B"}, parallel=parallel)
    model, device = time.sizes_of(config), devices.find("H100")
    gathering, seconds = passes._gathering(model, passes.grid(config), device), passes.sync(model, config, device)
    monkeypatch.setattr(passes, "_gathering", lambda *_: 0.0)
    loading = passes.sync(model, config, device)
    assert 0.0 < gathering < loading == seconds
    monkeypatch.setattr(rates, "BUCKET_SECONDS", 0.0)
    experts, half, mib = 2 * model.expert_parameters, TRANSFER_BUCKET_BYTES["cuda"], 1 << 20
    messages = experts / (piece * mib) + (2 * model.parameters - experts) / half
    assert loading - passes.sync(model, config, device) == pytest.approx(2e-3 * messages)


def test_a_parameter_of_an_expert_that_fills_the_memory_is_loaded_before_the_next_is_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches an estimate that lets them overlap: three matrices of 336 MiB, of which two are gathered together."""
    config = made(cluster={"nodes": 16}, model={"path": "Mixtral-8x7B"}, parallel={"expert_model_parallel_size": 8})
    device, usual = devices.find("H100"), time.sizes_of(config)
    model = usual._replace(expert_parameters=3 * usual.expert_parameters, parameters=3 * usual.parameters)
    gathering, seconds = passes._gathering(model, passes.grid(config), device), passes.sync(model, config, device)
    monkeypatch.setattr(passes, "_gathering", lambda *_: 0.0)
    loading = passes.sync(model, config, device)
    both = min(gathering, loading) * model.expert_parameters / model.parameters
    assert seconds == pytest.approx(max(gathering, loading) + both) and both > 0


@pytest.mark.parametrize(
    ("stage", "chunks", "completions", "held"),
    [(0, 1, 256, 4), (2, 1, 256, 2), (3, 1, 256, 1), (0, 2, 256, 5.5), (3, 2, 256, 2.5), (0, 1, 8, 2)],
)
def test_a_stage_holds_what_the_warm_up_lets_in(stage: int, chunks: int, completions: int, held: float) -> None:
    """With four stages, every stage behind adds a micro-batch to those in flight, up to as many as a DP group has."""
    config = made(
        parallel={"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": chunks},
        batch={"global_batch_size": completions, "micro_batch_tokens": None, "micro_batch_size": 1},
    )
    assert moments.in_flight(config, stage) == held


def test_at_the_embedding_a_micro_batch_is_gone_and_its_gradient_there_three_times() -> None:
    config = made(batch={"micro_batch_tokens": 8192}, parallel={"pipeline_model_parallel_size": 2})
    arch = replace(arch_of(config), vocab_size=4_000_000)  # so that the embedding is the worst moment
    size, hidden = 2 * 8192, arch.hidden_size
    layers = parameters.layers_of(arch, config, 0)
    others = (activations.kept(arch, config, layers).held + hidden) * size  # of the micro-batch behind this one
    found = moments.of_update(arch, config, 0, parameters.state(arch, config, 0))["update"]
    assert found["activations"] == int(others + 3 * hidden * size)
    assert found["embedding_gradient"] == 4_000_000 * hidden * 2


@pytest.mark.parametrize(("tokens", "products"), [(100, (50 + 100) * 10 * 4), (20, (50 + 50) * 10 * 4)])
def test_a_block_of_the_head_in_16_bit_has_both_products_in_fp32(tokens: int, products: int) -> None:
    """Rows of the head, and of hidden states or of the head again, whichever are more."""
    assert Head(tokens, 10, 50, 2).backward_blocks == tokens * 50 * (4 + 2) + products
    assert Head(tokens, 10, 50, 4).backward_blocks == tokens * 50 * 4


@pytest.mark.parametrize(
    ("sections", "mb"),
    [
        ({"layers": "auto"}, 243.79392),
        ({"layers": "torch"}, 0.0),
        ({"layers": "auto", "dtype": "float32"}, 0.0),  # for which torch's layers are taken
        ({"layers": "transformer_engine", "dtype": "float32"}, 2 * 243.79392),
    ],
)
def test_tensors_in_place_of_gradients_are_there_in_an_update_alone(sections: dict[str, Any], mb: float) -> None:
    """One of every shape: of queries, keys and values, what follows them, and both products of an MLP."""
    parallel = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    config = made(cluster={"nodes": 8}, model={"path": "Qwen2.5-32B", **sections}, parallel=parallel)
    found = memory.estimate(arch_of(config), config, devices.find("H200"))
    seen = {phase.name: phase.parts["unused_gradients"] for phase in found.phases if "unused_gradients" in phase.parts}
    assert seen == ({"update": round(mb * 1e6)} if mb else {})
