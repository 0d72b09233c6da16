"""Pairs of changes for plans whose length and batch sizes are wrong together, against a dense search (12 s).

Catches a nearer pair that is not offered, because its batch size is not among the nearest few or because pairs that
cannot mend the length are tried first; and a search that does not end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import repair, search
from gspo_hpc.planning.fixes.change import Change, Fix
from gspo_hpc.planning.fixes.pairs import Pairs
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import value_of, with_value

POSITIONS = {"Qwen/Qwen2.5-Math-1.5B": 4096, "HuggingFaceTB/SmolLM2-135M-Instruct": 8192, "Qwen/Qwen3-8B": 40960}
DENSE: dict[str, list[int]] = {
    "batch.global_batch_size": [*range(1, 2500)],
    "batch.num_generations": [*range(2, 65)],
    "batch.steps_per_generation": [*range(1, 65)],
    "parallel.context_parallel_size": [1, 2, 4, 8],
    "parallel.tensor_model_parallel_size": [1, 2, 4, 8],
}
LENGTH = "rollout.max_response_length"


def faulty(seed: int) -> Config:
    """Return a config whose longest sequence has no room in the model, and whose batch sizes do not fit."""
    draw = random.Random(seed)
    while True:
        model = draw.choice(sorted(POSITIONS))
        batch = {
            "global_batch_size": draw.choice(
                [12, 24, 30, 48, 60, 64, 96, 100, 120, 250, 256, 480, 500, 512, 1000, 1024]
            ),
            "num_generations": draw.choice([4, 5, 6, 7, 8, 10, 12, 14, 16, 24]),
            "micro_batch_tokens": 2 * POSITIONS[model],
        }
        sections: dict[str, Any] = {
            "model": {"path": model},
            "cluster": {"gpu": "H100", "nodes": draw.choice([1, 2, 4, 8]), "gpus_per_node": draw.choice([2, 4, 8])},
            "batch": batch | ({"steps_per_generation": draw.choice([2, 3, 4, 6])} if draw.random() < 0.5 else {}),
            "rollout": {
                "max_prompt_length": draw.choice([256, 512, 1000, 1024]),
                "max_response_length": POSITIONS[model],
            },
            "optimizer": {"distributed": True},
        }
        config = from_dict(sections)
        if len({item.rule for item in make_plan(config).broken}) > 1:
            return config


def dense(config: Config, within: float) -> Iterator[Fix]:
    """Yield the pairs of the longest response that has room and of another setting, nearer than `within`."""
    whole = search.Search(config, None, make_plan(config))
    assert config.model.path is not None
    room = POSITIONS[config.model.path] - config.rollout.max_prompt_length
    shorter = Change(LENGTH, value_of(config, LENGTH), room // 2 * 2)
    for key, values in DENSE.items():
        others = (Change(key, value_of(config, key), value) for value in values if value != value_of(config, key))
        for other in sorted(others, key=lambda one: one.distance):
            if shorter.distance + other.distance >= within:
                break
            changed = with_value(with_value(config, LENGTH, shorter.value), other.key, other.value)
            fix = whole.fix(whole.judge(changed), shorter, other)
            if fix is not None and fix.distance < within:
                yield fix


@pytest.mark.parametrize("room", [0, 30, 200])
def test_the_search_for_pairs_ends_when_its_room_is_used_up(room: int) -> None:
    """A plan is shown while somebody waits: about so many pairs are looked at, and as many of the nearest before."""
    config = faulty(0)
    whole = search.Search(config, None, make_plan(config))
    whole.singles()
    pairs = Pairs(whole)
    pairs.find(room)
    assert len(pairs.known) <= 2 * room and (len(pairs.known) >= room / 5)


@pytest.mark.parametrize("seed", range(8))
def test_no_pair_of_a_length_and_another_setting_is_nearer_than_what_is_offered(seed: int) -> None:
    config = faulty(seed)
    offered = [fix for fix in repair.offered(config) if not fix.left]
    within = min((fix.distance for fix in offered), default=math.inf) - 1e-9
    nearer = min(dense(config, within), key=lambda fix: fix.distance, default=None)
    assert nearer is None, (list(map(str, offered)), str(nearer))
