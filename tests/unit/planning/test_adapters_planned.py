"""Memory, time and words for a run that trains adapters, beside those of full training.

It takes a second. tests/gloo and tests/torch/ledger hold the bytes against what is allocated; this holds what follows
from them: what there is none of, what grows with the adapters, and what a plan says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning import trained
from gspo_hpc.planning.estimates import activations, adapters, devices, memory, parameters, passes, time
from gspo_hpc.planning.estimates.memory import Estimate
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.system.text import GIB
from tests.unit.planning.test_planned_only import WHOLE

BASE: dict[str, dict[str, Any]] = {
    "cluster": {"nodes": 2, "gpus_per_node": 8, "gpu": "H100"},
    "model": {"path": "Qwen2.5-7B"},
    "batch": {"micro_batch_tokens": 16384, "global_batch_size": 256, "num_generations": 8},
    "rollout": {"tensor_parallel_size": 2, "max_prompt_length": 1024, "max_response_length": 7168},
    "adapter": {"type": "lora", "rank": 32},
}
DEVICE = devices.find("H100")
DOCS, CONFIGS = (Path(__file__).parents[3] / name for name in ("docs", "configs"))


def made(**sections: dict[str, Any]) -> Config:
    return from_dict({**BASE, **{name: BASE.get(name, {}) | section for name, section in sections.items()}})


def arch_of(config: Config) -> Architecture:
    arch = architecture.find(config)
    assert arch is not None
    return arch


def estimated(config: Config) -> Estimate:
    return memory.estimate(arch_of(config), config, DEVICE)


FULL: dict[str, dict[str, Any]] = {"adapter": {"type": None}}


def test_gradients_and_optimizer_are_those_of_adapters_alone() -> None:
    """A rank r adds r (inputs + outputs) to a layer: for Qwen2.5-7B 2.52 million in all for each rank."""
    one, two = (made(adapter={"rank": rank}) for rank in (32, 64))
    count = adapters.of_model(arch_of(one), one)
    assert count == 32 * 28 * (9 * 3584 + 2 * 512 + 3 * 18944)  # hidden size, keys and values, MLP
    small, large = (parameters.state(arch_of(config), config, 0) for config in (one, two))
    assert (small.gradients, small.optimizer) == (4 * count, 12 * count)
    assert (large.gradients, large.optimizer) == (8 * count, 24 * count)
    assert large.weights - small.weights == 2 * count
    assert small.weights == 2 * (parameters.parameters(arch_of(one)) + count)


@pytest.mark.parametrize("sizes", [{}, {"tensor_model_parallel_size": 8}, {"pipeline_model_parallel_size": 4}])
def test_ranks_have_parts_of_adapters_or_the_whole_of_them(sizes: dict[str, int]) -> None:
    """Eight ranks share four key-value heads of Qwen2.5-7B: there B of queries, keys and values is whole."""
    config = made(parallel=sizes)
    arch, tp = arch_of(config), sizes.get("tensor_model_parallel_size", 1)
    held = [
        adapters.of_layers(arch, config, parameters.layers_of(arch, config, stage))
        for stage in range(sizes.get("pipeline_model_parallel_size", 1))
    ]
    assert sum(one.cut * tp + one.whole for one in held) == adapters.of_model(arch, config)
    whole = 32 * 28 * (3 * 3584 + 2 * 3584 + 2 * 3584 + (3584 + 2 * 512 if tp == 8 else 0))
    assert sum(one.whole for one in held) == whole


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"expert_model_parallel_size": 8},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4},
        {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1},
    ],
)
def test_each_expert_has_adapters_of_its_own(sizes: dict[str, int]) -> None:
    """Qwen3-30B-A3B: 48 layers with 128 experts of 768; those of a rank's experts are on it, and no others."""
    config = made(model={"path": "Qwen3-30B-A3B"}, adapter={"rank": 8}, parallel=sizes)
    arch, tp = arch_of(config), sizes.get("tensor_model_parallel_size", 1)
    ep, etp = sizes.get("expert_model_parallel_size", 1), sizes.get("expert_tensor_parallel_size", tp)
    every = 8 * 48 * 128 * 3 * (2048 + 768)
    assert adapters.experts_of_model(arch, config) == every
    assert adapters.of_model(arch, config) == every + 8 * 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    held = adapters.of_experts(arch, config, range(48))
    assert (held.cut * etp + held.whole) * ep == every
    assert held.whole * ep == 8 * 48 * 128 * 3 * 2048, "A of gate and up, B of down"
    alone = made(model={"path": "Qwen3-30B-A3B"}, adapter={"rank": 8, "targets": ["q_proj"]}, parallel=sizes)
    assert adapters.of_experts(arch, alone, range(48)).total == 0 == adapters.experts_of_model(arch, alone)
    count = parameters.trained_of_rank(arch, config, 0)
    assert (count.dense, count.experts) == (adapters.of_layers(arch, config, range(48)).total, held.total)


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (8, 1), (8, 2), (4, 4)])
def test_copies_of_a_are_those_of_the_experts_of_a_rank(ep: int, etp: int) -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts, 2048 wide, 4096 of heads, and 768 of an expert's MLP."""
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    config = made(model={"path": "Qwen3-30B-A3B"}, parallel=sizes)
    attention, expert = 3 * 2048 + 4096 // 2, 2 * 2048 + 768 // etp
    found = adapters.joined(arch_of(config), config, range(48))
    assert found == 32 * 48 * (attention + 128 // ep * expert)


def test_a_token_is_multiplied_with_the_adapters_of_its_experts() -> None:
    config = made(model={"path": "Qwen3-30B-A3B"})
    found = time.sizes(arch_of(config), config)
    assert found.active_adapters == found.adapters - found.expert_adapters * 15 / 16  # 8 of 128
    assert passes.update_factor(found) == pytest.approx(2.0, abs=0.2)


def test_a_balancing_loss_that_moves_no_router_is_told() -> None:
    with_loss = make_plan(made(model={"path": "Qwen3-30B-A3B"}, moe={"aux_loss_coeff": 0.01}))
    assert any("moe.aux_loss_coeff cannot move them" in note for note in with_loss.notes)
    assert not any("cannot move" in note for note in make_plan(made(model={"path": "Qwen3-30B-A3B"})).notes)


def test_what_adapters_take_less_of() -> None:
    """No gradients of head and embedding, no copies of all weights in a save, none of a reference."""
    kl = {"algorithm": {"kl_beta": 0.01}}
    full, own = estimated(made(**FULL, **kl)), estimated(made(**kl))
    assert "head_gradient" not in own.phase("head_backward").parts
    assert full.phase("head_backward").parts["head_gradient"] > 0
    assert "reference_and_policy" in full.host and "reference_and_policy" not in own.host
    assert own.host["checkpoint_copy"] < full.host["checkpoint_copy"] / 20
    assert own.phase("update").total < full.phase("update").total / 2
    merged = estimated(made(**kl, adapter={"engine": "merged"}))
    assert merged.phase("sync").parts["merged_weight"] == 2 * 18944 * 3584 * 12
    assert "merged_weight" not in merged.phase("probe").parts | full.phase("sync").parts | own.phase("sync").parts


@pytest.mark.parametrize("reference", [{"reference_interval": 4}, None])
def test_a_reference_with_adapters_of_its_own_is_a_copy_of_adapters(reference: dict[str, Any] | None) -> None:
    """One that moves, or that begins with those of a folder: twice the adapters' weights for each rank of a node."""
    algorithm, adapter = {"kl_beta": 0.01} | (reference or {}), {} if reference else {"path": "somewhere"}
    config = made(algorithm=algorithm, adapter=adapter)
    count = adapters.of_model(arch_of(config), config)
    assert estimated(config).host["reference_and_policy"] == 2 * 8 * 2 * count


def test_what_takes_less_time() -> None:
    """The backward pass by a half, the optimizer's step, a save and the reference's place; a sync takes no less."""
    full, own = made(**FULL), made()
    sizes = [time.sizes(arch_of(config), config) for config in (full, own)]
    assert [passes.update_factor(one) for one in sizes] == [3.0, pytest.approx(2.0, abs=0.1)]
    for function in (passes.optimizer, passes.save):
        before, after = (function(size, config, DEVICE) for size, config in zip(sizes, (full, own), strict=True))
        assert after < before / 20
    assert passes.reference(sizes[0], full, DEVICE) > 0 == passes.reference(sizes[1], own, DEVICE)
    before, after = (passes.sync(size, config, DEVICE) for size, config in zip(sizes, (full, own), strict=True))
    assert after < before, "state that goes to the host and back is less"
    stays = {"memory": {"offload_trainer": False}}
    by_merging = made(**stays, adapter={"engine": "merged"})
    whole, merged, beside = (
        passes.sync(time.sizes(arch_of(config), config), config, DEVICE)
        for config in (made(**FULL, **stays), by_merging, made(**stays))
    )
    assert merged >= whole, "all weights travel, and are merged before"
    assert beside < whole / 4, "only adapters travel"


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_places_for_adapters_in_an_engine(tp: int) -> None:
    """vLLM's own sizes, at the next of its ranks: layers that it fuses have places for all of their parts."""
    config = made(rollout={"tensor_parallel_size": tp}, adapter={"rank": 9, "targets": ["q_proj", "down_proj"]})
    heads, kv, hidden, ffn = 28 * 128 // tp, max(1, 4 // tp) * 128, 3584, 18944
    fused = 3 * 16 * hidden + 16 * (heads + 2 * kv)
    assert adapters.of_engine(arch_of(config), config) == 2 * 28 * (fused + 16 * (ffn // tp + hidden))
    bare = made(rollout={"tensor_parallel_size": tp}, adapter={"engine": "merged"})
    more = [estimated(one).phase("generation").parts["engine_weights"] for one in (config, bare)]
    assert more[0] - more[1] == adapters.of_engine(arch_of(config), config)
    assert adapters.of_engine(arch_of(bare), bare) == 0


def test_adapters_of_a_large_model_fit_where_all_of_it_does_not() -> None:
    node: dict[str, dict[str, Any]] = {
        "cluster": {"nodes": 1},
        "model": {"path": "Qwen2.5-72B"},
        "parallel": {"tensor_model_parallel_size": 8, "sequence_parallel": True},
        "rollout": {"tensor_parallel_size": 8},
        "memory": {"recompute_granularity": "full"},
    }
    assert [one.rule for one in make_plan(made(**FULL, **node)).broken] == ["trainer_fits_gpu_memory"]
    assert make_plan(made(**node)).valid


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({}, None),
        ({"type": "lora", "rank": 4}, "LoRA of rank 4 on all linear layers (0.13% of the parameters)"),
        (
            {"type": "lora", "targets": ["v_proj", "q_proj"]},
            "LoRA of rank 8 on q_proj, v_proj (0.05% of the parameters)",
        ),
    ],
)
def test_what_is_trained_in_words(adapter: dict[str, Any], words: str | None) -> None:
    assert trained.adapter(from_dict({**WHOLE, "model": {"path": "Qwen3-8B"}, "adapter": adapter})) == words


def test_no_share_of_a_model_that_is_not_known() -> None:
    config = from_dict({**WHOLE, "model": {"path": "nobody/knows"}, "adapter": {"type": "lora", "rank": 1}})
    assert trained.adapter(config) == "LoRA of rank 1 on all linear layers"


def test_the_table_of_memory_is_the_plan_s() -> None:
    rows = re.findall(r"(?m)^\| `([\w.]+_lora_\w+)` \| (.*) \|$", (DOCS / "lora.md").read_text("utf-8"))
    presets = sorted(path.stem for path in CONFIGS.glob("*_lora_*.yaml"))
    assert sorted(name for name, _ in rows) == presets and len(presets) == 3
    for name, told in rows:
        own, full = (loader.load(CONFIGS / f"{name}.yaml", more) for more in ([], ["adapter.type=null"]))
        arch = arch_of(own)
        found, other = (memory.estimate(arch, one, devices.find(str(one.cluster.gpu))) for one in (own, full))
        state, whole = (parameters.state(arch, one, 0) for one in (own, full))
        sizes = [state.weights, state.gradients + state.optimizer, busiest(found), found.phase("sync").total]
        sizes += [whole.gradients + whole.optimizer, busiest(other)]
        shown = [f"{adapters.of_model(arch, own) / 1e6:.0f} million", *(f"{size / GIB:.1f}" for size in sizes)]
        assert told.split(" | ") == shown


def busiest(found: Estimate) -> int:
    """Bytes of the card in an update, at its worst moment."""
    return max(phase.reserved for phase in found.phases if phase.name in ("update", "head_backward"))


@pytest.mark.parametrize(
    ("adapter", "sections", "words"),
    [
        ({}, {"model": {"dtype": "float32"}}, "engines get it merged into the weights."),
        ({"engine": "merged"}, {}, "merged into the weights, which rounds what they add to bfloat16 (docs/lora.md)."),
        (
            {},
            {},
            "154 MiB travel at a weight sync, beside 14.2 GiB of weights that engines drop while they sleep; with",
        ),
        ({}, {"rollout": {"sleep_level": 1}}, "154 MiB travel at a weight sync instead of 14.2 GiB."),
        ({}, {"memory": {"offload_trainer": False}}, "as vLLM's own: 154 MiB travel at a weight sync instead of"),
    ],
)
def test_a_plan_says_how_adapters_come_to_engines(
    adapter: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    (note,) = (text for text in make_plan(made(adapter=adapter, **sections)).notes if "is trained; engines" in text)
    assert note.startswith("LoRA of rank 32 on all linear layers (1.06% of the parameters) is trained")
    assert words in note
    assert not any("engines get it" in text for text in make_plan(made(**FULL)).notes)


def test_what_an_embedding_s_adapter_keeps_is_a_rank_s_own_tokens() -> None:
    """With sequence parallelism each of two ranks has half of them; without, all."""
    targets = {"type": "lora", "rank": 8, "targets": ["q_proj", "embed_tokens"]}
    for parallel, adapter, expected in (
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, targets, 4.0),
        ({"tensor_model_parallel_size": 2}, targets, 8.0),
        ({}, targets | {"targets": ["all-linear"]}, 0.0),
        ({}, {}, 0.0),
    ):
        config = from_dict({"cluster": {"gpus_per_node": 2}, "parallel": parallel, "adapter": adapter})
        assert activations.of_embedding(config) == expected
