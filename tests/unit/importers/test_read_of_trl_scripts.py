"""Differences that readers of conversions of people's own scripts and YAMLs for TRL found (seconds)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert

YAML = "model_name_or_path: a/b\nnum_generations: 2\nper_device_train_batch_size: 2\nmax_steps: 100\nbeta: 0.1\n"


def of(words: str, more: str = "", folder: Path = Path(), **files: str) -> Converted:
    """Return what a command with a YAML of its own amounts to, beside files of these names."""
    (folder / "run.yaml").write_text(YAML + more)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return convert(f"{words} --config run.yaml\n", folder=folder, name="run.sh")


def told(lines: tuple[str, ...], word: str) -> list[str]:
    return [line for line in lines if word in line]


@pytest.mark.parametrize(
    ("launcher", "gpus", "left"),
    [
        ("accelerate launch --num_processes 4 grpo.py", 4, "run.yaml: num_processes=7: the launcher decides"),
        ("accelerate launch --config_file acc.yaml grpo.py", 2, "num_processes 2 of acc.yaml"),
        ("accelerate launch --config_file acc.yaml --num_processes 4 grpo.py", 4, "--num_processes 4"),
        ("torchrun --nproc_per_node 4 grpo.py", 4, "--nproc_per_node 4"),
        ("accelerate launch grpo.py", 7, ""),
        ("python grpo.py", 7, ""),
    ],
)
def test_the_launcher_goes_before_what_the_yaml_says_of_it(
    tmp_path: Path, launcher: str, gpus: int, left: str
) -> None:
    """TRL's parser throws num_processes of its YAML away, or refuses it: only recipes' own launchers read it."""
    found = of(launcher, "num_processes: 7\n", tmp_path, acc__yaml="num_processes: 2\ndistributed_type: MULTI_GPU\n")
    assert found.config.cluster.gpus_per_node == gpus
    assert found.config.batch.global_batch_size == 2 * gpus
    assert bool(told(found.dropped, "num_processes=7")) is bool(left)
    assert not left or told(found.dropped, left)
    assert not left or "num_processes" not in {one.name for one in found.carried if "=7" in one.given}
