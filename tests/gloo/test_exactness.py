"""Effects of `run.deterministic`: nothing on CPUs, and on GPUs the order in which ranks are added up."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gloo import sums
from tests.gloo.layouts import Arrays
from tests.gloo.reference import assert_equal_steps

CASES = "ordered|steps-(one|dp2-distributed|tp2-sp)(-deterministic)?"


@pytest.mark.parametrize("layout", ["one", "dp2-distributed", "tp2-sp"])
def test_on_cpus_deterministic_runs_have_the_same_bits(layout: str, results: dict[str, Arrays]) -> None:
    plain, exact = results[f"steps-{layout}"], results[f"steps-{layout}-deterministic"]
    assert plain.keys() == exact.keys()
    for name, array in plain.items():
        assert np.array_equal(array, exact[name], equal_nan=True), name


@pytest.mark.parametrize("allocation", sums.PLACES)
def test_ranks_are_added_up_in_their_order(allocation: str, results: dict[str, Arrays]) -> None:
    """Whichever nodes they are on, and whichever comes first."""
    found = [one.removeprefix(f"{allocation}: ") for one in results["ordered"]["sums"].tolist() if allocation in one]
    for dtype in ("torch.float32", "torch.bfloat16"):
        names = [f"{what}-{dtype}-{count}" for what in ("sum", "mean", "strided") for count in (1, 1001)]
        assert {*names, f"scattered-{dtype}", f"listed-{dtype}"} <= set(found)
    assert "gloo" not in found, "gloo adds in another order, else this would show nothing"
    assert {"integers", "pair"} <= set(found)


def test_steps_with_ordered_sums_equal_those_of_one_rank(results: dict[str, Arrays]) -> None:
    found = {name: array for name, array in results["ordered"].items() if name != "sums"}
    assert_equal_steps(results["steps-one"], found)
