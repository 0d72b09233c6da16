"""Changes of what a run cannot have enough of: another model, an engine over nodes (15 s).

It would catch a fix that ends in a model that this version does not train, or in one far smaller than needed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.config.paths import PRESETS
from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning import layouts
from gspo_hpc.planning.estimates import memory, parameters
from gspo_hpc.planning.fixes import candidates, search
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import value_of, with_value
from gspo_hpc.planning.suggest import remedies, savings
from gspo_hpc.system.text import GIB

ENGINE = "rollout.tensor_parallel_size"


def made(model: str, nodes: int, gpus: int, gpu: str = "H100", **sections: Any) -> Config:
    base: dict[str, Any] = {
        "cluster": {"nodes": nodes, "gpus_per_node": gpus, "gpu": gpu},
        "model": {"path": model},
        "batch": {"micro_batch_tokens": 8192, "global_batch_size": 512, "num_generations": 16},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 4096},
        "optimizer": {"distributed": True},
    }
    return from_dict({**base, **sections})


def size(config: Config) -> int:
    arch = architecture.find(config)
    assert arch is not None
    return parameters.parameters(arch)


def trained(path: str) -> bool:
    return architecture.untrained(path, "own") is None


@pytest.mark.parametrize(("model", "nearest"), [("Qwen3-8B", "Qwen3-4B"), ("Qwen2.5-7B", "Qwen2.5-3B")])
def test_a_smaller_model_is_the_largest_of_its_family_that_is_trained(model: str, nearest: str) -> None:
    """On one H100, where none of 7 B parameters fits: Qwen3.5-4B begins alike, and is only planned."""
    found = [one for one in remedies.find(made(f"models/{model}", 1, 1)) if "model.path" in one.changes]
    paths = [one.changes["model.path"] for one in found]
    assert paths[0] == f"models/{nearest}" and all(map(trained, paths))
    assert len(paths) == 1 + (found[0].risk == "may run out of memory")


def test_other_sizes_come_first_then_larger_models_of_the_generation_and_no_others() -> None:
    config = made("Qwen3-32B", 1, 1)
    names = list(remedies._smaller(config, remedies.Asked()))
    assert names[:2] == ["Qwen3-30B-A3B", "Qwen3-14B"] and all(name.startswith("Qwen3-") for name in names)
    sizes = [size(with_value(config, "model.path", name)) for name in names]
    assert sizes[:5] == sorted(sizes[:5], reverse=True) and max(sizes) < size(config)


@pytest.mark.parametrize(
    ("one", "other", "kin"),
    [
        ("Llama-3.1-70B", "Llama-3.2-3B", "FAMILY"),
        ("meta-llama/Meta-Llama-3-70B", "Llama-3.1-8B", "FAMILY"),
        ("Llama-3.1-70B", "Llama-2-7B", "MAKER"),
        ("GLM-4.6", "GLM-4.5-Air", "FAMILY"),
        ("Qwen2.5-Math-72B", "Qwen2.5-14B", "FAMILY"),
        ("Qwen2-72B", "Qwen2.5-14B", "MAKER"),
        ("Qwen3-32B", "Qwen3.5-4B", "MAKER"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-coder-6.7B", "MAKER"),
        ("deepseek-ai/DeepSeek-V3.1", "DeepSeek-V3", "FAMILY"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-llm-7B", "MAKER"),
        ("deepseek-ai/deepseek-coder-33b-instruct", "deepseek-coder-6.7B", "LINE"),
        ("Kimi-K2", "Kimi-Dev-72B", "MAKER"),
        ("Mixtral-8x7B", "Mistral-7B-v0.3", "NONE"),
    ],
)
def test_models_are_of_one_family_if_they_are_of_one_generation(one: str, other: str, kin: str) -> None:
    assert catalog.kinship(one, other).name == kin


@pytest.mark.parametrize(
    ("model", "gpu"), [("deepseek-ai/DeepSeek-V3", "L40S"), ("mistralai/Mixtral-8x7B-v0.1", "L40S")]
)
def test_a_model_of_which_no_smaller_one_of_its_generation_is_known_gets_none(model: str, gpu: str) -> None:
    """For DeepSeek-V3, deepseek-coder-6.7B was offered, of an earlier generation, and Qwen2.5 besides."""
    config = made(model, 1, 1, gpu)
    assert offered(config) == [] and list(remedies._smaller(config, remedies.Asked())) == []


def offered(config: Config) -> list[str]:
    return [one.changes["model.path"] for one in remedies.find(config) if "model.path" in one.changes]


@pytest.mark.parametrize(
    ("model", "gpu"),
    [("Qwen/Qwen3-235B-A22B", "H100"), ("Qwen/Qwen2.5-72B-Instruct", "A100-40GB"), ("Llama-3.1-70B", "L40S")],
)
def test_the_largest_model_that_fits_is_offered_wherever_it_stands(model: str, gpu: str) -> None:
    """On one GPU only the smallest fit: the six largest were tried, and none was offered."""
    config = made(model, 1, 1, gpu)
    found = offered(config)
    fitting = {path: size(with_value(config, "model.path", path)) for path in candidates.models(config)}
    kin = {path: catalog.kinship(model, path) for path in fitting}
    fitting = {path: count for path, count in fitting.items() if kin[path] <= catalog.Kinship.FAMILY
               and remedies._best(config, remedies.Asked(), {"model.path": path})}  # fmt: skip
    assert found and set(found) <= fitting.keys()
    assert max(fitting.values()) <= remedies._LARGER * max(fitting[path] for path in found)
    assert kin[found[0]] == min(kin[path] for path in fitting)
    assert fitting[found[0]] == max(count for path, count in fitting.items() if kin[path] == kin[found[0]])


@pytest.mark.parametrize(
    ("model", "gpus", "names"),
    [
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 2, ["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"]),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", 1, ["Qwen/Qwen2.5-Coder-3B-Instruct"]),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 1, ["Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-1.7B"]),
        ("meta-llama/Llama-3.1-70B-Instruct", 4, ["meta-llama/Llama-3.1-8B-Instruct"]),
        ("models/Qwen2.5-Math-72B", 4, ["models/Qwen2.5-Math-7B", "models/Qwen2.5-14B"]),
    ],
)
def test_another_size_of_the_same_model_comes_first(model: str, gpus: int, names: list[str]) -> None:
    """And the largest of its family besides, where that is half as large again, or one that leaves more where the first
    may run out of memory. What follows the size stays.
    """
    rollout = {"max_prompt_length": 512, "max_response_length": 2048}
    assert offered(made(model, 1, gpus, rollout=rollout)) == names


def test_a_fix_prefers_the_same_model_in_another_size() -> None:
    base = made("Qwen/Qwen2.5-Coder-32B-Instruct", 1, 1)
    models = [change.value for fix in search.find(base) for change in fix.changes if change.key == "model.path"]
    assert models[0] == "Qwen/Qwen2.5-Coder-3B-Instruct"  # in another layout; the one as it is holds 1.5B


def test_what_every_layout_breaks_is_mended_also_where_the_config_lacks_memory() -> None:
    """The nearest repair of the config itself is another layout or GPU, which says nothing of cores: nothing but larger
    GPUs and smaller models was offered."""
    config = made("zai-org/GLM-4.5-Air", 4, 8, slurm={"cpus_per_task": 8})
    assert "breaks the rule cpus_per_task_suffice" in remedies.lacking(layouts.Search(config))
    (one,) = remedies.find(config)
    assert one.changes == {"slurm.cpus_per_task": 12} and one.text == "what fixes a rule that every layout breaks"


def test_of_all_repairs_of_a_layout_one_that_layouts_leave_alone_is_taken() -> None:
    """The nearest is a smaller engine, which is another layout, and there every one breaks the rule."""
    config = load(PRESETS / "qwen3_235b_a22b_tp4_pp2_ep32.yaml", ["slurm.cpus_per_task=6"])
    assert "breaks the rule cpus_per_task_suffice" in remedies.lacking(layouts.Search(config))
    (one,) = remedies.find(config)
    assert one.changes.keys() <= {"slurm.cpus_per_task", "reward.workers"} and one.headroom > 0.3


@pytest.mark.parametrize("nodes", [1, 4])
def test_adapters_are_offered_where_the_whole_model_would_be_trained(nodes: int) -> None:
    whole = made("Qwen3-32B", nodes, 8)
    (idea,) = remedies._adapters(whole)
    page = (Path(__file__).parents[3] / "docs" / "lora.md").read_text()  # which measures both ways
    assert idea.changes == {"adapter.type": "lora"}
    assert "at about ten times the learning rate" in idea.text and "about ten times that of full training" in page
    assert not list(remedies._adapters(with_value(whole, "adapter.type", "lora")))


def test_of_gpus_with_about_the_same_memory_the_one_most_like_this_one_comes_first() -> None:
    """H100-PCIe has a tenth of a GiB less than A100-80GB, which was never offered."""
    names = [one.changes["cluster.gpu"] for one in remedies._other_gpu(made("Qwen3-8B", 1, 1, "A100-40GB"))]
    assert names[:2] == ["L40S-48GB", "A100-80GB"]


@pytest.mark.parametrize("short", ["micro_batch_tokens", "logprob_micro_batch_tokens"])
def test_a_token_budget_that_is_too_small_is_named_and_made_larger(short: str) -> None:
    """Shorter responses on twice the GPUs were offered for it."""
    batch = {"micro_batch_tokens": 8192, "global_batch_size": 512, "num_generations": 16, short: 4096}
    config = made("Qwen3-8B", 1, 8, batch=batch)
    assert "breaks the rule token_budget_holds_longest_sequence" in remedies.lacking(layouts.Search(config))
    (one,) = remedies.find(config)
    assert one.changes == {f"batch.{short}": 5120} and one.text == "what fixes a rule that every layout breaks"
    single = remedies.find(with_value(config, "cluster.gpus_per_node", 1))
    assert single and all(one.changes[f"batch.{short}"] <= 5120 for one in single)


@pytest.mark.parametrize(
    ("sections", "rule", "mending"),
    [
        ({"rollout": {"mode": "server"}}, "server_engines_given", {"rollout.engines_per_node": 1}),
        (
            {"model": {"path": "Qwen3-8B", "provider": "mcore_bridge"}},
            "mcore_bridge_share_prompts",
            {"batch.share_prompts": False},
        ),
        (
            {"rollout": {"engine": {"gpu_memory_utilization": "90%"}}},
            "engine_argument_value",
            {"rollout.engine.gpu_memory_utilization": 0.9},
        ),
        (  # the repair of this layout has a larger update, too, which others do without
            {
                "model": {"path": "Qwen3-8B", "provider": "mcore_bridge"},
                "batch": {"micro_batch_tokens": 8192, "global_batch_size": 64, "num_generations": 16},
            },
            "mcore_bridge_share_prompts",
            {"batch.share_prompts": False},
        ),
    ],
)
def test_what_every_layout_breaks_is_named_and_mended(
    sections: dict[str, Any], rule: str, mending: dict[str, Any]
) -> None:
    """Nothing was offered: more GPUs, other GPUs and other models were tried with the same mistake, for seconds."""
    batch = {"micro_batch_tokens": 8192, "global_batch_size": 512, "num_generations": 16}
    config = from_dict({**as_dict(made("Qwen3-8B", 1, 8, batch=batch)), **sections})
    assert f"every layout breaks the rule {rule}" in remedies.lacking(layouts.Search(config))
    assert [one.changes for one in remedies.find(config)] == [mending]
    few = with_value(config, "cluster.gpus_per_node", 1)
    for one in (found := remedies.find(few)):
        changed = few
        for key, value in one.changes.items():
            changed = with_value(changed, key, value)
        assert len(one.changes) > 1 and layouts.Search(changed).ranked(1), one
    assert found


@pytest.mark.parametrize("model", ["Qwen3-32B", "Qwen2.5-72B", "Llama-3.1-70B"])
def test_no_model_that_is_offered_is_far_smaller_than_needed(model: str) -> None:
    """One of the family, and the largest if that is much larger: no larger one keeps every rule."""
    config = made(model, 1, 4)
    models = [fix.changes[0].value for fix in search.find(config) if fix.changes[0].key == "model.path"]
    assert 1 <= len(models) <= 2 and all(map(trained, models))
    assert catalog.kinship(model, models[0]) is not catalog.Kinship.NONE
    sizes = [size(with_value(config, "model.path", path)) for path in models]
    assert len(models) == 1 or sizes[1] > 1.5 * sizes[0]
    for path in candidates.models(config):
        other = with_value(config, "model.path", path)
        if 1.5 * max(sizes) < size(other) < size(config):
            assert not make_plan(other).valid, path


def test_engines_over_nodes_are_offered_where_nothing_smaller_holds_the_weights() -> None:
    """They are planned, and not run: `suggest` has them only where the config asks for one."""
    config = made("Qwen3-235B-A22B", 16, 4)
    assert not layouts.Search(config).ranked(1)
    (offered, *_) = remedies._first(config, remedies.Asked(), remedies._engine_over_nodes)
    assert offered.changes == {ENGINE: 8} and "does not run" in offered.text
    kept = remedies.find(config, frozenset({"parallel.pipeline_model_parallel_size"}))
    assert {ENGINE: 8} in [one.changes for one in kept]
    assert not any(ENGINE in one.changes for one in remedies.find(config, frozenset({ENGINE})))
    sizes = {value_of(cut, ENGINE) for cut in layouts.Search(with_value(config, ENGINE, 8)).allowed()}
    assert sizes and min(sizes) == 8


@pytest.mark.parametrize("gpu", ["A100-40GB", "H100", "H200"])
def test_what_is_left_out_before_all_ways_are_tried_fits_in_none(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One estimate decides for most layouts that do not fit; those that only just fit must stay."""
    tight = 0
    for model, gpus in itertools.product(("Qwen3-8B", "Qwen2.5-14B", "Qwen3-32B", "Qwen3-30B-A3B"), (1, 2, 4, 8)):
        search_ = layouts.Search(made(model, 1, gpus, gpu, memory={"offload_trainer": False}))
        for wanted in search_.allowed():
            quick = [chosen for chosen, _ in search_.fitting(wanted)]
            with monkeypatch.context() as patched:
                patched.setattr(savings, "_may_fit", lambda *_: True)
                found = list(search_.fitting(wanted))
            assert quick == [chosen for chosen, _ in found]
            tight += bool(found) and min(one.peak.total for _, one in found) > 0.9 * search_.device.memory
    assert tight > 0


