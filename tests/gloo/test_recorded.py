"""A step that keeps log-probs for the record trains as one that does not, and keeps what a pass over the model finds.

In every layout the log-probs of the update's own forward pass come to the ranks that hold the groups, and no other
pass is made. It takes a minute. The tests would catch log-probs of another micro-batch or another place in a sample,
parts of context-parallel ranks that are left out, a stage that has none, and any bit that the record changes.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.gloo import cases
from tests.gloo.layouts import RECORDED, Arrays

CASES = "(steps|recorded)-(" + "|".join(RECORDED) + ")"


@pytest.mark.parametrize("layout", RECORDED)
def test_the_record_changes_no_bit(layout: str, results: dict[str, Arrays]) -> None:
    plain, recorded = results[f"steps-{layout}"], results[f"recorded-{layout}"]
    rest = {name: array for name, array in recorded.items() if not name.startswith("kept/")}
    assert plain.keys() == rest.keys() and len(recorded) > len(rest)
    assert [name for name in plain if not np.array_equal(plain[name], rest[name])] == []


@pytest.mark.parametrize("layout", RECORDED)
def test_what_is_kept_is_what_a_pass_over_the_model_finds(layout: str, results: dict[str, Arrays]) -> None:
    """The first step's weights are those of the pass before it. What has no advantage is not computed."""
    arrays = results[f"recorded-{layout}"]
    kept = {name: array for name, array in arrays.items() if name.startswith("kept/")}
    computed = {
        f"kept/{group.slot}-{index}"
        for group in cases.groups()
        for index, completion in enumerate(group.completions)
        if group.slot in (0, 2) and completion.advantage != 0.0
    }
    assert kept.keys() == computed and len(computed) > 4
    for name, array in kept.items():
        np.testing.assert_allclose(array, arrays[name.replace("kept", "logprobs")], atol=1e-5, err_msg=name)
