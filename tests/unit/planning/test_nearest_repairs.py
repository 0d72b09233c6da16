"""Repairs of plans with two and three faults, against brute force over the same settings and values (30 s).

Catches a repair that is far where a near one is enough, such as 8 pipeline stages for 5 where 4 fit, and one of whose
settings could be changed less.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import change as changes_of
from gspo_hpc.planning.fixes import faults, nearest, repair, search
from gspo_hpc.planning.fixes.candidates import candidates
from gspo_hpc.planning.fixes.change import Change, Fix
from gspo_hpc.planning.plan import judge, make_plan
from gspo_hpc.planning.rules import registry
from gspo_hpc.planning.settings import value_of, with_value
from tests.unit.planning.test_fixes_of_presets import BASES
from tests.unit.planning.test_repair import SOUND

ALL = BASES | {"sound": from_dict(SOUND)}
FAULTS: dict[str, list[Any]] = {
    "batch.num_generations": [3, 5, 7, 9, 11, 127],
    "batch.micro_batch_tokens": [100, 1000, 2000],
    "batch.global_batch_size": [17, 30, 33, 100, 500],
    "batch.steps_per_generation": [5, 7],
    "rollout.tensor_parallel_size": [3, 5, 6, 16],
    "rollout.max_response_length": [2047, 7001],
    "parallel.tensor_model_parallel_size": [3, 5, 7],
    "parallel.pipeline_model_parallel_size": [3, 5, 7],
    "parallel.virtual_pipeline_model_parallel_size": [2, 3, 4],
    "parallel.context_parallel_size": [3, 5],
    "parallel.expert_model_parallel_size": [3, 5, 7],
    "memory.recompute_modules": [("mlpp",)],
    "memory.recompute_num_layers": [5, 7],
    "slurm.signal_seconds": [60000],
    "cluster.gpus_per_node": [3, 5, 6, 7],
    "cluster.nodes": [3, 5],
    "rollout.engines_per_node": [3, 16],
}
VALUES = 7  # of a setting that brute force tries


def drawn(seed: int) -> tuple[Config, Config, list[str]]:
    """Return a config with two or three faults, the one without them, and where they are."""
    draw = random.Random(seed)
    while True:
        base = ALL[draw.choice(sorted(ALL))]
        keys = draw.sample(sorted(FAULTS), draw.choice([2, 3, 3]))
        config = with_all(base, [Change(key, None, draw.choice(FAULTS[key])) for key in keys])
        if make_plan(config).broken:
            return config, base, keys


def with_all(config: Config, changes: list[Change]) -> Config:
    for change in changes:
        config = with_value(config, change.key, change.value)
    return config


def values(config: Config, key: str) -> list[Change]:
    """Return the changes of a setting that the package would try there, the nearest first."""
    plan = judge(config)
    known = candidates(config, plan, faults.topics_of(plan.broken), None).get(key, set())
    return changes_of.nearest(config, key, known, 60)


def brute_force(config: Config, base: Config, keys: list[str], within: float) -> Iterator[Fix]:
    """Yield every fix of these settings, by the values that are tried there or were there before the fault."""
    whole = search.Search(config, None, make_plan(config))
    tried = {}
    for key in keys:
        before = Change(key, value_of(config, key), value_of(base, key))
        tried[key] = [*dict.fromkeys([*values(config, key)[:VALUES], before])]
    for number in range(1, len(keys) + 1):
        for chosen in itertools.combinations(keys, number):
            for changes in itertools.product(*(tried[key] for key in chosen)):
                if sum(change.distance for change in changes) < within:
                    fix = whole.fix(whole.judge(with_all(config, [*changes])), *changes)
                    if fix is not None and fix.distance < within:
                        yield fix


SEEDS = range(300, 324)


@pytest.fixture(scope="module")
def offers() -> dict[int, list[Fix]]:
    return {seed: repair.offered(drawn(seed)[0]) for seed in SEEDS}


def test_nearly_always_nothing_is_nearer_than_what_is_offered(offers: dict[int, list[Fix]]) -> None:
    """One in six of such plans had a nearer repair than any that was offered."""
    nearer = {}
    for seed, fixes in offers.items():
        config, base, keys = drawn(seed)
        within = min((fix.distance for fix in fixes if not fix.left), default=math.inf)
        if found := next(brute_force(config, base, keys, within - 1e-9), None):
            nearer[seed] = (list(map(str, fixes)), str(found))
    assert len(nearer) <= len(offers) // 20, nearer


def test_what_is_offered_is_valid_and_no_setting_can_be_changed_less(offers: dict[int, list[Fix]]) -> None:
    for seed, fixes in offers.items():
        config = drawn(seed)[0]
        whole = search.Search(config, None, make_plan(config))
        assert fixes and not any(fix.left for fix in fixes), seed
        for fix in fixes:
            assert make_plan(with_all(config, [*fix.changes])).valid, (seed, str(fix))
            for change in fix.changes if len(fix.changes) > 1 else ():
                others = [one for one in fix.changes if one is not change]
                less_room = whole.fix(whole.judge(with_all(config, others)), *others)
                tight = less_room is None or less_room.distance > fix.distance  # it fits only just without
                assert tight, (seed, str(fix), f"{change} is needless")
                for less in values(with_all(config, others), change.key):
                    if less.distance < change.distance:
                        better = whole.fix(whole.judge(with_all(config, [*others, less])), *others, less)
                        assert better is None or better.distance >= fix.distance, (seed, str(fix), str(less))


@pytest.mark.parametrize(
    ("sections", "first"),
    [
        (
            {"parallel": {"context_parallel_size": 3, "pipeline_model_parallel_size": 5}},
            "parallel.pipeline_model_parallel_size=4 parallel.context_parallel_size=2",
        ),
        (
            {"parallel": {"tensor_model_parallel_size": 3}, "rollout": {"tensor_parallel_size": 3}},
            "rollout.tensor_parallel_size=4 parallel.tensor_model_parallel_size=4",
        ),
        (  # three wrong sizes in one product: one alone leaves it as wrong as it was
            {
                "parallel": {f"{size}_parallel_size": 3 for size in ("context", "tensor_model")}
                | {"pipeline_model_parallel_size": 5}
            },
            "parallel.pipeline_model_parallel_size=4 parallel.context_parallel_size=2 "
            "parallel.tensor_model_parallel_size=1",
        ),
        (
            {
                "parallel": {f"{size}_model_parallel_size": 7 for size in ("tensor", "pipeline")},
                "batch": SOUND["batch"] | {"num_generations": 7},
            },
            "batch.global_batch_size=35 parallel.pipeline_model_parallel_size=4 parallel.tensor_model_parallel_size=2",
        ),
    ],
)
def test_the_nearest_sizes_that_fit_together_are_offered(sections: dict[str, Any], first: str) -> None:
    raw = {name: SOUND.get(name, {}) | sections.get(name, {}) for name in SOUND.keys() | sections.keys()}
    assert {*first.split()} in [{*str(fix).split()} for fix in repair.offered(from_dict(raw))]


@pytest.mark.parametrize(
    ("cluster", "rollout", "first"),
    [
        (
            {"nodes": 2},
            {"engines_per_node": 3},
            "rollout.tensor_parallel_size=2 rollout.engines_per_node=2 parallel.tensor_model_parallel_size=2",
        ),
        ({"nodes": 4, "generation_nodes": 1}, {}, "rollout.tensor_parallel_size=4 cluster.nodes=5"),
    ],
    ids=["beside the ranks", "on nodes of their own"],
)
def test_engines_that_are_set_apart_and_ranks_are_fitted_to_each_other(
    cluster: dict[str, int], rollout: dict[str, int], first: str
) -> None:
    """Ranks too few for a layout: fewer engines, or engines of fewer GPUs, were no part of what mends that."""
    config = BASES["qwen2.5_32b_tp4_pp4"]
    sections = {
        "cluster": {"gpus_per_node": 8, "gpu": "H200", **cluster},
        "rollout": {"mode": "server", "tensor_parallel_size": 3, **rollout},
    }
    faults = [
        Change(f"{name}.{key}", None, value) for name, values in sections.items() for key, value in values.items()
    ]
    offered = repair.offered(with_all(config, faults))
    assert {*first.split()} in [{*str(fix).split()} for fix in offered], [*map(str, offered)]
    if "generation_nodes" not in cluster:
        assert {*first.split()} == {*str(offered[0]).split()}


def test_a_size_that_fits_larger_nodes_is_tried_before_nodes_are_changed() -> None:
    """An engine of 8 GPUs is over two nodes of 6, which is only planned: it was given up, and one of 4 offered."""
    faults = {
        "rollout.tensor_parallel_size": 6,
        "cluster.gpus_per_node": 6,
        "parallel.virtual_pipeline_model_parallel_size": 3,
    }
    config = with_all(BASES["llama3.1_70b_tp8_pp8"], [Change(key, None, value) for key, value in faults.items()])
    wanted = "rollout.tensor_parallel_size=8 cluster.gpus_per_node=8 parallel.virtual_pipeline_model_parallel_size=2"
    assert {*wanted.split()} in [{*str(fix).split()} for fix in repair.offered(config)]


def test_the_search_ends_when_its_room_is_used_up() -> None:
    config = drawn(300)[0]
    whole = nearest.Nearest(search.Search(config, None, make_plan(config)), 40, machines=True)
    assert whole.find(3) == [] and -60 < whole.room <= 0


def test_other_machines_and_far_repairs_come_last_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far, farther = (Fix((Change("parallel.pipeline_model_parallel_size", 5, size),)) for size in (4, 10, 32))
    asked = list[int]()
    nodes, pair = Fix((Change("cluster.nodes", 5, 5.5),)), Fix((Change("batch.global_batch_size", 9, 900),) * 2)
    config = drawn(300)[0]

    def found(self: nearest.Nearest, wanted: int, within: float) -> list[Fix]:
        asked.append(wanted)
        return [nodes] if self.machines else [near, far, farther]

    monkeypatch.setattr(nearest.Nearest, "find", found)
    monkeypatch.setattr(search.Search, "found", lambda self, limit, room: [pair])
    assert 2 * near.distance < far.distance < 4 * near.distance
    assert repair.offered(config) == [near, pair, nodes] and asked == [3, 1]


def test_rules_that_share_a_setting_count_once() -> None:
    """One change may mend both: a way that needs it was put behind farther ones."""
    config = drawn(300)[0]
    whole = nearest.Nearest(search.Search(config, None, make_plan(config)), 40, machines=True)
    one, two, three = (item for item in list(registry.rules())[:3])
    whole.least = {one: 3.0, two: 2.0, three: 0.5}
    whole.settings = {one: {"a", "b"}, two: {"b"}, three: {"c"}}
    assert whole._at_least({one, two, three}) == [3.0, 0.5] and whole._at_least({two, three}) == [2.0, 0.5]
