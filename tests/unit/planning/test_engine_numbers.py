"""Numbers of `rollout.engine` that are written as people write them: what to write instead (milliseconds).

Its keys are free-form, so the loader does not know which of them are numbers; the rules do.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.loader import ConfigError, from_dict, load
from gspo_hpc.planning.fixes import repair, search
from gspo_hpc.planning.plan import make_plan


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("max_num_batched_tokens", "16k", "(16k) must be a whole number, 1 or more; write 16000 or 16384"),
        ("max_num_seqs", "0o10", "(0o10) must be a whole number, 1 or more; write 8"),
        ("max_num_seqs", "1,024", "; write 1024"),
        ("max_num_seqs", 1e3, "(1000.0) must be a whole number, 1 or more; write 1000"),
        ("max_num_seqs", "90%", "; it is a number, not a share"),
        ("max_num_seqs", 0.0, "(0.0) must be a whole number, 1 or more"),
        ("gpu_memory_utilization", "90%", "(90%) must be above 0 and at most 1; write 0.9"),
        ("gpu_memory_utilization", 90, "(90) must be above 0 and at most 1; write 0.9 for 90 %"),
        ("gpu_memory_utilization", 101, "(101) must be above 0 and at most 1"),
        ("kv_cache_memory_bytes", "4G", "must be a number, 0 or more; write 4000000000 or 4294967296"),
        ("kv_cache_memory_bytes", -1, "(-1) must be a number, 0 or more"),
        ("block_size", -1, "(-1) must be a number above 0"),
        ("block_size", 0, "(0) must be a number above 0"),
        ("max_logprobs", -2, "(-2) must be a number, 0 or more, or -1 for the whole vocabulary"),
        ("cpu_offload_gb", -0.5, "(-0.5) must be a number, 0 or more"),
        ("data_parallel_size", "2k", "must be 1: rollout.engines_per_node says how many engines there are"),
    ],
)
def test_what_to_write_is_said(key: str, value: Any, told: str) -> None:
    (broken,) = make_plan(from_dict({"rollout": {"engine": {key: value}}})).broken
    assert broken.rule == "engine_argument_value" and broken.message.endswith(told)


@pytest.mark.parametrize(
    ("key", "value"), [("kv_cache_memory_bytes", None), ("block_size", 32), ("max_logprobs", -1), ("revision", "90%")]
)
def test_what_may_be_given_is_not_refused(key: str, value: Any) -> None:
    assert make_plan(from_dict({"rollout": {"engine": {key: value}}})).valid


def test_octal_numbers_of_a_setting_of_ours() -> None:
    with pytest.raises(ConfigError, match=r"cluster.nodes must be a whole number; found '0o10'; write 8"):
        load(None, ["cluster.nodes=0o10"])


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("max_num_batched_tokens", "16k", [16000, 16384, None]),
        ("gpu_memory_utilization", "90%", [0.9, None]),
        ("gpu_memory_utilization", 90, [0.9, None]),
        ("max_num_seqs", 1e3, [1000, None]),
        ("max_num_seqs", "1e3", [1000, None]),
        ("kv_cache_memory_bytes", "4G", [4_000_000_000, 4_294_967_296, None]),
        ("enable_sleep_mode", False, [True, None]),
        ("gpu_memory_utilization", 1.5, [0.92, None]),
        ("gpu_memory_utilization", "150%", [0.92, None]),  # vLLM's own, for nothing says what is meant
        ("max_num_seqs", -5, [1024, None]),
        ("block_size", "many", [None]),
    ],
)
def test_the_fix_is_the_value_to_write(key: str, value: Any, written: list[Any]) -> None:
    """A reader of the JSON wants the number first, and not null, which takes the argument away."""
    fixes = search.find(from_dict({"rollout": {"engine": {key: value}}}))
    assert [change.value for fix in fixes for change in fix.changes] == written
    assert all(
        type(change.value) is type(one) for fix, one in zip(fixes, written, strict=True) for change in fix.changes
    )


@pytest.mark.parametrize(
    ("engine", "fix"),
    [
        ({"max_num_seq": 256}, "rollout.engine.max_num_seq=null rollout.engine.max_num_seqs=256"),
        ({"max_num_seq": "1k"}, "rollout.engine.max_num_seq=null rollout.engine.max_num_seqs=1000"),
        ({"seed": 7}, "rollout.engine.seed=null run.seed=7"),
        ({"max_num_seq": 256, "max_num_seqs": 128}, "rollout.engine.max_num_seq=null"),
        ({"seed": "x"}, "rollout.engine.seed=null"),
    ],
)
def test_what_an_argument_says_is_kept_under_the_name_that_counts(engine: dict[str, Any], fix: str) -> None:
    config = from_dict({"rollout": {"engine": engine}})
    assert str(search.find(config)[0]) == fix
    found = repair.find(config)
    assert found is not None and str(found) == fix


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("rollout.top_p=150%", "found '150%'; that is 1.5, and it must be above 0 and at most 1"),
        ("rollout.top_p=2k", "that is 2000 or 2048, and it must be above 0 and at most 1"),
        ("rollout.top_p=1:00", "that is 60, and it must be above 0 and at most 1"),
        ("rollout.temperature=300%", "found '300%'; it is a number, not a share"),
        ("cluster.gpus_per_node=1k", "that is 1000 or 1024, and it must be at least 1 and at most 256"),
        ("rollout.top_p=100%", "write 1.0"),
    ],
)
def test_no_number_is_advised_that_would_be_refused(setting: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, [setting])
    assert told in str(error.value) and (told.startswith("write") or "write" not in str(error.value))


def test_engines_are_told_the_range_where_no_number_that_may_be_meant_is_in_it() -> None:
    (broken,) = make_plan(from_dict({"rollout": {"engine": {"gpu_memory_utilization": "150%"}}})).broken
    assert broken.message.endswith("(150%) must be above 0 and at most 1")


@pytest.mark.parametrize(
    ("key", "value", "told", "first"),
    [
        ("kv_cache_dtype", "fp9", "must be one of auto, ", "fp8"),
        ("quantization", "fp8_per_tensr", "must be one of awq, ", "fp8_per_tensor"),
        ("quantization", "foo", "must be one of awq, ", None),
        ("enforce_eager", "maybe", "must be true or false for vLLM", None),
        ("load_format", "dumy", "must be one of auto, ", "dummy"),
        ("max_num_scheduled_tokens", "16k", "must be a whole number for vLLM", 16000),
        ("max_lora_rank", 24, "must be one of 1, 8, 16, ", 32),
        ("watermark", "much", "must be a number for vLLM", None),
        ("mm_processor_cache_gb", -1, "must be a number, at least 0 for vLLM", None),
        ("stream_interval", 0, "must be a whole number, at least 1 for vLLM", None),
        ("watermark", 1, "must be a number, at least 0 and below 1 for vLLM", None),
        ("mamba_block_size", -16, "must be a whole number, above 0 for vLLM", None),
        ("attention_backend", "FOO", "must be one of auto, FLASH_ATTN, ", None),
        ("attention_backend", "flash_atn", "nearest: FLASH_ATTN", "FLASH_ATTN"),
        ("mamba_backend", "TRITN", "must be one of TRITON, FLASHINFER, CPU for vLLM", "TRITON"),
    ],
)
def test_values_that_the_installed_vllm_does_not_have(key: str, value: Any, told: str, first: Any) -> None:
    """vLLM is read, not imported: nothing of it is loaded by a plan."""
    config = from_dict({"rollout": {"engine": {key: value}}})
    (broken,) = make_plan(config).broken
    assert broken.rule == "engine_argument_value" and told in broken.message and "installed here" in broken.message
    assert (f"nearest: {first}" in broken.message or f"write {first}" in broken.message) == (first is not None)
    assert search.find(config)[0].changes[0].value == first


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("kv_cache_dtype", one) for one in ("auto", "fp8", "bfloat16")),
        *(("quantization", one) for one in ("fp8", "FP8", "compressed-tensors", None)),
        *(("enforce_eager", one) for one in (True, False, "yes", 0)),
        *(("load_format", one) for one in ("dummy", "safetensors")),
        *(("max_lora_rank", one) for one in (8, 512)),
        *(("hf_overrides", one) for one in ({"head_dtype": "float32"}, "x")),
        ("compilation_config", {"mode": 3}),
    ],
)
def test_values_that_the_installed_vllm_has(key: str, value: Any) -> None:
    assert make_plan(from_dict({"rollout": {"engine": {key: value}}})).broken == ()


def test_what_estimates_leave_aside_is_said() -> None:
    def notes(**engine: Any) -> list[str]:
        found = make_plan(from_dict({"model": {"dtype": "bfloat16"}, "rollout": {"engine": engine}})).notes
        return [text for text in found if "not counted" in text]

    assert notes() == notes(kv_cache_dtype="auto") == notes(kv_cache_dtype="bfloat16", quantization=None) == []
    (both,) = notes(kv_cache_dtype="fp8", quantization="fp8")
    assert both.startswith("rollout.engine.kv_cache_dtype (fp8) and rollout.engine.quantization (fp8) are not counted")
    (one,) = notes(kv_cache_dtype="fp8")
    assert one.startswith("rollout.engine.kv_cache_dtype (fp8) is not counted") and "a cache in bfloat16" in one


@pytest.mark.parametrize("key", ["swap_space", "max_num_partial_prefills"])
def test_arguments_of_other_versions_alone_are_refused(key: str) -> None:
    """Their values are known here, and `train` refused them only once vLLM did."""
    (broken,) = make_plan(from_dict({"rollout": {"engine": {key: 4}}})).broken
    assert broken.rule == "engine_argument_spelling" and "which is installed here" in broken.message
