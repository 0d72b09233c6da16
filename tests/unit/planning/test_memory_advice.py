"""Remedies that a plan names for a trainer that does not fit, or fits only just, are enough by its estimate."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, memory, phases
from gspo_hpc.planning.estimates.memory import Estimate
from gspo_hpc.planning.plan import Models, make_plan
from gspo_hpc.planning.settings import with_value
from gspo_hpc.planning.suggest import savings
from tests.unit.planning.test_memory_estimate import SHARE, advised, made, overridden

MACHINES = ("other settings or machines (gspo-hpc suggest)", "more GPUs that train, or GPUs with more memory")
ROOMY = {"tensor_parallel_size": 8, "engine": {SHARE: 0.9}}


@pytest.mark.parametrize(
    ("model", "machines"),
    [("Qwen2.5-32B", MACHINES[0]), ("Qwen2.5-72B", MACHINES[1]), ("Qwen3-235B-A22B", MACHINES[1])],
)
def test_a_model_that_is_too_large_needs_more_than_recomputation(model: str, machines: str) -> None:
    """Its gradients alone fill a card, so neither smaller activations nor an optimizer elsewhere are of use."""
    config = made(
        cluster={"gpu": "H100", "nodes": 1},
        model={"path": model},
        parallel={"tensor_model_parallel_size": 1},
        batch={"micro_batch_tokens": 32768},
        rollout=ROOMY,
    )
    message = next(item.message for item in make_plan(config).broken if item.rule == "trainer_fits_gpu_memory")
    assert message.endswith(f"out of memory; {machines}"), message


def test_two_changes_are_named_together_where_neither_is_enough() -> None:
    config = made(
        cluster={"gpu": "H100", "nodes": 1},
        model={"path": "Qwen2.5-14B"},
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        batch={"micro_batch_tokens": 65536},
        rollout=ROOMY,
    )
    (broken,) = make_plan(config).broken
    ways = advised(broken.message)
    assert ways and all(len(way) == 2 for way in ways), broken.message
    for way in ways:
        assert make_plan(overridden(config, way)).valid
        assert all(not make_plan(overridden(config, [setting])).valid for setting in way)


@given(
    st.sampled_from(
        [("Qwen2.5-7B", 1), ("Qwen2.5-14B", 2), ("Qwen2.5-32B", 4), ("Qwen2.5-72B", 8), ("Qwen3-30B-A3B", 1)]
    ),
    st.sampled_from(["A100-40GB", "A100-80GB", "H100", "H200", "B200"]),
    st.sampled_from([8192, 16384, 65536]),
    st.booleans(),
    st.sampled_from([None, "full"]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["0", "1000G"]),
)
@settings(max_examples=200, deadline=None)
def test_what_a_trainer_is_advised_is_enough(
    model: tuple[str, int],
    gpu: str,
    tokens: int,
    distributed: bool,
    granularity: str | None,
    nodes: int,
    host: str,
) -> None:
    """Each way that is named makes the trainer fit, or leaves as much as a warning asks for, and breaks no rule."""
    name, tp = model
    config = made(
        cluster={"gpu": gpu, "nodes": nodes},
        model={"path": name},
        parallel={"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1},
        batch={"micro_batch_tokens": tokens, "logprob_micro_batch_tokens": 2 * tokens, "global_batch_size": 1024},
        memory={"recompute_granularity": granularity, "offload_trainer": distributed},
        optimizer={"distributed": distributed},
        rollout=ROOMY,
        slurm={"mem": host},
    )
    plan = make_plan(config)
    rules = {item.rule for item in plan.broken}
    refused = [item.message for item in plan.broken if item.rule == "trainer_fits_gpu_memory"]
    little = (text for text in plan.warnings if "are left for peaks" in text or "may run out of memory" in text)
    tight = [re.sub(r"(left for peaks|may run out)[^;]*; ", r"\1: ", text) for text in little]
    for message, least in (*((text, None) for text in refused), *((text, phases.HEADROOM) for text in tight)):
        assert message.endswith(MACHINES), message
        for way in advised(message):
            changed = make_plan(overridden(config, way))
            now = {item.rule for item in changed.broken}
            assert "trainer_fits_gpu_memory" not in now and now <= rules, (way, message)
            assert changed.memory is not None and changed.memory.busiest.total <= changed.memory.card, (way, message)
            assert least is None or changed.memory.headroom >= least, (way, message)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_share_that_an_engine_is_advised_to_take_beside_a_trainer_that_stays_leaves_room_for_a_sync(
    tp: int,
) -> None:
    """A sync brings buckets beside the cache: with the largest share for generation alone it would not fit."""
    config = made(
        cluster={"gpu": "H100", "nodes": 1},
        model={"path": "Qwen3-8B"},
        parallel={"tensor_model_parallel_size": tp, "sequence_parallel": True},
        memory={"offload_trainer": False, "recompute_granularity": "full"},
        rollout={"tensor_parallel_size": 2},
    )
    (message,) = (item.message for item in make_plan(config).broken if item.rule == "engine_fits_gpu_memory")
    ways = [way for way in advised(message) if way[0].startswith(f"rollout.engine.{SHARE}")]
    assert ways
    for way in ways:
        assert make_plan(overridden(config, way)).valid, (way, message)


@pytest.mark.parametrize(
    ("left", "told"), [(0.09, "9% are left for peaks, less than 10%; "), (-0.01, "so the run may run out of memory; ")]
)
def test_a_warning_says_what_is_likely_to_run_out(monkeypatch: pytest.MonkeyPatch, left: float, told: str) -> None:
    """With as little as is not enough for fragmentation, the words are those of `suggest`."""
    monkeypatch.setattr(Estimate, "headroom", left + 0.001)
    config = made(parallel={"tensor_model_parallel_size": 2}, memory={"recompute_granularity": "full"})
    (warning,) = (text for text in make_plan(config).warnings if "left for peaks" in text or "fragmentation" in text)
    assert told in warning


@pytest.mark.parametrize(("more", "told"), [(0.005, False), (0.02, True)])
def test_a_setting_is_worth_a_change_if_it_leaves_a_hundredth_of_the_card(more: float, told: bool) -> None:
    """Recomputation is the first that is tried."""
    longest = 4096 + 2048
    config = made(
        cluster={"gpu": "H100", "nodes": 1},
        model={"path": "Qwen2.5-7B"},
        batch={"micro_batch_tokens": longest},
        rollout={"max_prompt_length": 2048, "max_response_length": 4096},
    )
    arch, device = architecture.find(config), devices.find("H100")
    assert arch is not None and device is not None
    changed = with_value(config, "memory.recompute_granularity", "full")
    before: Any = SimpleNamespace(headroom=memory.estimate(arch, changed, device).headroom - more)
    found = savings.roomier(arch, device, config, before, Models())
    assert found is not None and (found[0] == "memory.recompute_granularity=full") == told


def test_a_setting_that_leaves_a_run_above_its_gpu_is_no_help() -> None:
    """Recomputation alone would leave more of the card, and still run out of memory; so would everything together."""
    config = made(
        cluster={"gpu": "H100", "nodes": 1}, model={"path": "Qwen2.5-32B"}, batch={"micro_batch_tokens": 6144}
    )
    arch, device = architecture.find(config), devices.find("H100")
    assert arch is not None and device is not None
    again = memory.estimate(arch, with_value(config, "memory.recompute_granularity", "full"), device)
    before = memory.estimate(arch, config, device)
    assert before.headroom < again.headroom < 0 and savings.roomier(arch, device, config, before, Models()) is None
