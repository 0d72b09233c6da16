"""The grades of exactness: which run has which, and where a person reads it.

Costs nothing. Catches a promise that a setting breaks, and a page that does not show it.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config import loader, paths
from gspo_hpc.config.derived import Overlaps, overlaps
from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning import exactness
from gspo_hpc.planning.estimates import devices
from gspo_hpc.planning.estimates.time import of_plan
from gspo_hpc.planning.plan import make_plan

CPU = {"platform": "cpu"}
EXACT = {"deterministic": True}
H100 = {"gpu": "H100-80GB"}
HEAD = ("rollout.engine.hf_overrides.head_dtype=model",)  # on GPUs that need it, or may


@pytest.mark.parametrize(
    ("sections", "grade", "settings"),
    [
        ({"cluster": CPU, "model": {"dtype": "float32"}}, "bitwise", ()),
        ({"cluster": CPU, "model": {"dtype": "float32"}, "run": EXACT}, "bitwise", ()),
        ({"cluster": CPU}, "journal-exact", ("rollout.dtype=float32",)),
        ({"cluster": CPU, "rollout": {"dtype": "float32"}}, "bitwise", ()),
        ({"cluster": H100}, "checkpoint-exact", ("run.deterministic=true",)),
        ({"cluster": H100, "run": EXACT}, "bitwise", ()),
        ({"cluster": {"gpu": "GB200"}, "run": EXACT}, "bitwise", ()),
        ({"cluster": {"gpu": "A100-80GB"}, "run": EXACT}, "journal-exact", HEAD),
        ({"cluster": {"gpu": "RTX 4090"}, "run": EXACT}, "journal-exact", HEAD),
        ({"run": EXACT}, "journal-exact", HEAD),
        ({"run": EXACT, "rollout": {"engine": {"hf_overrides": {"head_dtype": "model"}}}}, "bitwise", ()),
        ({"run": EXACT, "rollout": {"dtype": "float32"}}, "bitwise", ()),
        ({"cluster": H100, "run": EXACT, "rollout": {"engine": {"quantization": "fp8"}}}, "journal-exact", ()),
        ({"cluster": H100, "run": EXACT, "adapter": {"type": "lora"}}, "bitwise", ()),
        (
            {"cluster": H100, "run": EXACT, "adapter": {"type": "lora", "engine": "adapters"}},
            "journal-exact",
            ("adapter.engine=merged",),
        ),
        (
            {"cluster": H100, "run": EXACT, "rollout": {"engine": {"kv_cache_dtype": "auto", "enable_dbo": False}}},
            "bitwise",
            (),
        ),
        ({"cluster": H100, "run": EXACT, "model": {"fp8": "hybrid"}}, "checkpoint-exact", ("model.fp8=null",)),
        ({"cluster": H100, "run": EXACT, "model": {"provider": "mcore_bridge"}}, "checkpoint-exact", ()),
        (
            {"cluster": H100, "run": EXACT, "moe": {"token_dispatcher": "flex"}},
            "checkpoint-exact",
            ("moe.token_dispatcher=alltoall",),
        ),
    ],
)
def test_each_run_has_its_grade(sections: dict[str, Any], grade: str, settings: tuple[str, ...]) -> None:
    found = exactness.assess(from_dict(sections))
    assert (found.grade, found.settings) == (grade, settings)
    assert bool(found.reasons) == (grade != "bitwise")


def test_every_card_has_the_grade_of_its_generation() -> None:
    """NVIDIA lists compute capabilities: 7.0 and 7.5 are Volta and Turing, 8.0 to 8.9 Ampere and Ada."""
    older = "V100-16GB V100-32GB V100-PCIe-16GB V100-PCIe-32GB V100S-32GB T4-16GB "
    ampere = "A100-40GB A100-80GB A800-80GB A100-PCIe-40GB A100-PCIe-80GB A10-24GB A10G-24GB A30-24GB A40-48GB "
    ampere += "RTX3090-24GB RTX3090Ti-24GB RTXA5000-24GB RTXA6000-48GB "
    ada = "L4-24GB L20-48GB L40-48GB L40S-48GB RTX4080-16GB RTX4090-24GB RTX5000Ada-32GB RTX6000Ada-48GB"
    names = [*devices.DEVICES, *devices.OWNED]
    graded = {name: exactness.assess(from_dict({"cluster": {"gpu": name}, "run": EXACT})).grade for name in names}
    assert {name for name, grade in graded.items() if grade == "journal-exact"} == {*(older + ampere + ada).split()}


def test_the_plan_shows_it() -> None:
    found = make_plan(from_dict({})).to_json()["exactness"]
    assert found["grade"] == "checkpoint-exact" and found["settings"] == ["run.deterministic=true"]
    assert "VLLM_BATCH_INVARIANT" in found["cost"] and "newest checkpoint" in found["meaning"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", "fp8"),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 4}),
        ("enable_dbo", True),
        ("kv_cache_dtype", "fp8"),
        ("cpu_offload_gb", 4),
    ],
)
def test_each_argument_of_vllm_that_lowers_the_grade_does(name: str, value: Any) -> None:
    """The plan must not promise bits that docs/exactness.md denies, with `run.deterministic` or without."""
    sections: dict[str, Any] = {"cluster": H100, "rollout": {"engine": {name: value}}}
    exact = exactness.assess(from_dict(sections | {"run": EXACT}))
    assert exact.grade == "journal-exact" and [name in reason for reason in exact.reasons] == [True]
    assert any(name in reason for reason in exactness.assess(from_dict(sections)).reasons)


@pytest.mark.parametrize(
    ("platform", "deterministic"), [("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)]
)
def test_nothing_overlaps_where_ranks_are_added_up_in_their_order(platform: str, deterministic: bool) -> None:
    """Megatron would wait for a handle that such a sum does not have."""
    both = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    config = from_dict({"cluster": {"platform": platform}, "run": {"deterministic": deterministic}, "parallel": both})
    expected = not (platform == "cuda" and deterministic)
    assert overlaps(config) == Overlaps(expected, expected)
    assert overlaps(from_dict({"run": {"deterministic": deterministic}})) == Overlaps(False, False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_plan_hides_sums_only_where_they_overlap(deterministic: bool) -> None:
    preset = paths.PRESETS / "qwen3_8b_tp2_cp4_32k.yaml"
    seconds = []
    for overlapped in ("true", "false"):
        more = [f"parallel.overlap_grad_reduce={overlapped}", f"run.deterministic={str(deterministic).lower()}"]
        config = loader.load(preset, more)
        times, _ = of_plan(config, make_plan(config))
        assert times is not None
        seconds.append(times.seconds["update"])
    assert (seconds[0] == seconds[1]) == deterministic
