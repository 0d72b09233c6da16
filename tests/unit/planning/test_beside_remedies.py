"""Fixes that stay beside what `suggest` finds: the nearest of a setting that remedies change only with others (2 s).

They would catch other machines that are offered beside nearer remedies, and a model that fits as it is and is left out.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config.loader import load
from gspo_hpc.planning.fixes import repair, search, suggested
from gspo_hpc.planning.fixes.change import Change, Fix, together
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.rules.ids import Topic
from gspo_hpc.planning.rules.memory import MemoryRule

CONFIGS = Path(__file__).parents[3] / "configs"


def fix(key: str, before: Any, value: Any, *more: Change) -> Fix:
    return Fix((Change(key, before, value), *more))


def test_one_more_setting_has_to_save_more_than_a_little() -> None:
    """Two settings that go a hundredth less far together than one alone are no better a fix; at two thirds they are."""
    (alone,) = fix("batch.micro_batch_size", 100, 400).changes
    near = 0.5 * alone.distance
    assert together([alone]) == alone.distance < together([], [near, near - 0.01 * alone.distance])
    assert together([], [near, near / 3]) < alone.distance


def test_of_machines_that_remedies_change_only_what_none_changes_alone_stays_and_of_that_the_nearest() -> None:
    cut = Change("parallel.tensor_model_parallel_size", 1, 4)
    told = suggested.Suggested(remedies=(fix("cluster.nodes", 1, 2, cut), fix("cluster.gpu_memory_gb", 64, 80)))
    far, near = fix("cluster.nodes", 1, 4), fix("cluster.nodes", 1, 3)
    card = fix("cluster.gpu_memory_gb", 64, 96)
    gpus = [fix("cluster.gpus_per_node", 4, count) for count in (8, 16)]  # no remedy changes it
    pieces = [fix("parallel.tensor_model_parallel_size", 1, count) for count in (2, 8)]  # of the same machines
    kept = told.without_others([far, card, near, *gpus, *pieces])
    assert set(kept) == {near, *gpus, *pieces} and len(kept) == 5


@pytest.mark.parametrize("rule", MemoryRule)
def test_suggest_is_asked_for_the_memory_of_a_gpu_alone(rule: MemoryRule) -> None:
    asked = suggested.is_asked(SimpleNamespace(broken=[SimpleNamespace(rule=rule)]))  # type: ignore[arg-type]
    of_gpus = ("trainer_fits_gpu_memory", "engine_fits_gpu_memory", "kv_cache_holds_longest_sequence")
    assert asked == (rule in of_gpus)


@pytest.mark.parametrize(
    ("preset", "model", "alone"),
    [
        ("qwen3_0.6b_1gpu", "models/Qwen3-14B", "models/Qwen3-0.6B"),
        ("qwen3_8b_tp2_cp4_32k", "models/Qwen3-Coder-480B-A35B", "models/Qwen3-8B"),  # remedies name mixtures
    ],
)
def test_a_model_that_the_layout_holds_as_it_is_is_offered(preset: str, model: str, alone: str) -> None:
    found = search.find(load(CONFIGS / f"{preset}.yaml", [f"model.path={model}"]), room=0)
    assert alone in [one.changes[0].value for one in found if len(one.changes) == 1]


NODES, CARD = fix("cluster.nodes", 1, 2), fix("cluster.gpu", "A100-40GB", "H100-80GB")
SWITCH = fix("memory.offload_optimizer", False, True)
LAYOUT = fix("parallel.tensor_model_parallel_size", 1, 4, Change("parallel.sequence_parallel", False, True))
PAIR = fix("memory.recompute_granularity", None, "full", Change("memory.offload_optimizer", False, True))
NEAREST, LARGEST, ALONE = (fix("model.path", "x", f"models/Qwen3-{size}") for size in ("4B", "14B", "0.6B"))
REMEDY = fix("model.path", "x", "models/Qwen3-1.7B", Change("memory.offload_optimizer", False, True))
MEMORY, BOTH = {Topic.MEMORY}, {Topic.MEMORY, Topic.COUNTS}
TOLD_LAYOUT, REMEDIES = suggested.Suggested(layout=(LAYOUT,)), suggested.Suggested(remedies=(REMEDY,))
CASES: dict[str, tuple[set[Topic], suggested.Suggested, dict[str, list[Fix]], list[Fix]]] = {
    # topics, what suggest finds, what the search finds, and the models and layouts that are offered
    "a model beside machines": (MEMORY, suggested.Suggested(), {"singles": [NODES]}, [NEAREST]),
    "a model beside a layout": (MEMORY, suggested.Suggested(), {"layout": [LAYOUT]}, [LAYOUT, NEAREST]),
    "a model beside a pair": (MEMORY, suggested.Suggested(), {"_pairs": [PAIR]}, [NEAREST]),
    "nothing but models": (MEMORY, suggested.Suggested(), {}, [NEAREST, LARGEST]),
    "no model beside a switch": (MEMORY, suggested.Suggested(), {"singles": [SWITCH]}, []),
    "no layout beside a switch": (MEMORY, suggested.Suggested(), {"singles": [SWITCH], "layout": [LAYOUT]}, []),
    "suggest has a layout": (MEMORY, TOLD_LAYOUT, {"singles": [NODES]}, [LAYOUT]),
    "suggest has a layout, and more is broken": (BOTH, TOLD_LAYOUT, {"singles": [NODES]}, [LAYOUT, NEAREST]),
    "one remedy, and the model that fits as it is": (MEMORY, REMEDIES, {}, [ALONE, REMEDY]),
    "one remedy beside machines": (MEMORY, REMEDIES, {"singles": [NODES]}, [REMEDY]),
    "one remedy, and more is broken": (BOTH, REMEDIES, {}, [NEAREST, LARGEST, REMEDY]),
    "no other layout beside remedies": (BOTH, REMEDIES, {"singles": [NODES], "layout": [LAYOUT]}, [NEAREST, REMEDY]),
}


@pytest.mark.parametrize("case", CASES)
def test_models_and_layouts_that_are_offered(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a search as they may come together."""
    topics, told, parts, expected = CASES[case]
    config = load(CONFIGS / "qwen3_0.6b_1gpu.yaml", ["model.path=models/Qwen3-14B"])
    one = search.Search(config, None, make_plan(config))
    one.topics = topics
    monkeypatch.setattr(suggested, "find", lambda search: told)
    asked: dict[str, bool] = {}
    monkeypatch.setattr(one, "_pairs", lambda *a, machines: asked.update(machines=machines) or parts.get("_pairs", []))
    found = {"singles": [], "layout": [], "_other_models": [NEAREST, LARGEST], "_like_a_remedy": [ALONE]} | parts
    for name in found.keys() - {"_pairs"}:
        monkeypatch.setattr(one, name, lambda name=name: found[name])
    offered = [fix for fix in one.found(6, 60) if fix not in (NODES, SWITCH, PAIR)]
    assert sorted(map(str, offered)) == sorted(map(str, expected))
    # Other machines are looked for in pairs unless there is a layout of these; beside remedies nothing is.
    assert asked == ({} if told.remedies and topics == MEMORY else {"machines": not told.layout})


