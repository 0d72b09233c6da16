"""Every objective on two ranks against one: losses, ratios and gradients of an update.

Takes 25 s, most of it the start of the ranks. It would catch a mean over the part of a prompt or of a sequence that a
rank has, a weight per sequence from the tokens of one context-parallel rank, and a divisor of one micro-batch.
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
    one, many = results["objectives-one"], results[f"objectives-{layout}"]
    assert one.keys() == many.keys() and len(one) > 30
    for name, values in one.items():
        scale = np.abs(values).max()
        assert np.abs(many[name] - values).max() <= 1e-5 * max(1.0, scale), name
        assert scale > 1e-4 or not name.endswith("gradient"), name