@pytest.mark.parametrize(("model", "gpus"), [("Qwen3-8B", 4), ("Qwen3-30B-A3B", 8)])
def test_a_peak_that_is_just_the_card_is_not_known_to_be_too_much(model: str, gpus: int) -> None:
    """Bounds that are known before an estimate must say of no layout that it is larger than it is."""
    search_ = layouts.Search(made(model, 1, gpus))
    refused = 0
    for wanted in itertools.islice(search_.allowed(), 12):
        for way in savings._ways(wanted, frozenset()):
            peak = memory.estimate(search_.arch, way, search_.device).peak.total
            card, smaller = (replace(search_.device, memory=peak - less) for less in (0, 1))
            assert memory.holds_state(search_.arch, way, card)
            assert savings.holds_state(search_.arch, card, wanted, frozenset())
            assert memory.fitting(search_.arch, way, card) == memory.estimate(search_.arch, way, card)
            assert memory.fitting(search_.arch, way, smaller) is None
            refused += not memory.holds_state(search_.arch, way, smaller)
    assert refused > 0, "of some layouts the state is all that counts"


LONG: dict[str, Any] = {
    "rollout": {"max_prompt_length": 1024, "max_response_length": 30_000},
    "batch": {"micro_batch_tokens": 32_768, "global_batch_size": 512, "num_generations": 16},
}