def test_what_is_broken_beside_memory_is_repaired_with_it() -> None:
    """Pairs with the batch size, where that is wrong, too: the larger cards that `suggest` names are no fix alone."""
    slips = ["batch.global_batch_size=100", "model.path=models/Qwen3-32B"]
    offered = [str(one) for one in repair.offered(load(CONFIGS / "qwen2.5_7b_tp2.yaml", slips))]
    assert any("batch." in text and "cluster.gpu=" in text for text in offered), offered


@pytest.mark.parametrize(
    ("preset", "slips", "first"),
    [
        (
            "llama3.1_70b_tp8_pp8",
            "cluster.gpu=H100 cluster.nodes=8 parallel.pipeline_model_parallel_size=1 rollout.tensor_parallel_size=2 "
            "batch.global_batch_size=120",
            "batch.global_batch_size=128 memory.recompute_granularity=full rollout.tensor_parallel_size=4",
        ),
        (
            "llama3.1_70b_tp8_pp8",
            "cluster.gpu=H100 cluster.nodes=4 parallel.pipeline_model_parallel_size=1 rollout.tensor_parallel_size=4 "
            "batch.global_batch_size=100",
            "batch.global_batch_size=96 memory.recompute_granularity=full parallel.pipeline_model_parallel_size=2",
        ),
        (
            "qwen2.5_7b_tp2",
            "model.path=Qwen/Qwen3-8B cluster.gpus_per_node=8 cluster.gpu=A100-40GB cluster.nodes=1 "
            "rollout.tensor_parallel_size=4 batch.global_batch_size=130",
            "batch.global_batch_size=128 parallel.tensor_model_parallel_size=4 memory.recompute_granularity=full",
        ),
    ],
)
def test_a_layout_beside_a_batch_size_is_what_the_plan_needs_and_comes_before_other_cards(
    preset: str, slips: str, first: str
) -> None:
    """The whole layout of `suggest` was offered, last; these are the nearest that an exhaustive search finds. 4 s."""
    config = load(CONFIGS / f"{preset}.yaml", [*slips.split(), "memory.recompute_granularity=null"])
    assert {*str(repair.offered(config)[0]).split()} == {*first.split()}


def test_what_suggest_finds_is_the_repair_where_memory_alone_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairs of several settings were searched for seconds, and offered before the layouts that are ranked."""
    monkeypatch.setattr(repair, "find_all", lambda *arguments: pytest.fail("repairs are searched for"))
    config = load(CONFIGS / "qwen3_0.6b_1gpu.yaml", ["model.path=models/Qwen3-14B"])
    offered = repair.offered(config)
    assert offered and all(len(one.changes) > 1 or one.changes[0].key == "model.path" for one in offered)
