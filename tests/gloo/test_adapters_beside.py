"""Adapters beside the weights of a real engine, from one rank in bfloat16 and from two tensor-parallel ones in float32.

Five starts of an engine: a minute and a half beside three busy processes. It would catch: adapters of an older version
that an engine goes on with, on any way to it (a sync that did not arrive, a start, a deep sleep); weights that travel
again although they are there, or do not travel although they are gone; and adapters that are rounded more than merged
ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gspo_hpc.config.section import replace
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import adapters, parameters
from tests.gloo import cases
from tests.gloo.layouts import ADAPTED_BESIDE, LORA, Arrays

CASES = "adapted-beside-.*"


@pytest.fixture(params=ADAPTED_BESIDE)
def found(request: pytest.FixtureRequest, results: dict[str, Arrays]) -> Arrays:
    return results[f"adapted-beside-{request.param}"]


def test_only_adapters_travel_to_an_engine_that_has_its_weights(found: Arrays) -> None:
    """And the weights before them to one that started, or that slept deeply."""
    both = ["parts", "adapter_parts"]
    assert found["passes"].tolist() == [*both, "adapter_parts", "adapter_parts"]
    assert found["passes-refilled"].tolist() == found["passes-restarted"].tolist() == both
    assert found["passes-merged"].tolist() == ["parts"]
    whole, *adapted = found["bytes"].tolist()
    assert found["bytes-merged"].tolist() == [whole] and len(set(adapted)) == 1 and adapted[0] < whole / 3


@pytest.mark.parametrize("name", ADAPTED_BESIDE)
def test_as_many_bytes_travel_as_the_plan_says(name: str, models: dict[str, Path], results: dict[str, Arrays]) -> None:
    world, model, sections = ADAPTED_BESIDE[name]
    arch, config = architecture.read(models[model]), cases.config(str(models[model]), world, **LORA, **sections)
    config = replace(config, adapter=replace(config.adapter, engine="adapters"))
    whole, adapted, *_ = results[f"adapted-beside-{name}"]["bytes"].tolist()
    assert adapted == adapters.travelling(arch, config)
    assert whole == parameters.parameters(arch) * (2 if name.endswith("16") else 4)


def test_engines_compute_with_the_newest_adapters(found: Arrays) -> None:
    """The same values give the same log-probs bit for bit: as another version, after a deep sleep, after a start."""
    first, second = found["logprobs-first"], found["logprobs-second"]
    assert np.abs(first - second).max() > 0.05
    for again in ("again", "refilled", "restarted"):
        assert np.array_equal(first, found[f"logprobs-{again}"]), again
    assert found["fingerprint-first"] == found["fingerprint-again"] != found["fingerprint-second"]


def test_the_gate_stops_a_run_whose_engine_kept_old_adapters(found: Arrays) -> None:
    assert "engine and trainer disagree on the probe" in str(found["stale"])
    assert found["gap-healed"][0] < 0.3


def test_two_ranks_agree_with_their_engine_in_float32(results: dict[str, Arrays]) -> None:
    found = results["adapted-beside-tp2-sp"]
    for name in ("first", "second", "again", "healed", "merged"):
        assert 0 < found[f"gap-{name}"][0] < 1e-4, name


def test_nothing_of_the_adapters_is_rounded_away_in_16_bits(results: dict[str, Arrays]) -> None:
    """Engines get the trainer's own matrices; of what merging adds to weights it loses a part, but not in float32.

    On log-probs of so small a model the loss is hidden by what activations round; yet it is not less than nothing.
    """
    narrow, wide = results["adapted-beside-one-bfloat16"], results["adapted-beside-tp2-sp"]
    assert narrow["lost-beside"] == wide["lost-beside"] == 0.0
    assert narrow["lost-merged"] > 0.02 > 1e-5 > wide["lost-merged"]
    assert narrow["gap-again"][1] < 1.1 * narrow["gap-merged"][1]
