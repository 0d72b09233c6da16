"""A mixture of experts in bfloat16, on a real engine: faults are told apart, and health is no fault."""

from __future__ import annotations

import re

import pytest

from tests.gloo.layouts import Arrays
from tests.gloo.mismatches import OVERRIDES, SWAPPED

CASES = "mismatched"
SAYS = {
    "stale": "stale prefix cache: .* took 64 tokens",
    "swapped": "experts? [36]( and [36])? of layer 2.*; expert 3 of layer 2 has those of the trainer's expert 6, ",
    "guessed": "experts? [36]( and [36])? of layer 2[^;]*$",
    "unseen": "an engine has other experts than the trainer: expert 3 of layer 2 has those of the trainer's expert 6, "
    r"expert 6 of layer 2 has those of the trainer's expert 3\. Report",
    "scaled": r"has other experts than the trainer: expert 3 of layer 2 has those of none of the trainer's\. Report",
    "theta": "wrong rotary embeddings: the engine computes as the trainer would with rope_theta 5000",
    "scaling": "wrong rotary embeddings: the engine computes as the trainer would with no rope scaling",
    "engine-theta": "^an engine computes with other constants .*: wrong rotary embeddings: the engine computes as the "
    "trainer would with rope_theta 10000. Both read",
    "engine-yarn": "as the trainer would with yarn rope scaling by 4 of a context of 64 tokens",
    "engine-partial": "the engine rotates 16 of the 32 numbers of a head, the trainer 32",
    "engine-norm": "norms with rms_norm_eps 1e-05 in the engine, 1e-06 here",
    "weights": "all tokens differ",
    "head16-first": r"rounds its logits to 16 bits: they are multiples of 0\.\d+, although .*accept",
    "head16-resumed": r"rounds its logits to 16 bits: they are multiples of 0\.\d+, although .*accept",
    "head": r"rounds its logits to 16 bits: they are multiples of 0\.",
}


def test_no_case_runs_that_no_test_looks_at(
    every: dict[str, Arrays], results: dict[str, Arrays], request: pytest.FixtureRequest
) -> None:
    """This file alone takes a minute, all of the folder ten times as long."""
    asking = {item.path.stem for item in request.session.items if "every" in getattr(item, "fixturenames", ())}
    assert results.keys() == {CASES} and (asking != {"test_mismatch"} or every.keys() == {CASES})


@pytest.mark.parametrize("fault", SAYS)
def test_faults_are_named(fault: str, results: dict[str, Arrays]) -> None:
    assert SWAPPED == (".layers.2.", 3, 6)
    assert re.search(SAYS[fault], str(results["mismatched"][fault]))


def test_log_probs_alone_name_no_wrong_constants(results: dict[str, Arrays]) -> None:
    """Gaps of a norm are not even seen: so constants are compared by value."""
    said = {name: str(results["mismatched"][f"{name}-unsaid"]) for name in OVERRIDES}
    assert "tokens with several keys differ far more than others: query or key weights" in said["engine-theta"]
    assert said["engine-norm"] == ""


def test_a_healthy_engine_is_no_fault_though_tokens_lie_near_a_tie_of_a_router(results: dict[str, Arrays]) -> None:
    """Rounding sends them to another expert; noise of its size in the trainer tells how far that moves log-probs."""
    assert results["mismatched"]["healthy"].tolist() == [""] * 3


def test_where_any_gap_is_allowed_an_engine_without_a_fault_is_too(results: dict[str, Arrays]) -> None:
    assert str(results["mismatched"]["none"]) == ""


def test_an_engine_with_an_fp32_head_agrees_and_its_logits_are_not_rounded(results: dict[str, Arrays]) -> None:
    clean, again, healed = (results["mismatched"][name] for name in ("clean", "again", "healed"))
    (_, mean, weighted_max, weighted, step) = clean
    assert 0.0 < weighted < 0.04 and 0.0 < mean < 0.05 and weighted_max < 0.02 and step == 0.0
    for later in (again, healed):
        assert (later[:4] == clean[:4]).all(), "the same weights, sent again"


def test_a_rounded_head_is_no_larger_than_rounding_elsewhere_and_may_be_accepted(results: dict[str, Arrays]) -> None:
    """The grid of the logits shows a rounded head of a bfloat16 model; the size of the gap does not."""
    clean, allowed = results["mismatched"]["clean"], results["mismatched"]["allowed"]
    assert allowed[3] < 4.0 * clean[3] and 2.0**-10 <= allowed[4] <= 0.5
