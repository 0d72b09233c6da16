"""`suggest` finds layouts for clusters that people train on, and says what to change for those that hold no model.

Takes half a minute. It would catch a cliff of headroom, an order that is not that of its figure, and answers that the
plan refuses.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.cli import main
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.config.schema import Config
from gspo_hpc.planning import layouts
from gspo_hpc.planning.estimates import memory, phases
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.rules.memory import MemoryRule
from gspo_hpc.planning.settings import value_of, with_value
from gspo_hpc.planning.suggest import remedies, savings

CONFIGS = Path(__file__).parents[3] / "configs"


def made(model: str, nodes: int, gpus: int, gpu: str = "H100", response: int = 7168, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "cluster": {"nodes": nodes, "gpus_per_node": gpus, "gpu": gpu},
        "model": {"path": model},
        "batch": {
            "micro_batch_tokens": 2 * (1024 + response),
            "global_batch_size": 512,
            "num_generations": 16,
            "steps_per_generation": 4,
        },
        "rollout": {"max_prompt_length": 1024, "max_response_length": response},
    }
    return from_dict({**base, **{name: base.get(name, {}) | section for name, section in sections.items()}})


def with_all(config: Config, chosen: dict[str, Any]) -> Config:
    for key, value in chosen.items():
        config = with_value(config, key, value)
    return config


CLUSTERS = [  # that published recipes train these models on
    ("Qwen2.5-0.5B", 1, 1, "A100-80GB"),
    ("Qwen2.5-1.5B", 1, 1, "H100"),
    ("Qwen2.5-7B", 1, 2, "H100"),
    ("Qwen2.5-7B", 1, 8, "A100-80GB"),
    ("Qwen3-8B", 1, 4, "A100-80GB"),
    ("Qwen3-14B", 1, 4, "H100"),
    ("Qwen2.5-32B", 1, 8, "H100"),
    ("Qwen3-32B", 4, 8, "H100"),
    ("Llama-3.1-70B", 4, 8, "H100"),
    ("Qwen3-30B-A3B", 1, 8, "H100"),
    ("Qwen3-30B-A3B", 2, 8, "A800-80GB"),
    ("Qwen3-30B-A3B", 4, 8, "H100"),
    ("Qwen3-235B-A22B", 8, 8, "H200"),
    ("Qwen3-235B-A22B", 16, 8, "H200"),
    ("Qwen3-235B-A22B", 32, 8, "H200"),
]


@pytest.mark.parametrize(("model", "nodes", "gpus", "gpu"), CLUSTERS)
def test_there_is_a_layout_where_people_train(model: str, nodes: int, gpus: int, gpu: str) -> None:
    config = made(model, nodes, gpus, gpu)
    found = layouts.find(config)
    assert found
    for layout in found:
        plan = make_plan(with_all(config, layout.settings))
        assert plan.valid and plan.memory is not None, plan.broken
        assert plan.memory.headroom == pytest.approx(layout.headroom)
        assert plan.memory.busiest.total <= plan.memory.card  # some published layouts have no room for fragmentation
    if "A3B" in model or "A22B" in model:
        experts = [layout.settings["parallel.expert_model_parallel_size"] for layout in found]
        assert experts[0] > 1 and sum(size > 1 for size in experts) >= len(experts) - 1, experts


MODELS = ["Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen3-14B", "Qwen2.5-32B", "Qwen3-30B-A3B", "Mixtral-8x7B", "Llama-3.1-70B"]


@given(
    st.sampled_from(MODELS),
    st.sampled_from([(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8)]),
    st.sampled_from(["A100-40GB", "A100-80GB", "H100", "H200"]),
    st.sampled_from([1024, 7168, 31744]),
    st.sampled_from([{}, {"slurm": {"mem": "900G"}}, {"memory": {"offload_trainer": False}}]),
)
@settings(max_examples=25, deadline=None)
def test_every_answer_is_a_plan_in_the_order_that_is_told(
    model: str, machine: tuple[int, int], gpu: str, response: int, more: dict[str, Any]
) -> None:
    config = made(model, *machine, gpu, response, **more)
    found = layouts.find(config, limit=8)
    for place, layout in enumerate(found):
        plan = make_plan(with_all(config, layout.settings))
        assert plan.valid and plan.memory is not None, (str(layout), plan.broken)
        assert plan.memory.headroom == pytest.approx(layout.headroom)
        assert layout.risk == phases.risk(layout.headroom)
        faster = [other for other in found[place + 1 :] if other.seconds < layout.seconds]
        assert bool(faster) == layout.reasons[0].startswith("ranks before a layout that is"), layout.reasons
        own = phases.percent(layout.headroom)
        assert f"only {own} of the GPU's memory" not in layout.reasons[0], "a reason that is none"
        short = max(0.0, phases.HEADROOM - layout.headroom) / phases.HEADROOM
        assert layout.counted_seconds >= layout.seconds * (1 + layouts.RISK * short) * (1 - 1e-9)
        assert (layout.headroom < phases.HEADROOM) == any("watch runtime_memory_gib" in text for text in layout.reasons)
    assert [one.counted_seconds for one in found] == sorted(one.counted_seconds for one in found)


@given(
    st.sampled_from(MODELS),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["A100-40GB", "H100", "H200"]),
    st.booleans(),
    st.sampled_from([None, 0.1, 0.5, 0.99]),
    st.sampled_from([None, "100G", "400G", "1600G"]),
)
@settings(max_examples=60, deadline=None)
def test_what_fits_is_what_the_rules_say(
    model: str, tp: int, gpu: str, aside: bool, share: float | None, mem: str | None
) -> None:
    config = made(
        model,
        1,
        8,
        gpu,
        parallel={"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1},
        optimizer={"distributed": True},
        memory={"offload_trainer": aside, "recompute_granularity": "full"},
        rollout={"tensor_parallel_size": tp, "engine": {"gpu_memory_utilization": share}},
        slurm={"mem": mem},
    )
    plan = make_plan(config)
    if plan.memory is not None:
        broken = {item.rule for item in plan.broken} & set(MemoryRule)
        assert memory.fits(plan.memory, config) == (not broken), plan.broken


def test_less_headroom_counts_against_a_layout_and_there_is_no_cliff() -> None:
    """A layout that leaves a tenth counts as it is, one that leaves nothing as half as slow again."""
    assert layouts._short(0.1) == layouts._short(0.6) == 1.0 and layouts._short(0.0) == 1.5
    assert layouts._short(0.05) == pytest.approx(1.25) and layouts._short(-0.05) == pytest.approx(1.75)
    assert phases.risk(0.1) == "comfortable" and phases.risk(0.09) == phases.risk(0.0) == "tight"
    assert phases.risk(-0.001) == "may run out of memory"
    page = " ".join((Path(__file__).parents[3] / "docs" / "plan.md").read_text("utf-8").split())
    assert "change of its kind with room for fragmentation" in page


def test_memory_is_saved_only_where_a_layout_needs_it() -> None:
    roomy = layouts.find(made("Qwen2.5-1.5B", 1, 8, "H200"))[0]
    assert roomy.settings["memory.recompute_granularity"] is None and roomy.risk == "comfortable"
    assert not roomy.settings["memory.offload_optimizer"] and len(roomy.settings) == 11
    tight = layouts.find(made("Qwen2.5-7B", 1, 2, "H100", batch={"micro_batch_tokens": 24576}))[0]
    assert tight.risk == "tight" and tight.settings["batch.micro_batch_tokens"] == 8192
    kept = frozenset({"memory.recompute_granularity", "memory.offload_optimizer", "batch.micro_batch_tokens"})
    config = made("Qwen2.5-7B", 1, 2, "H100", memory={"recompute_granularity": None})
    for layout in layouts.find(config, kept):
        changed = with_all(config, layout.settings)
        assert all(value_of(changed, key) == value_of(config, key) for key in kept)


def test_an_engine_gets_the_share_that_it_needs() -> None:
    """A share that is too small for the longest sequence, or too large beside what stays on the GPU, is replaced."""
    for share in (0.05, 0.999):
        config = made("Qwen2.5-7B", 1, 8, rollout={"engine": {"gpu_memory_utilization": share}})
        found = layouts.find(config, limit=1)
        assert found and 0.2 < found[0].settings[savings.UTILIZATION] <= 0.95
        assert any("engines take" in reason for reason in found[0].reasons)
        assert layouts.find(config, frozenset({savings.UTILIZATION})) == []


def test_a_node_with_little_memory_drops_the_weights_of_sleeping_engines() -> None:
    config = made("Qwen2.5-7B", 1, 8, slurm={"mem": "230G"}, rollout={"sleep_level": 1})
    (found,) = layouts.find(config, limit=1)
    assert found.settings["rollout.sleep_level"] == 2


@pytest.mark.parametrize(
    ("model", "nodes", "gpus", "gpu"),
    [("Llama-3.1-70B", 1, 8, "A100-40GB"), ("Qwen2.5-7B", 1, 1, "H100"), ("Qwen3-235B-A22B", 1, 8, "H200")],
)
def test_what_would_have_to_change_was_tried(
    model: str, nodes: int, gpus: int, gpu: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = made(model, nodes, gpus, gpu)
    assert layouts.find(config) == []
    found = remedies.find(config)
    assert any("cluster.nodes" in one.changes or "cluster.gpus_per_node" in one.changes for one in found)
    for one in found:
        (best,) = layouts.find(with_all(config, one.changes), limit=1)
        assert (one.headroom, one.risk) == (best.headroom, best.risk), str(one)
    machine = next(one for one in found if "cluster.nodes" in one.changes or "cluster.gpus_per_node" in one.changes)
    larger = with_all(config, machine.changes).cluster
    for count in range(nodes + 1, larger.nodes):
        fewer = with_all(config, {"cluster.nodes": count, "cluster.gpus_per_node": larger.gpus_per_node})
        assert layouts.find(fewer, limit=1) == [], count
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({name: section for name, section in config.model_dump(mode="json").items() if name in
                                ("cluster", "model", "batch", "rollout")}))  # fmt: skip
    assert main.main(["suggest", str(file)]) == 2
    page = " ".join(capsys.readouterr().out.split())
    assert f"no layout of {nodes * gpus} {gpu} holds this model" in page and "GiB of a GPU in" in page
    assert all(" ".join(str(one).split()) in page for one in found)
    assert all(f"memory: {one.risk}, {phases.left(one.headroom)}" in page for one in found)
    assert not re.search(r"leaves -|leaves 0%", page) and all(
        ("a layout fits" in one.text) <= (one.headroom >= 0) for one in found
    )
    assert main.main(["suggest", str(file), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["changes"] == [one.to_json() for one in found] and "GiB of a GPU in" in told["errors"][0]
    assert all({"changes", "text", "headroom", "risk", "layout"} == one.keys() for one in told["changes"])


@pytest.mark.parametrize(
    ("model", "nodes", "gpus", "gpu", "kind", "counts"),
    [
        ("Qwen3-235B-A22B", 1, 8, "H200", "cluster.nodes", [4, 5]),
        ("Qwen2.5-7B", 1, 1, "H100", "cluster.gpu", ["H200-141GB", "B200-180GB"]),
        ("Qwen3-14B", 1, 1, "H100", "model.path", ["Qwen3-4B", "Qwen3-1.7B"]),
    ],
)
def test_a_larger_change_stands_beside_one_that_may_run_out_of_memory(
    model: str, nodes: int, gpus: int, gpu: str, kind: str, counts: list[Any]
) -> None:
    """The next one of its kind that leaves enough: 4 nodes leave 7 % of a GPU, and that was said nowhere."""
    found = [one for one in remedies.find(made(model, nodes, gpus, gpu)) if kind in one.changes]
    assert [one.changes[kind] for one in found] == counts
    small, large = found
    assert small.risk == "may run out of memory" and small.headroom < 0 <= large.headroom
    assert "tensors of a layout fit, but not their fragmentation" in small.text
    assert "has room for fragmentation" in large.text


def test_a_refused_plan_is_offered_a_layout_before_another_model() -> None:
    """One rank for each of 8 GPUs does not hold 32 B parameters, whatever one or two settings are changed."""
    config = made("Qwen2.5-32B", 1, 8, "H100", response=15360)
    offered = search.find(config)
    models = [any(change.key == "model.path" for change in fix.changes) for fix in offered]
    assert not models[0] and models == sorted(models)  # layouts first
    for fix in offered:
        changed = with_all(config, {change.key: change.value for change in fix.changes})
        assert make_plan(changed).valid, str(fix)


def test_batch_sizes_are_advised_with_reasons_and_can_be_had() -> None:
    config = load(CONFIGS / "qwen2.5_7b_tp2.yaml")
    found = layouts.find(config, limit=2)
    for layout in found:
        advice = {one.key: one.value for one in layout.batches}
        assert set(advice) == {"batch.global_batch_size", "batch.steps_per_generation", "batch.micro_batch_tokens"}
        plan = make_plan(with_all(with_all(config, layout.settings), advice))
        assert plan.valid, plan.broken
        assert all(len(one.reason) > 20 for one in layout.batches)
    assert layouts.find(load(CONFIGS / "qwen2.5_7b_tp2.yaml", ["batch.steps_per_generation=16"]), limit=1)[0].batches[
        1
    ].value == 4  # fmt: skip


@pytest.mark.parametrize(("model", "nodes", "gpus", "gpu"), [CLUSTERS[1], CLUSTERS[14]])
def test_what_to_lower_leaves_what_is_said(model: str, nodes: int, gpus: int, gpu: str) -> None:
    """Tried with the plan: an optimizer step that is too full is not made smaller by fewer tokens."""
    config, said = made(model, nodes, gpus, gpu), 0
    for layout in layouts.find(config, limit=20):
        for text in (text for text in layout.reasons if "if memory runs out" in text):
            if "more GPUs" in text:
                continue
            *words, _, left = text.split("if memory runs out: ")[1].split()
            chosen = with_all(config, layout.settings)
            for key, value in (word.split("=") for word in words):
                chosen = with_value(chosen, key, yaml.safe_load(value))
            plan = make_plan(chosen)
            assert plan.memory is not None
            assert plan.valid and plan.memory.headroom >= 0, "a run that ran out of memory would run out of it again"
            assert phases.percent(plan.memory.headroom) == left, text  # rounded down, as everywhere
            assert plan.memory.headroom > layout.headroom + 0.01
            said += 1
    assert said


@pytest.mark.parametrize(("model", "nodes", "gpus", "gpu"), [CLUSTERS[2], CLUSTERS[6]])
def test_gradients_in_16_bits_are_not_offered_where_a_step_needs_more_with_them(
    model: str, nodes: int, gpus: int, gpu: str
) -> None:
    """Each rank has an optimizer of its own, and its step is the fullest phase: copies in fp32 outweigh the saving."""
    texts = [text for layout in layouts.find(made(model, nodes, gpus, gpu), limit=10) for text in layout.reasons]
    lower = [text.split("if memory runs out: ")[1] for text in texts if "if memory runs out" in text]
    assert lower and all("with adapter.type=lora" in text and "GPUs with more memory" in text for text in lower)


@pytest.mark.parametrize(
    ("model", "gpus", "gpu", "adapters"),
    [("Qwen3-8B", 4, "A100-40GB", True), ("Qwen3-30B-A3B", 8, "H100", True), ("Qwen2.5-32B", 8, "H100", True)],
)
def test_adapters_are_named_where_they_leave_room(model: str, gpus: int, gpu: str, adapters: bool) -> None:
    """A layout that leaves more is named with what it leaves, and it does: of that layout, and by the plan."""
    config = made(model, 1, gpus, gpu, rollout={"max_response_length": 4096})
    texts = [text for layout in layouts.find(config, limit=3) for text in layout.reasons if "memory runs out" in text]
    assert texts and not any("only" in text for text in texts)
    named = [text for text in texts if "adapter.type=lora" in text]
    assert bool(named) == adapters
    adapted = with_value(config, "adapter.type", "lora")
    best = layouts.find(adapted, limit=1)[0]
    assert all(f"layout of the same GPUs leaves {phases.percent(best.headroom)};" in text for text in named)
    assert make_plan(with_all(adapted, best.settings)).valid and best.risk == "comfortable"
    kept = layouts.find(config, limit=3, others=frozenset({"adapter.type"}))
    assert not any("adapter.type" in text for layout in kept for text in layout.reasons)


def test_a_layout_with_adapters_keeps_what_the_others_keep() -> None:
    key = "parallel.tensor_model_parallel_size"
    config = made("Qwen3-8B", 1, 4, "A100-40GB", rollout={"max_response_length": 4096}, parallel={key.split(".")[1]: 2})
    free, kept = (layouts.Search(config, keep).adapted for keep in (frozenset[str](), frozenset({key})))
    assert free is not None and free.config.parallel.tensor_model_parallel_size > 2
    assert kept is not None and kept.config.parallel.tensor_model_parallel_size == 2


def test_what_is_kept_is_not_named_as_what_to_lower() -> None:
    """Neither what suggest may choose, nor what it changes in no layout."""
    config, key = made("Qwen3-8B", 1, 4, "A100-80GB"), frozenset({"optimizer.grad_reduce_in_fp32"})

    def named(keep: frozenset[str] = frozenset(), others: frozenset[str] = frozenset()) -> bool:
        texts = [text for layout in layouts.find(config, keep, 20, others=others) for text in layout.reasons]
        assert any("memory runs out" in text for text in texts)
        return any("grad_reduce_in_fp32=false" in text for text in texts)

    assert named() and not named(keep=key) and not named(others=key)


def test_what_is_short_is_memory_where_no_engine_holds_the_weights() -> None:
    config = made("Qwen3-235B-A22B", 4, 4, "A100-40GB")
    assert "GiB of a GPU in" in remedies.lacking(layouts.Search(config))


SHORT = [("Qwen3-30B-A3B", 1, 2, "B300"), ("Qwen2.5-32B", 1, 8, "H100"), ("Qwen3-30B-A3B", 1, 8, "H100")]


@pytest.mark.parametrize(("model", "nodes", "gpus", "gpu"), [*SHORT, ("Qwen3-235B-A22B", 32, 4, "GB200")])
def test_the_reason_for_an_order_is_what_decides_it(model: str, nodes: int, gpus: int, gpu: str) -> None:
    """Any smaller headroom was named, however little it counts, and so was one of -9.13 % that was "left"."""
    config, seen = made(model, nodes, gpus, gpu), 0
    search = layouts.Search(config)
    ranked = search.ranked(12)
    for place, one in enumerate(ranked):
        later = ranked[place + 1 :]
        text = layouts._before_faster(one, later)
        fastest = min(later, key=lambda other: other.times.rollout, default=one)
        slower = one.times.rollout / fastest.times.rollout
        assert bool(text) == (slower > 1)
        if not text:
            continue
        seen += 1
        room = layouts._short(fastest.memory.headroom) / layouts._short(one.memory.headroom)
        preference = layouts.ALIKE ** (sum(fastest.costs.values()) - sum(one.costs.values()))
        assert "only -" not in text and "leaves -" not in text
        memory_named, preference_named = "the GPU's memory" in text, " has " in text
        assert memory_named or preference_named
        assert (room if memory_named else 1) * (preference if preference_named else 1) >= slower * (1 - 1e-9), text
        if memory_named and preference_named:
            assert max(room, preference) < slower, "one of the two would be enough"
    assert seen or model == "Qwen3-30B-A3B"


def test_what_saves_memory_counts_against_a_layout() -> None:
    """On 128 GPUs one with everything that saves memory, 11 % left and 1 % faster, went before one without it."""
    config = made("Qwen3-235B-A22B", 32, 4, "GB200")
    best = layouts.find(config, limit=1)[0]
    plan = make_plan(with_all(config, best.settings))
    assert plan.memory is not None and plan.memory.headroom > 0.15
    assert not best.settings["memory.offload_optimizer"] and "optimizer.grad_reduce_in_fp32" not in best.settings
    plain = layouts._costs(config, None)
    for name, changed in {
        "recomputed layers": with_value(config, "memory.recompute_granularity", "full"),
        "an offloaded optimizer": with_value(config, "memory.offload_optimizer", True),
        "gradients in 16 bits": with_value(config, "optimizer.grad_reduce_in_fp32", False),
    }.items():
        assert [key for key, cost in layouts._costs(changed, None).items() if cost > plain[key]] == [name]
    budget = config.batch.micro_batch_tokens
    assert budget and layouts._costs(config, budget) == plain
    assert layouts._costs(config, budget + 1)["smaller micro-batches"] > 0


def test_batch_sizes_that_are_not_given_are_assumed_and_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A single completion was assumed in silence, so latency was all that counted: EP 1 for a mixture on 8 GPUs."""
    file = tmp_path / "run.yaml"
    file.write_text("cluster: {gpus_per_node: 8, gpu: H100}\nmodel: {path: Qwen/Qwen3-30B-A3B}\n")
    assert main.main(["suggest", str(file), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)[0]["settings"]["parallel.expert_model_parallel_size"] > 1
    sizes = ["batch.num_generations=8", "batch.generation_batch_size=512", "batch.global_batch_size=128"]
    assert f"batch sizes are not given, so layouts are timed for {', '.join(sizes)}" in " ".join(told.err.split())
    assert main.main(["suggest", str(file), *sizes, "--json"]) == 0
    given = capsys.readouterr()
    assert "batch sizes" not in given.err
    seconds = [one["seconds"] for one in json.loads(told.out)]
    assert [one["seconds"] for one in json.loads(given.out)] == pytest.approx(seconds)
