"""Folders in which commands run, and patterns of file names, which only the machine of a run can tell (3 s).

It would catch a file that is read in another folder than bash reads it in, and a pattern that counts as one file.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

RUN = "swift rlhf --rlhf_type grpo --model q --dataset a.jsonl --num_generations 8"


@pytest.mark.parametrize(
    "script",
    [
        "source e.sh",
        "cd s; source e.sh",
        "cd -- s && . ./e.sh",
        "cd ./s/t; source e.sh",
        "cd s; cd t; source e.sh",
        "cd s/t; cd ..; source e.sh",
        "cd s/t && cd ../.. && source e.sh",
        "pushd s > /dev/null; . ./e.sh; popd > /dev/null",
        "(cd s; true); . ./e.sh",
        "( cd s; . ./e.sh; echo $LR > /dev/null ); . ./s/t/e.sh",
        'cd "$(dirname "$0")"/s && source e.sh',
        'cd "$PWD"; source e.sh',
        "f() { cd s; }\nf\nsource e.sh",
        "g() ( cd s; )\ng\nsource e.sh",
        "cd s\nsource ../e.sh",
        "if true; then cd s; fi; source e.sh",
        "export LR=5\n(cd s && bash run.sh) > /dev/null\nLR=$(cd s; . ./e.sh; echo $LR)",
    ],
)
def test_files_are_those_of_the_folder_that_bash_is_in(script: str, tmp_path: Path) -> None:
    for place, rate in (("e.sh", 1), ("s/e.sh", 2), ("s/t/e.sh", 3)):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(f"LR={rate}e-6\n")
    (tmp_path / "s" / "run.sh").write_text("true\n")
    (tmp_path / "run.sh").write_text(f'{script}\necho "$LR"\n')
    told = subprocess.run(["bash", "run.sh"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = convert(f"{script}\n{RUN} --learning_rate $LR\n", folder=tmp_path, name="run.sh")
    if found.open:  # not known, which is told
        assert "LR=$(" in script and len(found.open) == 1
    else:
        assert found.config.optimizer.lr == float(told)


@pytest.mark.parametrize(("script", "rate"), [("cd s", 0.3), ("cd s/..", 0.7), ("pushd s", 0.3), ("", 0.7)])
def test_a_script_that_is_started_and_a_yaml_are_those_of_the_folder(script: str, rate: float, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for folder, beta in ((tmp_path, 0.7), (tmp_path / "s", 0.3)):
        (folder / "inner.sh").write_text(f"{RUN} --beta {beta}\n")
        (folder / "trl.yaml").write_text(f"model_name_or_path: q\ndataset_name: d\nbeta: {beta}\n")
    for command in ("bash inner.sh", "trl grpo --config trl.yaml"):
        found = convert(f"{script}\n{command}\n", folder=tmp_path, name="run.sh")
        assert found.config.algorithm.kl_beta == rate, command


def test_a_folder_of_another_machine_leaves_files_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "e.sh").write_text("LR=2e-6\n")
    for script in ("cd /workspace/of/somebody", 'cd "$ROOT"', "cd ~/verl", "cd -", "cd"):
        found = convert(f"{script}\nsource e.sh\n{RUN} --learning_rate $LR\n", folder=tmp_path, name="run.sh")
        assert found.config.optimizer.lr == 2e-6, script


@pytest.mark.parametrize(
    "script",
    [
        "F=(data/*.jsonl); N=${#F[@]}",
        "F=(data/part-?.jsonl); N=${#F[@]}",
        "F=(/dev/nvidia[0-9]); N=${#F[@]}",
        "P='data/*.jsonl'; F=($P); N=${#F[@]}",
        "set -- data/*.jsonl; N=$#",
        "N=0; for f in data/*.jsonl; do N=$((N+1)); done",
        "f() { N=$#; }\nf data/*.jsonl",
    ],
)
def test_how_many_files_a_pattern_has_is_not_known(script: str) -> None:
    found = convert(f"{script}\n{RUN} --num_iterations $N\n")
    (left,) = found.open
    assert left.startswith("--num_iterations ")


@pytest.mark.parametrize(
    "script",
    [
        "F=('data/*.jsonl'); N=${#F[@]}",
        'F=("a?"); N=${#F[@]}',
        "F=(data/\\*.jsonl); N=${#F[@]}",
        "F=(trainer.logger=[console,wandb]); N=${#F[@]}",
        "F=(--x=*); N=${#F[@]}",
        "set -- 'a*'; N=$#",
    ],
)
def test_what_is_no_pattern_of_files_counts_as_one_word(script: str) -> None:
    found = convert(f"{script}\n{RUN} --num_iterations $N\n")
    assert found.config.batch.num_iterations == 1 and not found.open


@pytest.mark.parametrize("way", ['${E[@]+"${E[@]}"}', '"${E[@]+"${E[@]}"}"', '${E[@]:+"${E[@]}"}', "${E[@]+${E[@]}}"])
def test_arguments_behind_a_guard_against_set_u_are_named(way: str) -> None:
    """Bash before 4.4 takes an empty array for one that is not set, so scripts write it so."""
    (line,) = (one for one in convert(f'E=()\n[ -n "$M" ] && E+=(--beta 0.2)\n{RUN} {way}\n').assumed if "$M" in one)
    assert "may decide --beta and which arguments are added" in line
    found = convert(f"E=(--beta 0.2 --epsilon 0.1)\n{RUN} {way}\n").config
    assert (found.algorithm.kl_beta, found.algorithm.clip_low) == (0.2, 0.1)
    assert convert(f"E=()\n{RUN} {way}\n").config.algorithm.kl_beta == 0.04


def test_env_enters_a_folder_for_one_command(tmp_path: Path) -> None:
    for folder, beta in ((tmp_path, 0.7), (tmp_path / "s", 0.3)):
        folder.mkdir(exist_ok=True)
        (folder / "inner.sh").write_text(f"{RUN} --beta {beta}\n")
    for script, rate in (("env -C s bash inner.sh", 0.3), ("env --chdir=s true\nbash inner.sh", 0.7)):
        assert convert(f"{script}\n", folder=tmp_path, name="run.sh").config.algorithm.kl_beta == rate


@pytest.mark.parametrize(
    "folder",
    [
        '$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )',
        '$(cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd -P)',
        '$(cd -P "$(dirname "$0")" && pwd)',
        '$(cd "$(dirname -- "$0")" 2>/dev/null && pwd)',
    ],
)
def test_the_folder_of_the_script_is_known_in_its_usual_forms(folder: str, tmp_path: Path) -> None:
    (tmp_path / "e.sh").write_text("LR=2e-6\n")
    found = convert(f'DIR="{folder}"\n. "$DIR/e.sh"\n{RUN} --learning_rate $LR\n', folder=tmp_path, name="run.sh")
    assert not found.open and found.config.optimizer.lr == 2e-6
