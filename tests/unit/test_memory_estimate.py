"""Memory by phase: what must be in it, what must make it less, and what the plan says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc import activation_memory, devices, estimate_page, memory_estimate, mends, model_config, model_memory
from gspo_hpc.config import Config
from gspo_hpc.config_file import from_dict, load
from gspo_hpc.memory_estimate import Estimate, Phase
from gspo_hpc.plan import make_plan

CONFIGS = Path(__file__).parents[2] / "configs"
BASE: dict[str, dict[str, Any]] = {
    "cluster": {"nodes": 2, "gpus_per_node": 8, "gpu": "H100"},
    "model": {"path": "Qwen2.5-7B"},
    "batch": {"micro_batch_tokens": 16384, "global_batch_size": 256, "num_generations": 8},
    "rollout": {"tensor_parallel_size": 2, "max_prompt_length": 1024, "max_response_length": 7168},
    "optimizer": {"distributed": True},
}


def made(**sections: dict[str, Any]) -> Config:
    return from_dict({**BASE, **{name: BASE.get(name, {}) | section for name, section in sections.items()}})


def estimated(config: Config) -> Estimate:
    arch = model_config.find(config)
    assert arch is not None and config.cluster.gpu is not None
    return memory_estimate.estimate(arch, config, devices.find(config.cluster.gpu))


def phase(found: Estimate, name: str) -> Phase:
    return next(one for one in found.phases if one.name == name)


LAYOUTS = st.fixed_dictionaries(
    {
        "tensor_model_parallel_size": st.sampled_from([1, 2, 4]),
        "pipeline_model_parallel_size": st.sampled_from([1, 2, 4]),
        "context_parallel_size": st.sampled_from([1, 1, 2]),
        "sequence_parallel": st.booleans(),
    }
)


@given(LAYOUTS, st.sampled_from([8192, 16384, 65536]))
@settings(max_examples=60, deadline=None)
def test_what_is_meant_to_save_memory_does(layout: dict[str, Any], tokens: int) -> None:
    batch = BASE["batch"] | {"micro_batch_tokens": tokens}
    plain = made(parallel=layout, batch=batch)
    before = estimated(plain)
    for lighter in (
        replace(plain, memory=replace(plain.memory, recompute_granularity="full")),
        replace(plain, memory=replace(plain.memory, recompute_granularity="selective", recompute_modules=("mlp",))),
        replace(plain, memory=replace(plain.memory, offload_optimizer=True)),
        replace(plain, batch=replace(plain.batch, micro_batch_tokens=8192)),
    ):
        assert phase(estimated(lighter), "update").total <= phase(before, "update").total
    heavier = replace(plain, optimizer=replace(plain.optimizer, distributed=False))
    assert phase(estimated(heavier), "update").total >= phase(before, "update").total
    for one in before.phases:
        assert all(size >= 0 for size in one.parts.values()) and one.total == sum(one.parts.values())


def test_parts_are_those_of_the_model_and_of_the_layers() -> None:
    config = made(parallel={"pipeline_model_parallel_size": 4})
    arch, found = model_config.find(config), estimated(config)
    assert arch is not None
    state = model_memory.state(arch, config, found.stage)
    update = phase(found, "update")
    assert [update.parts[name] for name in ("weights", "gradients", "optimizer")] == [
        state.weights,
        state.gradients,
        state.optimizer,
    ]
    held = activation_memory.kept(arch, config, model_memory.layers_of(arch, config, 0)).held
    assert memory_estimate.in_flight(config, 0) == 4 and memory_estimate.in_flight(config, 3) == 1
    assert phase(found, "update").parts["activations"] >= held * 2 * 16384 * (4 if found.stage == 0 else 1)


def test_interleaving_holds_more_micro_batches() -> None:
    """L / p layers a stage and p micro-batches in flight make L; interleaved, (1 + (p - 1) / (p v)) L."""
    parallel = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 7}
    assert memory_estimate.in_flight(made(parallel=parallel), 0) == pytest.approx(4 * (1 + 3 / (4 * 7)))


def test_what_does_not_fit_is_refused_and_mended() -> None:
    config = load(CONFIGS / "qwen3_30b_a3b_ep8.yaml", ["cluster.gpu=H100"])
    plan = make_plan(config)
    (broken,) = plan.broken
    assert broken.rule == 16 and "GiB of the 79.2 GiB of H100-80GB" in broken.message
    assert "out of memory" in broken.message and "memory.offload_optimizer=true" in broken.message
    offered = mends.find(config)
    assert str(offered[0]) == "memory.offload_optimizer=true"
    for mend in offered:
        changed = load(CONFIGS / "qwen3_30b_a3b_ep8.yaml", ["cluster.gpu=H100", *str(mend).split()])
        assert make_plan(changed).valid, str(mend)


def test_little_room_is_a_warning_and_a_small_cache_a_refusal() -> None:
    tight = made(cluster={"gpu": "A100-40GB"}, parallel={"tensor_model_parallel_size": 2})
    plan = make_plan(replace(tight, memory=replace(tight.memory, recompute_granularity="full")))
    assert plan.valid and any("less than 20% are left for peaks" in text for text in plan.warnings), plan.warnings
    engine = {"gpu_memory_utilization": 0.122}
    (broken,) = make_plan(made(rollout={"engine": engine}, memory={"recompute_granularity": "full"})).broken
    assert "the KV cache of an engine holds" in broken.message and "the longest sequence has 8,192" in broken.message


def test_generation_beside_a_trainer_that_stays() -> None:
    stays = {"offload_trainer": False, "recompute_granularity": "full"}
    (broken,) = make_plan(made(memory=stays)).broken
    assert "generation takes" in broken.message and "memory.offload_trainer=true" in broken.message


WEIGHTS = 7_615_616_512 * 2  # of Qwen2.5-7B in bfloat16


def test_what_sleeping_engines_keep_in_host_memory() -> None:
    """Eight GPUs are four engines of two: four copies of the weights at level 1, none at level 2."""
    first, second = estimated(made()), estimated(made(rollout={"sleep_level": 2}))
    assert first.host["engine_weights_asleep"] == 4 * WEIGHTS and second.host["engine_weights_asleep"] == 0
    assert {**first.host, "engine_weights_asleep": 0} == second.host and first.phases == second.phases
    assert first.host_otherwise == sum(second.host.values()) == sum(first.host.values()) - 4 * WEIGHTS
    assert second.host_otherwise == sum(first.host.values())
    told = second.to_json()
    assert (
        told["sleep_level"] == 2
        and told["host_bytes_at_other_sleep_level"] == told["host_bytes"]["total"] + 4 * WEIGHTS
    )
    one = estimated(made(rollout={"engines_per_node": 1}))
    assert one.host["engine_weights_asleep"] == WEIGHTS
    apart = estimated(made(rollout={"mode": "server", "engines_per_node": 2}))
    assert "engine_weights_asleep" not in apart.host and apart.host_otherwise == sum(apart.host.values())


def test_the_page_tells_what_the_other_sleep_level_takes() -> None:
    for level, kept in ((1, 4 * WEIGHTS), (2, 0)):
        config = made(rollout={"sleep_level": level})
        found = estimated(config)
        (line,) = [text for text in estimate_page.memory_lines(found, config) if "sleep level" in text]
        assert (
            f"sleep level    {level}: asleep, engines keep 1.5 GiB of each GPU and {kept / 2**30:.1f} of a node" in line
        )
        assert line.endswith(f"with rollout.sleep_level={3 - level} a node takes {found.host_otherwise / 2**30:.0f}")
    apart = made(rollout={"mode": "server", "engines_per_node": 2})
    assert not any("sleep level" in text for text in estimate_page.memory_lines(estimated(apart), apart))


@pytest.mark.parametrize(
    ("mem", "room"),
    [
        ("64G", 64 << 30),
        ("64g", 64 << 30),
        ("1024", 1 << 30),
        ("1T", 1 << 40),
        ("0", None),
        ("half", None),
        (None, None),
    ],
)
def test_memory_of_a_node_is_read_as_slurm_reads_it(mem: str | None, room: int | None) -> None:
    assert memory_estimate.node_memory(made(slurm={"mem": mem})) == room


def test_host_memory_that_does_not_do_is_refused_and_mended() -> None:
    fits = {"memory": {"recompute_granularity": "full"}}
    total = sum(estimated(made(**fits)).host.values())
    less = made(**fits, slurm={"mem": f"{(total - 40 * 2**30) >> 20}"})  # 36 GiB beside that are what processes take
    (broken,) = make_plan(less).broken
    assert broken.rule == 16 and f"a node takes {total / 2**30:.1f} GiB of its own memory" in broken.message
    assert "rollout.sleep_level=2 or checkpoint.async_save=false or a larger slurm.mem" in broken.message
    assert str(mends.find(less)[0]) == "rollout.sleep_level=2"
    assert make_plan(replace(less, rollout=replace(less.rollout, sleep_level=2))).valid
    tight = make_plan(made(**fits, slurm={"mem": f"{(total - 20 * 2**30) >> 20}"}))
    assert tight.valid and any("rollout.sleep_level=2" in text for text in tight.warnings)
    assert not any("of its own memory" in text for text in make_plan(made(**fits, slurm={"mem": "0"})).warnings)


def test_an_unknown_gpu_is_named() -> None:
    (broken,) = make_plan(made(cluster={"gpu": "H1000"})).broken
    assert broken.rule == 16 and "cluster.gpu H1000 is not known; nearest: H100" in broken.message


def test_a_bar_is_as_long_as_its_share() -> None:
    found = estimated(made(memory={"recompute_granularity": "full"}))
    for name, bar, _ in memory_estimate.bars(found, width=100):
        filled = len(bar.rstrip(" .!"))
        assert abs(filled - 100 * phase(found, name).total / found.card) <= 1, (name, bar)
