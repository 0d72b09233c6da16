"""Fixes that stay beside what `suggest` finds: the nearest of a setting that remedies change only with others (2 s).

They would catch other machines that are offered beside nearer remedies, and a model that fits as it is and is left out.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config.loader import load
from gspo_hpc.planning.fixes import search, suggested
from gspo_hpc.planning.fixes.change import Change, Fix
from gspo_hpc.planning.rules.memory import MemoryRule

CONFIGS = Path(__file__).parents[3] / "configs"


def fix(key: str, before: Any, value: Any, *more: Change) -> Fix:
    return Fix((Change(key, before, value), *more))


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
