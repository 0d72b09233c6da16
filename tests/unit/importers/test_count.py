"""The tool that counts what is converted of public scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
RUN = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --num_generations 4 --gradient_accumulation_steps 4 "
RUN += "--learning_rate {}\n"


def count(folder: Path, *options: str) -> list[str]:
    command = [sys.executable, str(ROOT / "tools" / "count_conversions.py"), str(folder), *options]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env).stdout.splitlines()


def test_runs_are_counted_by_what_becomes_of_them(tmp_path: Path) -> None:
    swift, slime, pages = tmp_path / "ms-swift/examples", tmp_path / "slime/scripts", tmp_path / "trl/docs/source"
    for folder in (swift, slime, pages):
        folder.mkdir(parents=True)
    (swift / "a.sh").write_text(RUN.format("1e-6"))
    (swift / "b.sh").write_text(RUN.format("$RATE"))
    (swift / "c.sh").write_text(RUN.format("1e-6").replace("grpo", "dpo"))
    (swift / "d.sh").write_text("echo no run\n")
    (slime / "run.sh").write_text("python3 train.py --num-rollout 3 --rollout-batch-size 8\n")
    (pages / "p.md").write_text("Text.\n\n```python\nfrom trl import GRPOConfig\nGRPOConfig(max_steps=3)\n```\n")
    lines = count(tmp_path, "--list")
    assert lines[2:5] == [
        "| ms-swift | no git checkout | 3 | 1 | 1 | 1 | – |",
        "| trl | no git checkout | 1 | 1 | 0 | 0 | – |",
        "| slime | no git checkout | 1 | 0 | 0 | 1 | 1 |",
    ]
    kinds = {line.split("\t")[1]: line.split("\t")[0] for line in lines[5:]}
    assert kinds["ms-swift/examples/b.sh"] == "open" and kinds["trl/docs/source/p.md:3"] == "exact"
    assert count(tmp_path, "--unknown")[5] == "0 of 2 exact runs have arguments that are not known as their project's"
    (swift / "e.sh").write_text(RUN.format("1e-6").strip() + " --of_a_fork 3\n")
    (swift / "f.sh").write_text(RUN.format("$RATE").strip() + " --of_a_fork 3\n")
    lines = count(tmp_path, "--unknown", "--list")
    assert lines[5] == "1 of 3 exact runs have arguments that are not known as their project's"
    assert [line.split("\t")[2][-13:] for line in lines if "/e.sh" in line] == [", 1 not known"]
    for name in ("e.sh", "f.sh"):
        (swift / name).unlink()
    halves = [count(tmp_path, "--list", "--half", half)[2:] for half in ("tune", "judge")]
    places = [line.split("\t")[1] for half in halves for line in half if "\t" in line]
    assert sorted(places) == sorted(kinds)


def test_the_second_set_takes_the_first_runs_of_each_checkout_and_sums_them_up(tmp_path: Path) -> None:
    for name, files in {"CReFT-CAD/GRPO": 9, "Option-R1": 1}.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for number in range(files):
            (folder / f"{number if files > 1 else 'grpo_train'}.sh").write_text(RUN.format("1e-6"))
        (folder / "sft.sh").write_text("swift sft --model x\n")
    large = RUN.format("1e-6 --per_device_train_batch_size 64").replace("steps 4", "steps 1")
    (tmp_path / "Option-R1/grpo_train.sh").write_text(large)
    lines = count(tmp_path, "--set", "second", "--list")
    assert lines[2:5] == [
        "| CReFT-CAD | fe5bbb0 | 6 | 6 | 0 | 0 | – |",
        "| Option-R1 | fdeca12 | 1 | 1 | 0 | 0 | – |",
        "| all of ms-swift |  | 7 | 7 | 0 | 0 | – |",
    ]
    assert count(tmp_path, "--set", "second", "--plans")[5] == "6 of 7 configs are accepted by plan as they are"
    chosen = lines[5:]
    assert chosen == count(tmp_path, "--set", "second", "--list")[5:] and len(chosen) == 7


def test_every_set_takes_each_text_of_all_folders_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "a.slurm").write_text(RUN.format("1e-6"))
        (tmp_path / name / "own.py").write_text("from trl import GRPOTrainer\nGRPOTrainer(model='m')\n")
        (tmp_path / name / "eval.py").write_text("num_generations = 3\n")
        (tmp_path / name / "trainer.py").write_text("class GRPOTrainer:\n    x = GRPOConfig()\n")
    (tmp_path / "one" / "b.sh").write_text(RUN.format("$RATE"))
    (tmp_path / "two" / "b.sh").write_text(RUN.format("2e-6"))
    lines = count(tmp_path, "--set", "every", "--list")
    assert lines[2:5] == [
        "| one | no git checkout | 3 | 1 | 1 | 1 | – |",
        "| two | no git checkout | 1 | 1 | 0 | 0 | – |",
        "| all of every checkout |  | 4 | 2 | 1 | 1 | – |",
    ]
    places = ["one/b.sh", "one/deep/a.slurm", "one/own.py", "two/b.sh"]
    assert sorted(line.split("\t")[1] for line in lines[5:]) == places
