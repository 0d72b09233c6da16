"""Numbers with units are answered in what a setting counts (milliseconds)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gspo_hpc.config.loader import ConfigError, load
from gspo_hpc.config.reading import units
from gspo_hpc.config.schema import keys


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("rollout.kv_cache_gb=1.5KiB", "it counts GB: write 1.43e-06"),
        ("rollout.kv_cache_gb=4GB", "it counts GB: write 4"),
        ("rollout.kv_cache_gb=512MiB", "it counts GB: write 0.5"),
        ("rollout.kv_cache_gb=1.5 TB", "it counts GB: write 1536"),
        ("rollout.kv_cache_gb=0GB", "it counts GB: that is 0, and it must be above 0"),
        ("rollout.kv_cache_gb=80%", "it is a number, not a share"),
        ("tracking.record_mb=2g", "it counts MB: write 2048"),
        ("cluster.network_gb_per_s=400Gb/s", "it counts GB/s: write 50"),
        ("cluster.network_gb_per_s=200Gbps", "it counts GB/s: write 25"),
        ("cluster.network_gb_per_s=25GB/s", "it counts GB/s: write 25"),
        ("cluster.network_gb_per_s=900 GBps", "it counts GB/s: write 900"),
        ("faults.hang_timeout=30min", "it counts seconds: write 1800"),
        ("faults.hang_timeout=1.5h", "it counts seconds: write 5400"),
        ("reward.timeout=500ms", "it counts seconds: write 0.5"),
        ("slurm.signal_seconds=5min", "it counts seconds: write 300"),
        ("slurm.signal_seconds=0.5s", "it counts seconds: that is 0.5, and it must be at least 1"),
        ("batch.global_batch_size=16k", "write 16000 or 16384"),
    ],
)
def test_what_to_write_is_in_the_unit_of_the_setting(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"; {told}")):
        load(None, [given])


@pytest.mark.parametrize("text", ["4GB/s", "GB", "4 GB more", "-4GB", "four", "4XB"])
def test_other_text_is_no_size(text: str) -> None:
    assert units.converted(text, "GB") is None


def test_every_setting_that_names_a_unit_is_known_to_count_it() -> None:
    named = [key for key in keys() if re.search(r"(_gb|_mb|timeout|_per_s|_seconds)$", key)]
    assert named and all(units.counted(key) for key in named)


def test_a_comma_of_a_number_in_braces_is_named(tmp_path: Path) -> None:
    """YAML begins another key at it: `unknown key rollout.096` did not say so."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "rollout: {max_response_length: 4,096, max_prompt_length: 1,048,576}\n"
        "batch: {global_batch_size: 1,024, num_generations: 8}\n"
        "run: {max_steps: 5, 100: 3}\n"
        "data: {100: null}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(str(path), [])
    lines = str(caught.value).splitlines()
    why = "for a comma ends a number in braces; write"
    assert [line.partition(": ")[2] for line in lines[:3]] == [
        f"rollout.max_response_length is 4, {why} 4096",
        f"rollout.max_prompt_length is 1, {why} 1048576",
        f"batch.global_batch_size is 1, {why} 1024",
    ]
    assert ["unknown key" in line for line in lines[3:]] == [True, True]
