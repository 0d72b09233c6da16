"""Numbers of `rollout.engine` that are written as people write them: what to write instead (milliseconds).

Its keys are free-form, so the loader does not know which of them are numbers; the rules do.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.loader import ConfigError, from_dict, load
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