@pytest.mark.parametrize("keep", [frozenset[str](), frozenset({savings.UTILIZATION})])
def test_an_engine_that_is_left_out_at_once_has_no_layout(keep: frozenset[str]) -> None:
    search_ = layouts.Search(made("Qwen3-4B", 1, 8, **LONG))
    wanted = next(search_.allowed())
    refused = fitting = 0
    for gib in range(12, 60):
        device = replace(search_.device, memory=gib * GIB)
        fits = any(True for _ in savings.fitting(search_.arch, device, wanted, keep))
        holds = savings.engine_holds_sequence(search_.arch, device, wanted, keep)
        assert holds or not fits, gib
        refused, fitting = refused + (not holds), fitting + fits
    assert refused > 0 and fitting > 0


def test_layouts_are_those_that_are_found_with_nothing_left_out_before_its_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = set()
    for gib, settings in itertools.product((12, 20, 28, 48), ({}, LONG)):
        config = with_value(made("Qwen3-4B", 1, 4, **settings), "cluster.gpu_memory_gb", gib)
        found = layouts.Search(config).ranked(3)
        with monkeypatch.context() as patched:
            for name in ("holds_state", "engine_holds_sequence"):
                patched.setattr(savings, name, lambda *_, **__: True)
            assert layouts.Search(config).ranked(3) == found
        counts.add(len(found))
    assert {0, 3} <= counts


def test_a_token_budget_that_is_kept_is_made_no_larger() -> None:
    """Otherwise every remedy would begin with one that holds the longest sequence."""
    config, key = made("Qwen3-14B", 1, 1, batch={"micro_batch_tokens": 512}), "batch.micro_batch_tokens"
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    assert remedies._budgets(config, remedies.Asked()) == {key: longest}
    assert remedies._budgets(config, remedies.Asked(frozenset({key}))) == {}
