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
        ("kv_cache_memory_bytes", "4G", "must be a number; write 4000000000 or 4294967296"),
        ("data_parallel_size", "2k", "must be 1: rollout.engines_per_node says how many engines there are"),
    ],
)
def test_what_to_write_is_said(key: str, value: Any, told: str) -> None:
    (broken,) = make_plan(from_dict({"rollout": {"engine": {key: value}}})).broken
    assert broken.rule == "engine_argument_value" and broken.message.endswith(told)


@pytest.mark.parametrize(("key", "value"), [("kv_cache_memory_bytes", None), ("block_size", 32), ("revision", "90%")])
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
