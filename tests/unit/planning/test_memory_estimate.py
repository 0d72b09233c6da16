"""Memory by phase: what must be in it, what must make it less, and what the plan says of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.cli.pages import estimates, render
from gspo_hpc.config import loader
from gspo_hpc.config.constants import NCCL_BYTES
from gspo_hpc.config.engine_arguments import ENGINE_DEFAULTS
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.config.schema import Config, as_dict, replace
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import activations, devices, memory, moments, parameters
from gspo_hpc.planning.estimates.memory import Estimate
from gspo_hpc.planning.estimates.phases import Phase
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.planning.rules.memory import MemoryRule

CONFIGS = Path(__file__).parents[3] / "configs"
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
    arch = architecture.find(config)
    assert arch is not None and config.cluster.gpu is not None
    return memory.estimate(arch, config, devices.find(config.cluster.gpu))


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
    arch, found = architecture.find(config), estimated(config)
    assert arch is not None
    state = parameters.state(arch, config, found.stage)
    update = phase(found, "update")
    assert [update.parts[name] for name in ("weights", "gradients", "optimizer")] == [
        state.weights,
        state.gradients,
        state.optimizer,
    ]
    held = activations.kept(arch, config, parameters.layers_of(arch, config, 0)).held
    assert moments.in_flight(config, 0) == 4 and moments.in_flight(config, 3) == 1
    assert phase(found, "update").parts["activations"] >= held * 2 * 16384 * (4 if found.stage == 0 else 1)


def test_interleaving_holds_more_micro_batches() -> None:
    """L / p layers a stage and p micro-batches in flight make L; interleaved, (1 + (p - 1) / (p v)) L."""
    parallel = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 7}
    assert moments.in_flight(made(parallel=parallel), 0) == pytest.approx(4 * (1 + 3 / (4 * 7)))


def test_what_does_not_fit_is_refused_and_fixed() -> None:
    config = load(CONFIGS / "qwen3_30b_a3b_ep8.yaml", ["cluster.gpu=H100"])
    plan = make_plan(config)
    (broken,) = plan.broken
    assert broken.rule == "trainer_fits_gpu_memory" and "GiB of the 79.2 GiB of H100-80GB" in broken.message
    assert "out of memory" in broken.message and "memory.offload_optimizer=true" in broken.message
    offered = search.find(config)
    assert [*map(str, offered[:2])] == ["batch.micro_batch_tokens=10240", "memory.offload_optimizer=true"]
    for fix in offered:
        changed = load(CONFIGS / "qwen3_30b_a3b_ep8.yaml", ["cluster.gpu=H100", *str(fix).split()])
        assert make_plan(changed).valid, str(fix)


def test_little_room_is_a_warning_and_a_small_cache_a_refusal() -> None:
    tight = made(cluster={"gpu": "A100-40GB"}, parallel={"tensor_model_parallel_size": 2})
    plan = make_plan(replace(tight, memory=replace(tight.memory, recompute_granularity="full")))
    assert plan.valid and any("so the run may run out of memory" in text for text in plan.warnings), plan.warnings
    engine = {"gpu_memory_utilization": 0.122}
    (broken,) = make_plan(made(rollout={"engine": engine}, memory={"recompute_granularity": "full"})).broken
    assert "the KV cache of an engine holds" in broken.message and "the longest sequence has 8,192" in broken.message


def test_generation_beside_a_trainer_that_stays() -> None:
    stays = {"offload_trainer": False, "recompute_granularity": "full"}
    sync, generation = make_plan(made(memory=stays)).broken  # engines have their cache by the first sync
    assert sync.message.startswith("sync takes") and generation.message.startswith("generation takes")
    assert all("memory.offload_trainer=true" in one.message for one in (sync, generation))


WEIGHTS = 7_615_616_512 * 2  # of Qwen2.5-7B in bfloat16


def test_what_sleeping_engines_keep_in_host_memory() -> None:
    """Eight GPUs are four engines of two: four copies of the weights at level 1, none at level 2."""
    first, second = estimated(made(rollout={"sleep_level": 1})), estimated(made())
    assert first.host["engine_weights_asleep"] == 4 * WEIGHTS and second.host["engine_weights_asleep"] == 0
    assert {**first.host, "engine_weights_asleep": 0} == second.host and first.phases == second.phases
    assert first.host_otherwise == sum(second.host.values()) == sum(first.host.values()) - 4 * WEIGHTS
    assert second.host_otherwise == sum(first.host.values())
    told = second.to_json()
    assert (
        told["sleep_level"] == 2
        and told["host_bytes_at_other_sleep_level"] == told["host_bytes"]["total"] + 4 * WEIGHTS
    )
    one = estimated(made(rollout={"engines_per_node": 1, "sleep_level": 1}))
    assert one.host["engine_weights_asleep"] == WEIGHTS
    apart = estimated(made(rollout={"mode": "server", "engines_per_node": 2}))
    assert "engine_weights_asleep" not in apart.host and apart.host_otherwise == sum(apart.host.values())


def test_parts_of_the_trainer_that_stay() -> None:
    """State that is not offloaded is on the GPU in every phase, and only what is offloaded is in the node's memory."""
    parts = ("weights", "gradients", "optimizer")
    everything = estimated(made())
    assert made().memory.offload_parts == parts
    held = {name: phase(everything, "update").parts[name] for name in parts}
    for stays in parts:
        found = estimated(made(memory={"offload_parts": [name for name in parts if name != stays]}))
        for name in ("generation", "logprobs"):
            kept = {part for part in parts if part in phase(found, name).parts}
            assert kept == ({stays} if name == "generation" else {stays, "weights"})
            assert phase(found, name).parts[stays] == held[stays]
        less = held[stays] * 8 if stays != "gradients" else 0  # of eight ranks; gradients are dropped, not kept
        assert everything.host["trainer_offloaded"] - found.host["trainer_offloaded"] == less


