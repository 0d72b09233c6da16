"""A page of fixes names only those values of a setting that are near: random slips and worked cases (5 s).

Catches 8 offered for a size of 3 beside 2 and 4, 32 nodes beside 4, 127 beside 128, and a pair of changes that gains
nothing over one of them alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import candidates, distances, repair, search
from gspo_hpc.planning.fixes.change import Change, Fix, is_near, is_round
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import with_value
from tests.unit.planning.test_nearest_repairs import ALL, FAULTS


def refused(seed: int) -> Config:
    draw = random.Random(seed)
    while True:
        key = draw.choice(sorted(FAULTS))
        config = with_value(ALL[draw.choice(sorted(ALL))], key, draw.choice(FAULTS[key]))
        if make_plan(config).broken:
            return config


@pytest.mark.parametrize("seed", range(500, 530))
def test_there_is_one_number_on_each_side_at_most_and_both_are_near(seed: int) -> None:
    numbers: dict[str, list[Change]] = {}
    fixes = [fix for fix in search.find(refused(seed)) if not is_round(fix.changes[0])]
    for change in (fix.changes[0] for fix in fixes if len(fix.changes) == 1):
        if distances.is_number(change.before) and distances.is_number(change.value):
            numbers.setdefault(change.key, []).append(change)
    for key, changes in numbers.items():
        assert len({change.value > change.before for change in changes}) == len(changes), list(map(str, changes))
        near, far = min(one.distance for one in changes), max(one.distance for one in changes)
        assert far <= max(4 * near, distances.weight(key) / 2), list(map(str, changes))
    singles = {fix.changes[0].key: fix.distance for fix in reversed(fixes) if len(fix.changes) == 1}
    for fix in (fix for fix in fixes if len(fix.changes) == 2):
        assert all(fix.distance < singles.get(change.key, fix.distance + 1) for change in fix.changes), str(fix)


def single(key: str, before: Any, value: Any) -> Fix:
    return Fix((Change(key, before, value),))


@pytest.mark.parametrize(
    ("key", "before", "values", "shown"),
    [
        ("parallel.context_parallel_size", 3, [4, 2, 8, 1, 16], [4, 2]),
        ("batch.num_generations", 129, [128, 127, 256, 64], [128]),
        ("batch.num_generations", 8, [16, 19, 4, 25], [16, 4]),
        ("batch.num_generations", 6, [7, 8, 4, 14], [7, 8, 4]),
        ("cluster.nodes", 3, [8, 16, 32, 64], [8]),
        ("rollout.engines_per_node", 5, [4, 2, None], [4, None]),
        ("cluster.gpu", "H100-80GB", ["H200-141GB", "B200-180GB"], ["H200-141GB", "B200-180GB"]),
    ],
)
def test_what_is_near_is_shown(key: str, before: Any, values: list[Any], shown: list[Any]) -> None:
    config = ALL["sound"]
    found = search.Search(config, None, make_plan(config)).shown([single(key, before, value) for value in values], 6)
    assert [fix.changes[0].value for fix in found] == shown


def test_of_pairs_with_the_same_settings_those_about_as_near_are_shown() -> None:
    config = ALL["sound"]
    pairs = [
        Fix((Change("batch.num_generations", 7, groups), Change("batch.global_batch_size", 32, 40)))
        for groups in (8, 6, 28)
    ]
    found = search.Search(config, None, make_plan(config)).shown(pairs, 6)
    assert [fix.changes[0].value for fix in found] == [8, 6]


def test_what_a_config_says_wrong_may_be_a_list() -> None:
    """Changes of it were put into a set."""
    config = with_value(with_value(ALL["sound"], "rollout.engine.max_num_seqs", []), "batch.num_generations", 7)
    assert search.find(config) or repair.offered(config)


def test_on_the_other_side_a_number_is_near_up_to_four_times_the_first_distance() -> None:
    """80 is a third of a doubling from a batch of 100; 240 is less than four times as far, and 300 is farther."""
    first = [single("batch.global_batch_size", 100, 80)]
    assert is_near(single("batch.global_batch_size", 100, 240), first)
    assert not is_near(single("batch.global_batch_size", 100, 300), first)


@pytest.mark.parametrize(
    ("before", "value", "round_"),
    [(6, 8, True), (23, 32, True), (22, 32, False), (5, 8, False), (6, 4, False), (7, 9, False)],
)
def test_a_power_of_two_is_preferred_less_than_half_a_doubling_away(before: int, value: int, round_: bool) -> None:
    assert is_round(Change("batch.num_generations", before, value)) is round_


def test_two_changes_are_near_up_to_half_as_far_again_as_the_first() -> None:
    first, near, far = (
        Fix((Change("batch.global_batch_size", 64, size), Change("batch.num_generations", 8, group)))
        for size, group in ((128, 16), (252, 4), (300, 4))
    )
    assert 1.4 * first.distance < near.distance < 1.5 * first.distance < far.distance < 3 * first.distance
    assert is_near(near, [first]) and not is_near(far, [first])
    larger = Fix((Change("batch.global_batch_size", 64, 252), Change("batch.num_generations", 8, 16)))
    assert not is_near(larger, [first]), "both are larger, and none is nearer"


def test_multiples_on_both_sides_of_a_number_are_tried() -> None:
    """A size that is a multiple, and yet no fix, has a nearest one below it and two above."""
    assert candidates._multiples(8, 96) == {8, 16, 88, 96, 104, 112}
    assert candidates._multiples(8, 100) == {8, 16, 88, 96, 104, 112}
    assert candidates._multiples(8, 3) == {8, 16}
