"""Every objective on two ranks against one: losses, ratios and gradients of an update.

Takes 25 s, most of it the start of the ranks. It would catch a mean over the part of a prompt or of a sequence that a
rank has, a weight per sequence from the tokens of one context-parallel rank, a divisor of one micro-batch, and a
threshold of the entropy over the tokens of one rank.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.gloo.layouts import OBJECTIVES_IN, Arrays

CASES = "objectives-.*"


@pytest.mark.parametrize("layout", OBJECTIVES_IN)
def test_every_objective_is_the_same_in_other_layouts_and_micro_batches(
    layout: str, results: dict[str, Arrays]
) -> None:
    """The entropies, the tokens chosen by them, and whatever an update finds."""
    one, many = results["objectives-one"], results[f"objectives-{layout}"]
    assert one.keys() == many.keys() and len(one) > 30
    for name, values in one.items():
        scale = np.abs(values).max()
        assert np.abs(many[name] - values).max() <= 1e-5 * max(1.0, scale), name
        assert scale > 1e-4 or not name.endswith("gradient"), name


@pytest.mark.parametrize("layout", ["one", *OBJECTIVES_IN])
def test_the_tokens_with_the_highest_entropy_of_the_whole_batch_are_chosen(
    layout: str, results: dict[str, Arrays]
) -> None:
    found = results[f"objectives-{layout}"]
    entropies, selected = found["top_entropy/entropies"], found["top_entropy/selected"]
    count = -(-3 * len(entropies) // 10)
    assert len(selected) == len(entropies) and selected.sum() == count
    assert entropies[selected == 1].min() > entropies[selected == 0].max() > 0