def test_the_page_tells_what_the_other_sleep_level_takes() -> None:
    for level, kept in ((1, 4 * WEIGHTS), (2, 0)):
        config = made(rollout={"sleep_level": level})
        found = estimated(config)
        page = " ".join(" ".join(render.lines(estimates.memory(found, config))).split())
        kept_text = f"sleeping engines keep 1.5 GiB per GPU, {kept / 2**30:.0f} GiB of a node's memory"
        other = f"with rollout.sleep_level={3 - level} a node needs {found.host_otherwise / 2**30:.0f} GiB in all"
        assert f"sleep level {level}: {kept_text}; {other}" in page
    apart = made(rollout={"mode": "server", "engines_per_node": 2})
    assert not any("sleep level" in text for text in render.lines(estimates.memory(estimated(apart), apart)))


@pytest.mark.parametrize(
    ("mem", "room"),
    [
        ("64G", 64 << 30),
        ("64g", 64 << 30),
        ("1024", 1 << 30),
        ("1T", 1 << 40),
        ("64GB", 64 << 30),
        ("0", None),
        (None, None),
    ],
)
def test_memory_of_a_node_is_read_as_slurm_reads_it(mem: str | None, room: int | None) -> None:
    assert memory.node_memory(made(slurm={"mem": mem})) == room


def test_host_memory_that_does_not_do_is_refused_and_fixed() -> None:
    fits: dict[str, Any] = {"memory": {"recompute_granularity": "full"}, "rollout": {"sleep_level": 1}}
    total = sum(estimated(made(**fits)).host.values())
    less = made(**fits, slurm={"mem": f"{(total - 40 * 2**30) >> 20}"})  # 36 GiB beside that are what processes take
    (broken,) = make_plan(less).broken
    assert (
        broken.rule == "node_memory_suffices"
        and f"a node takes {total / 2**30:.1f} GiB of its own memory" in broken.message
    )
    assert "rollout.sleep_level=2 or checkpoint.async_save=false or a larger slurm.mem" in broken.message
    assert str(search.find(less)[0]) == "rollout.sleep_level=2"
    assert make_plan(replace(less, rollout=replace(less.rollout, sleep_level=2))).valid
    tight = make_plan(made(**fits, slurm={"mem": f"{(total - 20 * 2**30) >> 20}"}))
    assert tight.valid and any("rollout.sleep_level=2" in text for text in tight.warnings)
    assert not any("of its own memory" in text for text in make_plan(made(**fits, slurm={"mem": "0"})).warnings)


def test_an_unknown_gpu_is_named() -> None:
    (broken,) = make_plan(made(cluster={"gpu": "H1000"})).broken
    assert broken.rule == "gpu_is_known" and "cluster.gpu H1000 is not known; nearest: H100" in broken.message


def test_a_bar_is_as_long_as_its_share() -> None:
    found = estimated(made(memory={"recompute_granularity": "full"}))
    for name, bar, _ in estimates.bars(found, 100):
        filled = len(bar.rstrip(" .!"))
        assert abs(filled - 100 * phase(found, name).reserved / found.card) <= 1, (name, bar)


