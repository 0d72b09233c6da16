"""Scripts and configs that are converted by their bare names, and by paths to them (under a second)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert

RUN = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model q --num_generations 8 --gradient_accumulation_steps 8 "
TESTS = ["-f extra.txt", "-f /data/models/q/config.json", "-e ../shared", "-r ./extra.txt", "-s $DATA/extra.txt"]
# Name -> text, also of what a script finds by its own place, and of a YAML that only its folder shows to be GRPO's.
FILES = {
    **{f"test{number}.sh": f"B=0.1\nif [ {test} ]; then B=0.5; fi\n{RUN}--beta $B\n"
       for number, test in enumerate(TESTS)},
    "adds.sh": f'[ -f extra.txt ] && E="--beta 0.5" || E=""\n{RUN}$E\n',
    "beside.sh": 'B=0.1\nD=$(dirname "$0")\n[ -f $D/env.sh ] && B=0.5\n[ -f $D/no.sh ] && B=0.7\n' + f"{RUN}--beta $B",
    "place.sh": 'D=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource $D/env.sh\n' + f"{RUN}--beta $B --model $D/m",
    "sourced.sh": f"source env.sh\n{RUN}--beta $B\n",
    "env.sh": "B=0.25\n",
    "config.yaml": "model_name_or_path: q\nlearning_rate: 1.0e-6\nper_device_train_batch_size: 8\nsave_steps: 9\n",
}  # fmt: skip


def by_name(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Converted]:
    """Return a file converted by its name, by its path, and by paths from its folder and from the one above."""
    found = []
    below = Path(folder.name)
    for here, there in ((folder, Path()), (Path("/"), folder), (folder, Path("..") / below), (folder.parent, below)):
        monkeypatch.chdir(here)
        found.append(convert((folder / name).read_text(), folder=there, name=name, gpus=8))
    return found


@pytest.mark.parametrize("name", [name for name in FILES if name != "env.sh"])
def test_a_file_says_the_same_by_its_name_and_by_its_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "grpo").mkdir()
    for file, text in FILES.items():
        (folder / file).write_text(text)
    first, *others = by_name(folder, name, monkeypatch)
    assert {other.text for other in others} == {first.text}
    assert {other.open for other in others} == {first.open}
    if name.startswith(("test", "adds")):
        assert any(given.startswith("--beta") for given in first.open)
    elif name.endswith(".sh"):
        assert first.config.algorithm.kl_beta == (0.5 if name == "beside.sh" else 0.25)


def test_a_file_of_the_machine_that_converts_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that is here, nor one that is not: the run is on another machine."""
    monkeypatch.chdir(tmp_path)
    for path in ("/etc/passwd", "/none/at/all", os.path.join(tmp_path.parent, "x")):
        text = f"B=0.1\nif [ -e {path} ]; then B=0.5; fi\n{RUN}--beta $B\n"
        assert convert(text, name="run.sh").open == ("--beta $B",)


def test_a_file_of_hydra_is_named_by_a_path_that_can_be_followed(tmp_path: Path) -> None:
    """Told to put it at $(pwd)/..., nobody could."""
    verl = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=256 trainer.nnodes=1"
    text = f'P="$(pwd)"\n{verl} --config-path="$P/examples/config" --config-name=own trainer.n_gpus_per_node=8\n'
    with pytest.raises(ValueError, match=r"put examples/config/own\.yaml beside the script"):
        convert(text, folder=tmp_path, name="run.sh")
    (tmp_path / "examples" / "config").mkdir(parents=True)
    (tmp_path / "examples" / "config" / "own.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 4}}\n"
    )
    assert convert(text, folder=tmp_path, name="run.sh").config.batch.num_generations == 4


def test_a_path_is_not_known_for_the_variable_that_nobody_sets() -> None:
    found = convert(f"{RUN}--dataset $HOME/$WHERE/train.jsonl", gpus=8)
    assert "$WHERE is not set in the script" in {item.name: item.why for item in found.left}["dataset"]


@pytest.mark.parametrize(
    ("place", "tops", "found"),
    [
        ("e.sh", ["a/.git/", "requirements.txt"], False),  # beside the repository, in a folder that looks like one
        ("a/e.sh", ["a/.git/", "requirements.txt"], True),
        ("a/e.sh", ["a/.git/", "a/b/requirements.txt"], True),  # of one of its parts
        ("a/e.sh", ["a/b/c/setup.py", "a/LICENSE"], True),
        ("a/e.sh", [], False),
    ],
)
def test_files_above_a_script_are_those_of_its_repository(
    place: str, tops: list[str], found: bool, tmp_path: Path
) -> None:
    (folder := tmp_path / "a" / "b" / "c").mkdir(parents=True)
    for top in tops:
        (tmp_path / top).mkdir() if top.endswith("/") else (tmp_path / top).touch()
    (tmp_path / place).write_text("B=0.25\n")
    converted = convert(f"source e.sh\n{RUN}--beta $B\n", folder=folder, name="run.sh")
    assert converted.open == (() if found else ("--beta $B",))
