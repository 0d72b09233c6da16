"""GPUs before Ampere (V100, T4): no bfloat16, no FlashAttention, and engines only from compute capability 7.5 on.

Catches a plan that is called valid and ends in the first forward pass on such a card. A few seconds.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.launch.checks import require
from gspo_hpc.planning import exactness
from gspo_hpc.planning.fixes import repair, search
from gspo_hpc.planning.fixes.change import with_changes
from gspo_hpc.planning.plan import make_plan
from tests.unit.planning.test_planned_only import WHOLE

FLOAT16: dict[str, Any] = {"dtype": "float16"}
SMALL = {"path": "Qwen/Qwen2.5-0.5B-Instruct"}
BFLOAT16, LAYERS = "bfloat16_needs_ampere", "transformer_engine_needs_ampere"


def sections(gpu: str, model: dict[str, Any], **others: dict[str, Any]) -> dict[str, Any]:
    """Return a whole config for one node of four of these GPUs, whose update fits on a T4."""
    memory = {"recompute_granularity": "full"}
    cluster = {"gpus_per_node": 4, "gpu": gpu} | others.pop("cluster", {})
    return WHOLE | {"cluster": cluster, "model": SMALL | model, "memory": memory} | others


@pytest.mark.parametrize(
    ("gpu", "model", "others", "broken"),
    [
        ("T4", {}, {}, {BFLOAT16}),
        ("V100", {}, {}, {BFLOAT16}),
        ("V100S", {"layers": "torch"}, {}, {BFLOAT16}),
        ("T4", FLOAT16, {}, set()),  # for which auto takes torch's layers
        ("T4", {"dtype": "float32"}, {}, set()),
        ("T4", FLOAT16, {"rollout": {"dtype": "bfloat16"}}, {BFLOAT16}),
        ("T4", FLOAT16 | {"layers": "transformer_engine"}, {}, {LAYERS}),
        ("T4", FLOAT16 | {"attention_backend": "flash"}, {}, {LAYERS}),
        ("T4", {"provider": "mcore_bridge"}, {"batch": WHOLE["batch"] | {"share_prompts": False}}, {BFLOAT16, LAYERS}),
        ("A10", FLOAT16 | {"attention_backend": "flash", "layers": "transformer_engine"}, {}, set()),
        ("A10", {}, {}, set()),
        ("RTX3090", {}, {}, set()),
        ("T4", {}, {"cluster": {"platform": "cpu"}}, set()),  # where cluster.gpu says nothing
    ],
)
def test_what_a_card_computes_in(
    gpu: str, model: dict[str, Any], others: dict[str, dict[str, Any]], broken: set[str]
) -> None:
    plan = make_plan(from_dict(sections(gpu, model, **others)))
    assert {item.rule for item in plan.broken} == broken


def test_the_message_names_the_settings_the_card_and_what_to_give() -> None:
    plan = make_plan(from_dict(sections("Tesla T4", {}, rollout={"dtype": "bfloat16"})))
    (item,) = plan.broken
    assert item.message == (
        "model.dtype and rollout.dtype: bfloat16 needs GPUs of compute capability 8.0 or newer, and T4-16GB has 7.5: "
        "give float16 or float32"
    )


def test_fixes_change_what_the_card_lacks() -> None:
    found = [str(fix) for fix in search.find(from_dict(sections("T4", {})))]
    assert found == ["model.dtype=float16", "model.dtype=float32"]
    found = [str(fix) for fix in search.find(from_dict(sections("T4", FLOAT16 | {"attention_backend": "flash"})))]
    assert "model.attention_backend=auto" in found and not any("cluster" in fix for fix in found)


def test_no_fix_changes_the_type_for_a_card_that_takes_the_one_that_is_given() -> None:
    """A T4 holds no 7B, which shows only with a type that it takes; an H100 takes bfloat16."""
    found = search.find(from_dict(sections("T4", {"path": "Qwen/Qwen2.5-7B-Instruct"})))
    cards = [fix for fix in found if any(change.key == "cluster.gpu" for change in fix.changes)]
    assert cards and all(len(fix.changes) == 1 for fix in cards), [str(fix) for fix in cards]
    config = from_dict(sections("T4", {"path": "Qwen/Qwen2.5-7B-Instruct"}, cluster={"gpus_per_node": 2}, memory={}))
    offered = repair.offered(config)
    assert [str(fix) for fix in offered] == ["cluster.gpu=B200-180GB"]  # the nearest alone


def test_where_other_cards_are_enough_a_nearer_repair_that_keeps_these_goes_before_them() -> None:
    """Memory is lacking, too, which shows only with a type that a T4 takes: so no layout was looked for."""
    config = from_dict(sections("T4", {"path": "Qwen/Qwen3-4B"}, cluster={"gpus_per_node": 8}, memory={}))
    first, *others = repair.offered(config)
    keys = {change.key for change in first.changes}
    assert "model.dtype" in keys and len(keys) > 2 and not any(key.startswith("cluster.") for key in keys)
    assert make_plan(with_changes(config, first.changes)).valid
    assert others and all(fix.distance > first.distance for fix in others)
    assert {change.key for fix in others for change in fix.changes} == {"cluster.gpu"}


def test_a_repair_that_keeps_the_cards_is_offered_also_if_it_is_somewhat_farther_than_another_one() -> None:
    section = sections("V100-16GB", {"path": "Qwen/Qwen2.5-1.5B-Instruct"}, cluster={"gpus_per_node": 2})
    config = from_dict(section)
    first, *others = repair.offered(config)
    assert {change.key.partition(".")[0] for change in first.changes} == {"model", "parallel", "memory"}
    assert [[change.key for change in fix.changes] for fix in others] == [["cluster.gpu"]]
    assert others[0].distance < first.distance <= 2 * others[0].distance
    assert repair.find_all(config, None, others[0].distance, further=True) == []


def test_tensors_of_transformer_engine_are_not_counted() -> None:
    older, newer = (make_plan(from_dict(sections(gpu, FLOAT16))).to_json()["memory"] for gpu in ("T4", "A10"))
    assert newer["phases"]["update"]["unused_gradients"] > 0
    assert "unused_gradients" not in older["phases"]["update"]


@pytest.mark.parametrize(("gpu", "runs"), [("V100-16GB", False), ("V100S", False), ("T4", True), ("A10", True)])
def test_engines_need_turing(gpu: str, runs: bool) -> None:
    """vLLM's page on installing it demands 7.5 from 0.21 on; torch 2.11 has no kernels for 7.0 in any build."""
    config = from_dict(sections(gpu, FLOAT16))
    plan = make_plan(config)
    assert plan.valid and [item.feature for item in plan.not_run] == ([] if runs else ["gpu_before_turing"])
    if runs:
        assert require(config) == plan
    else:
        with pytest.raises(ValueError, match=r"has compute capability 7\.0, and vLLM from 0\.21 on"):
            require(config)


@pytest.mark.parametrize(
    ("gpu", "model", "notes"),
    [("T4", FLOAT16, 1), ("V100", FLOAT16, 1), ("T4", {"dtype": "float32"}, 2), ("A10", FLOAT16, 0)],
)
def test_a_note_says_what_times_leave_aside(gpu: str, model: dict[str, Any], notes: int) -> None:
    plan = make_plan(from_dict(sections(gpu, model)))
    found = [note for note in plan.notes if "FlashAttention needs" in note or "in float32 is timed" in note]
    assert len(found) == notes
    told = "engines take vLLM's attention in Triton (before 0.24 with rollout.engine.attention_backend=TRITON_ATTN)"
    assert any(told in note for note in found) == (gpu == "T4"), "no engine runs on a V100"


def test_no_setting_makes_their_engines_independent_of_the_batch() -> None:
    exact = exactness.assess(from_dict(sections("T4", FLOAT16, run={"deterministic": True, "max_steps": 2})))
    assert exact.grade == "journal-exact" and exact.settings == ()
    assert any("batch-invariant kernels need GPUs of compute capability 8.0" in reason for reason in exact.reasons)