def test_gpus_set_apart_do_not_train() -> None:
    """GPUs that train hold what they would hold if they were alone, without an engine that sleeps."""
    server = {"mode": "server", "engines_per_node": 3}
    apart, alone = made(rollout=server), made(cluster={"gpus_per_node": 2})
    assert apart.world_size == alone.world_size == 4 and apart.training_gpus_per_node == 2
    found, other = estimated(apart), estimated(alone)
    for name in ("update", "save"):
        expected = {part: size for part, size in phase(other, name).parts.items() if part != "engine_asleep"}
        expected["cuda_and_nccl"] += NCCL_BYTES  # of the group in which a training rank sends weights
        assert phase(found, name).parts == expected, name
    assert found.host["checkpoint_copy"] == other.host["checkpoint_copy"] and "engine_weights_asleep" not in found.host
    generation = phase(found, "generation").parts
    engine = {"engine_weights", "engine_working", "engine_asleep", "kv_cache"}
    assert generation.keys() == engine | {"buckets", "cuda_and_nccl"}
    own = sum(size for name, size in generation.items() if name in engine)
    assert own == pytest.approx(found.card * ENGINE_DEFAULTS[SHARE])
    assert generation["cuda_and_nccl"] > 2**30, "the rank that receives weights has a context beside vLLM's worker"
    assert found.host["weights_kept_for_engines"] == 6 * generation["engine_weights"], (
        "a copy of three engines of two GPUs"
    )
    assert "trainer_offloaded" not in found.host and made(rollout=server | {"engines_per_node": 4}).world_size == 0


SHARE = "gpu_memory_utilization"


