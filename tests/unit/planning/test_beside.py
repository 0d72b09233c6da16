"""Fixes that stand beside others: with room for peaks, with fewer machines, and what comes first (5 s).

Catches a fix that fits only just and is offered alone, one of more nodes where fewer would do, sizes that are wrong in
one product and not mended by the nearest beside other faults, and far layouts and tight cards that come first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import load
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import beside, repair
from gspo_hpc.planning.fixes.change import Change, Fix

CONFIGS = Path(__file__).parents[3] / "configs"
SERVER = "rollout.mode=server rollout.tensor_parallel_size=3"


def config(preset: str, settings: str) -> Config:
    return load(str(CONFIGS / f"{preset}.yaml"), ["cluster.gpus_per_node=8", *settings.split()])


def offered(preset: str, settings: str) -> list[Fix]:
    return repair.offered(config(preset, settings))


def place(fixes: list[Fix], wanted: str) -> int:
    """Return where a fix stands, by its settings in any order."""
    return [{*str(fix).split()} for fix in fixes].index({*wanted.split()})


@pytest.mark.parametrize(
    ("preset", "settings", "tight"),
    [
        (
            "qwen2.5_32b_tp4_pp4",
            "cluster.gpu=A800 cluster.nodes=2 memory.recompute_granularity=null rollout.tensor_parallel_size=3 "
            "parallel.tensor_model_parallel_size=8 parallel.pipeline_model_parallel_size=3",
            "rollout.tensor_parallel_size=4 parallel.pipeline_model_parallel_size=2",
        ),
        (
            "qwen2.5_7b_tp2",
            "model.path=Qwen/Qwen2.5-7B cluster.gpu=L40S memory.recompute_granularity=null "
            "parallel.tensor_model_parallel_size=3",
            "parallel.tensor_model_parallel_size=4",
        ),
    ],
)
def test_a_switch_that_leaves_room_is_told_beside_a_fix_that_fits_only_just(
    preset: str, settings: str, tight: str
) -> None:
    fixes = offered(preset, settings)
    alone, roomy = place(fixes, tight), place(fixes, f"{tight} memory.recompute_granularity=full")
    assert fixes[alone].warnings == 1 and fixes[roomy].warnings == 0
    assert fixes[roomy].distance < fixes[alone].distance


def test_what_leaves_room_is_told_where_memory_is_all_that_lacks() -> None:
    fixes = offered("qwen2.5_7b_tp2", "cluster.gpu=RTX5090")
    roomy = place(fixes, "parallel.tensor_model_parallel_size=4 memory.offload_optimizer=true")
    assert not fixes[roomy].warnings and fixes[roomy].distance == min(fix.distance for fix in fixes)


def test_sizes_that_are_wrong_in_one_product_are_the_nearest_beside_other_faults() -> None:
    """Lengths, that context parallelism divides, took all the room of the search."""
    sizes = "parallel.tensor_model_parallel_size=4 parallel.pipeline_model_parallel_size=5"
    faults = "parallel.context_parallel_size=3 rollout.tensor_parallel_size=3 batch.global_batch_size=100"
    fixes = offered("llama3.1_70b_tp8_pp8", f"cluster.gpu=H200 cluster.nodes=2 {sizes} {faults}")
    wanted = "parallel.pipeline_model_parallel_size=2 parallel.context_parallel_size=2"
    assert place(fixes, f"{wanted} rollout.tensor_parallel_size=4 batch.global_batch_size=96") == 0


@pytest.mark.parametrize("batch", ["", " batch.global_batch_size=96"])
def test_fewer_nodes_are_told_beside_more(batch: str) -> None:
    faults = f"{SERVER} cluster.gpu=H200 cluster.generation_nodes=1 cluster.nodes=4" + (
        " batch.global_batch_size=100" if batch else ""
    )
    fixes = offered("qwen2.5_32b_tp4_pp4", faults)
    more, fewer = (place(fixes, f"rollout.tensor_parallel_size=4 cluster.nodes={nodes}{batch}") for nodes in (5, 3))
    assert fewer == more + 1


def test_far_fewer_nodes_are_not_told_beside_one_more() -> None:
    """Seven nodes fewer are no alternative to one more."""
    faults = f"{SERVER} cluster.gpu=H200 cluster.generation_nodes=1 cluster.nodes=16 parallel.context_parallel_size=4"
    fixes = offered("qwen2.5_32b_tp4_pp4", faults)
    assert any("cluster.nodes=17" in str(fix) for fix in fixes) and not any("nodes=9" in str(fix) for fix in fixes)


def test_a_layout_that_is_far_comes_behind_other_machines() -> None:
    """A repair of six settings stood before those of two."""
    fixes = offered("qwen2.5_7b_tp2", f"model.path=Qwen/Qwen3-14B rollout.engines_per_node=3 {SERVER}")
    numbers = [len(fix.changes) for fix in fixes]
    assert max(numbers) > 2 and numbers == sorted(numbers)


@pytest.mark.parametrize("card", ["A10G", "RTX-4090-24G", "RTX5090"])
def test_the_first_other_card_leaves_room(card: str) -> None:
    """A100-40GB was first, with which the run may run out of memory."""
    cards = [fix for fix in offered("qwen2.5_7b_tp2", f"cluster.gpu={card}") if "cluster.gpu" in str(fix)]
    assert len(cards) > 1 and not cards[0].warnings


SMALL = "parallel.tensor_model_parallel_size=4 parallel.pipeline_model_parallel_size=2 memory.offload_optimizer=true"


@pytest.mark.parametrize(
    ("preset", "settings", "wanted"),
    [
        ("qwen2.5_7b_tp2", "cluster.gpu=RTX4090 rollout.tensor_parallel_size=1", SMALL),
        (
            "qwen2.5_7b_tp2",
            "cluster.gpu=RTX3090 parallel.tensor_model_parallel_size=1 parallel.sequence_parallel=false",
            SMALL,
        ),
        (
            "qwen3_30b_a3b_ep8",
            "cluster.gpu=H100 cluster.nodes=1 parallel.expert_model_parallel_size=1",
            "parallel.expert_model_parallel_size=8 memory.offload_optimizer=true",
        ),
        (
            "qwen3_30b_a3b_ep8",
            "cluster.gpu=A800 cluster.nodes=1 parallel.expert_model_parallel_size=4 rollout.tensor_parallel_size=2 "
            "memory.recompute_granularity=null parallel.tensor_model_parallel_size=3 batch.global_batch_size=100 "
            "parallel.pipeline_model_parallel_size=3",
            "batch.global_batch_size=96 parallel.tensor_model_parallel_size=1 parallel.pipeline_model_parallel_size=2 "
            "memory.recompute_granularity=full",
        ),
    ],
)
def test_of_the_layouts_that_suggest_ranks_the_nearest_is_offered(preset: str, settings: str, wanted: str) -> None:
    """Without it these plans were offered a layout without room, seven changes and more, or other GPUs."""
    fixes = offered(preset, settings)
    assert place(fixes, wanted) <= 1, [str(fix) for fix in fixes]


@pytest.mark.parametrize(("nearest", "told"), [(1.5, False), (2.5, True)])
def test_what_leaves_room_is_told_only_where_nothing_nearer_does(
    nearest: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three fixes of other settings fits only just, and the second, as it is, leaves room."""
    changes = [Change("batch.global_batch_size", 64, size) for size in (96, 128, 256)]
    tight, roomy, more = (Fix((change,), place == 0) for place, change in enumerate(changes))
    distances = {tight: 3.0, roomy: nearest, more: 2.0}
    monkeypatch.setattr(Fix, "distance", property(distances.__getitem__))
    monkeypatch.setattr(beside, "roomier", lambda search, fix: more if fix is tight else None)
    search: Any = None  # of roomier, which answers without
    assert beside.with_roomier(search, [tight, roomy]) == ([tight, more, roomy] if told else [tight, roomy])
