"""Fixes of one setting are the nearest values, also of settings that are not given (6 s).

Catches a list that begins with the farthest value where nothing is given, a share of a GPU or a budget that is smaller
than it has to be, a part of the trainer that could move to the host and is not offered, and repairs that a larger
search finds or whose changes only make up for each other.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import distances, repair, search
from gspo_hpc.planning.fixes.change import Change, nearest
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import ENGINE, value_of, with_value
from tests.unit.planning.test_fixes_of_presets import BASES
from tests.unit.planning.test_nearest_repairs import brute_force, drawn

VALUES: dict[str, list[Any]] = {
    "batch.global_batch_size": [*range(1, 600)],
    "batch.num_generations": [*range(2, 40)],
    "batch.steps_per_generation": [*range(1, 20)],
    "parallel.tensor_model_parallel_size": [*range(1, 33)],
    "parallel.pipeline_model_parallel_size": [*range(1, 33)],
    "parallel.context_parallel_size": [*range(1, 17)],
    "parallel.expert_model_parallel_size": [*range(1, 65)],
    f"{ENGINE}gpu_memory_utilization": [share / 100 for share in range(10, 98)],
    "batch.micro_batch_tokens": [512, *range(4096, 32_769, 1024), 262_144],
    "memory.offload_parts": [("optimizer",), ("weights",), ("weights", "gradients", "optimizer"), ()],
    "memory.recompute_granularity": [None, "full"],
    "memory.offload_optimizer": [True, False],
}


def faulty(seed: int) -> Config:
    """Return a preset with one fault, in which the share of engines may not be given."""
    draw = random.Random(seed)
    while True:
        config = BASES[draw.choice(sorted(BASES))]
        if draw.random() < 0.3:
            config = with_value(config, f"{ENGINE}gpu_memory_utilization", None)
        key = draw.choice(sorted(VALUES))
        config = with_value(config, key, draw.choice(VALUES[key]))
        if make_plan(config).broken:
            return config


@pytest.mark.parametrize("seed", range(12))
def test_no_other_value_of_an_offered_setting_is_nearer(seed: int) -> None:
    config = faulty(seed)
    whole = search.Search(config, None, make_plan(config))
    offered = [fix for fix in repair.offered(config) if len(fix.changes) == 1]
    for key, values in VALUES.items():
        own = [whole.order(fix) for fix in offered if fix.changes[0].key == key]
        before = value_of(config, key)
        for value in (value for value in values if value != before) if own else ():
            change = Change(key, before, value)
            fix = whole.fix(whole.judge(with_value(config, key, value)), change)
            assert fix is None or whole.order(fix) >= min(own), (str(fix), list(map(str, offered)))


def test_what_is_not_given_is_changed_as_little_as_can_be() -> None:
    """Shares of 0.15 to 0.4 were offered, where the rule itself says 0.71, and the parts that stay were never moved."""
    sections = {
        "cluster": {"gpus_per_node": 8, "gpu": "H100"},
        "model": {"path": "Qwen/Qwen2.5-7B"},
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "optimizer": {"distributed": True},
        "memory": {"offload_parts": ["optimizer"]},
        "batch": {"micro_batch_tokens": 8192, "global_batch_size": 128, "num_generations": 8},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 7168, "tensor_parallel_size": 2},
    }
    config = from_dict(sections)
    (broken,) = make_plan(config).broken
    offered = list(map(str, repair.offered(config)))
    assert f"{ENGINE}gpu_memory_utilization=0.71" in broken.message
    layout = f"parallel.overlap_grad_reduce=true {ENGINE}gpu_memory_utilization=0.71"  # that suggest ranks first
    alone = [f"{ENGINE}gpu_memory_utilization=0.71", "memory.offload_parts=[weights,gradients,optimizer]"]
    assert [one for one in offered if one != layout] == alone and layout in offered


def test_numbers_that_are_not_given_count_from_their_default() -> None:
    share, usual = f"{ENGINE}gpu_memory_utilization", 0.92
    assert distances.start(share, None) == usual and distances.start(share, 0.5) == 0.5
    assert distances.start("batch.micro_batch_size", None) is None
    assert distances.between(share, None, 0.7) == distances.between(share, usual, 0.7)
    changes = nearest(from_dict({}), "batch.micro_batch_size", {16, 2, 1, 4}, 60)
    assert [change.value for change in changes] == [1, 2, 4, 16]  # not by their text


@pytest.mark.parametrize("seed", [321, 370, 414, 439, 451])
def test_repairs_of_several_faults_are_the_nearest(seed: int) -> None:
    """Each of these had a nearer one: with a little more room, other sizes of experts, or fewer of its changes."""
    config, base, keys = drawn(seed)
    offered = [fix for fix in repair.offered(config) if not fix.left]
    nearer = next(brute_force(config, base, keys, min(fix.distance for fix in offered) - 1e-9), None)
    assert nearer is None, (list(map(str, offered)), str(nearer))