def test_the_defaults_of_engines_are_those_of_the_engine() -> None:
    """As they stand in vLLM's source, which is not imported here."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(package.origin).parent / "config" / "cache.py").read_text(encoding="utf-8")
    (default,) = re.findall(rf"{SHARE}: float = Field\(default=([\d.]+)", source)
    assert ENGINE_DEFAULTS[SHARE] == float(default)


@pytest.mark.parametrize("name", sorted(ENGINE_DEFAULTS))
def test_a_setting_of_the_engine_that_is_null_is_the_default(name: str) -> None:
    lighter = {"recompute_granularity": "full"}
    assert estimated(made(rollout={"engine": {name: None}})) == estimated(made())
    for absurd in (0, -3, 1.5, "much", True, [], {}):
        config = made(rollout={"engine": {name: absurd}}, memory=lighter)
        (broken,) = make_plan(config).broken
        assert broken.rule == "engine_argument_value" and f"rollout.engine.{name} ({absurd}) must be" in broken.message
        assert estimated(config).card, "an estimate can be asked for all the same"


def advised(message: str) -> list[list[str]]:
    """The ways that a message ends in, each as settings."""
    ways = [way.split() for way in message.rsplit(": ", 1)[1].removeprefix("out of memory; ").split(" or ")]
    return [way for way in ways if all(re.fullmatch(r"[\w.]+=[\w.]+", word) for word in way)]


@given(
    st.sampled_from([("Qwen2.5-72B", 8), ("Qwen3-235B-A22B", 4), ("Qwen2.5-7B", 4)]),
    st.sampled_from(["A100-40GB", "A100-80GB", "H200", "B200"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 0.05, 0.3, 0.5, 0.99]),
    st.sampled_from([(True, "colocate", None), (False, "colocate", None), (None, "server", 1), (None, "server", 2)]),
    st.sampled_from([1000, 31000]),
)
@settings(max_examples=150, deadline=None)
def test_what_engines_are_advised_is_possible_and_does_it(
    model: tuple[str, int],
    gpu: str,
    size: int,
    share: float | None,
    mode: tuple[bool | None, str, int | None],
    response: int,
) -> None:
    name, heads = model
    config = made(
        cluster={"gpu": gpu, "nodes": 16},
        model={"path": name},
        parallel={"tensor_model_parallel_size": 4, "sequence_parallel": True},
        batch={"micro_batch_tokens": 65536, "global_batch_size": 1024},
        memory={"recompute_granularity": "full", "offload_trainer": mode[0]},
        rollout={
            "tensor_parallel_size": size,
            "max_response_length": response,
            "engine": {SHARE: share},
            "mode": mode[1],
            "engines_per_node": mode[2],
        },
    )
    before = make_plan(config)
    if not before.broken or not {item.rule for item in before.broken} <= set(MemoryRule):
        return

    def of_engines(plan: Plan) -> list[str]:
        texts = [item.message for item in plan.broken]
        return [text for text in texts if text.startswith(("the KV cache", "generation takes"))]

    for message in of_engines(before):
        ways = advised(message)
        if not ways:
            assert message.endswith("take GPUs with more memory"), message
            most = [n for n in (1, 2, 4, 8) if heads % n == 0 and (mode[2] is None or mode[2] * size % n == 0)][-1]
            fewer = [f"rollout.engines_per_node={mode[2] * size // most}"] if mode[2] else []
            larger = overridden(config, [f"rollout.tensor_parallel_size={most}", *fewer])
            weights = phase(estimated(larger), "generation").parts["engine_weights"]
            assert weights > 0.6 * devices.find(gpu).memory or mode[0] is False, message
        for way in ways:
            assert not {f"{SHARE}={share}", "memory.offload_trainer=true" if mode[0] else ""} & set(way)
            after = make_plan(overridden(config, way))
            assert not of_engines(after) and {item.rule for item in after.broken} <= set(MemoryRule), (message, way)


def overridden(config: Config, way: list[str]) -> Config:
    raw: dict[str, Any] = as_dict(config)
    for text in way:
        key, _, value = text.partition("=")
        *sections, last = key.split(".")
        inner = raw
        for section in sections:
            inner = inner[section]
        inner[last] = yaml.safe_load(value)
    return loader.from_dict(raw)


def test_advice_names_the_number() -> None:
    """An engine of more GPUs where the weights alone are too much for one; or more of the card."""
    big = made(
        cluster={"gpu": "A100-80GB", "nodes": 8},
        model={"path": "Qwen2.5-72B"},
        parallel={"tensor_model_parallel_size": 8, "sequence_parallel": True},
        memory={"recompute_granularity": "full"},
        rollout={"tensor_parallel_size": 1},
    )
    sync, generation = (item.message for item in make_plan(big).broken)
    assert generation.startswith("generation takes 140.") and "offload_trainer" not in generation
    assert advised(generation) == [[f"rollout.tensor_parallel_size={size}"] for size in (2, 4, 8)]
    assert sync.startswith("sync takes")
    wider = "rollout.tensor_parallel_size=4"  # and what makes room for fragmentation
    assert advised(sync) == [["batch.micro_batch_tokens=8192", wider], ["memory.offload_optimizer=true", wider]]
    config = load(CONFIGS / "qwen3_235b_a22b_tp4_pp2_ep32.yaml", [f"rollout.engine.{SHARE}=0.5"])
    (broken,) = make_plan(config).broken
    (share,), (size,) = sorted(advised(broken.message))
    assert share.startswith(f"rollout.engine.{SHARE}=0.8") and size == "rollout.tensor_parallel_size=8"
    assert all(make_plan(overridden(config, [way])).valid for way in (share, size))


def test_what_is_least_already_is_not_advised() -> None:
    config = made(
        cluster={"gpu": "H200-141GB", "nodes": 1, "gpus_per_node": 1},
        rollout={"tensor_parallel_size": 1},
        batch={"micro_batch_tokens": 8192, "global_batch_size": 256},
    )
    update = make_plan(config).broken[0].message
    assert "micro_batch" not in update and "parallel ranks" not in update and "optimizer.distributed" not in update
    assert update.endswith("memory.offload_optimizer=true or more GPUs that train, or GPUs with more memory"), update
    layers = replace(config, memory=replace(config.memory, recompute_granularity="full"))
    roomy = replace(layers, batch=replace(layers.batch, micro_batch_tokens=40960))
    assert "batch.micro_batch_tokens=8192 or" in make_plan(roomy).broken[0].message


@pytest.mark.parametrize(("router", "wider"), [("float32", 2), ("float64", 4), (None, 1)])
def test_a_dispatcher_holds_tokens_as_often_as_they_have_experts(router: str | None, wider: int) -> None:
    """As they are sent, as they arrive, and results in two orders: where experts are sliced, each slice has all tokens.

    Slices sum their results in the dtype of the router's weights.
    """
    parallel = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "expert_model_parallel_size": 2}
    memory_of = {"recompute_granularity": "full"}
    found = {}
    for slices in (1, 4):
        more = parallel | {"expert_tensor_parallel_size": slices}
        config = made(model={"path": "Qwen3-30B-A3B"}, parallel=more, memory=memory_of, moe={"router_dtype": router})
        arch = architecture.find(config)
        assert arch is not None and arch.experts is not None
        sent = arch.experts.top_k / 4  # of each of a rank's own tokens
        arrived = sent * activations.IMBALANCE
        summed = 0.0 if slices == 1 else wider * (arrived * slices * (wider > 1) + arrived)
        held = (
            arch.hidden_size * (sent + arrived + 2 * arrived * slices + summed) * 2 * moments.micro_batch_tokens(config)
        )
        copies, routing = sent + arrived + 2 * arrived * slices + summed, activations._ROUTING * arch.experts.count / 8
        for saved, more_held in ((True, 0.0), (False, arrived * slices)):
            working = arch.hidden_size * (2 + copies + more_held) + routing
            assert activations.working(arch, config, saved=saved) == pytest.approx(working)
        kept = activations.kept(arch, config, parameters.layers_of(arch, config, 0))
        kept_bytes = (kept.held + kept.again) * 2 * moments.micro_batch_tokens(config)
        found[slices] = phase(estimated(config), "update").parts["activations"]
        assert found[slices] > kept_bytes + held
    assert found[4] > found[1]
