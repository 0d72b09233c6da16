"""Folders in which commands run, and patterns of file names, which only the machine of a run can tell (5 s).

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


# What Slurm does with folders: srun starts its program in the one that is named, and sbatch finds its script before.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do
  case $1 in -D | --chdir) cd "$2"; shift ;; --chdir=*) cd "${1#*=}" ;; -D*) cd "${1#-D}" ;; esac
  shift
done
exec "$@"
"""
SBATCH = """#!/bin/bash
while [[ $1 == -* ]]; do
  case $1 in -D | --chdir) to=$2; shift ;; --chdir=*) to=${1#*=} ;; --wrap) wrap=$2; shift ;; esac
  shift
done
if [ -n "$wrap" ]; then text=$wrap; elif [ -n "$1" ]; then text=$(< "$1"); else text=$(cat); fi
line=$(sed -nE 's/^#SBATCH (-D |--chdir=)//p' <<< "$text")
export SLURM_JOB_ID=1 SLURM_SUBMIT_DIR=$PWD
cd "${to:-${line:-.}}" && exec bash -c "$text" "$1"
"""


@pytest.mark.parametrize(
    "script",
    [
        "srun --chdir=s bash job.sh",
        "srun -N1 -D s ./job.sh",
        "srun -Ds/t job.sh",
        "srun -D s bash < job.sh",
        "srun --chdir s env -C t bash job.sh",
        "srun -D s bash -c '. ./job.sh'",
        "cd s; srun bash -c '. ./job.sh'",
        "cd s; srun --chdir=$PWD/t bash job.sh",
        "cd s; srun -D .. bash job.sh",
        "cd s; cd $(pwd)/t; bash job.sh",
        "nice env -C s ./job.sh",
        "timeout 9 env --chdir=s bash job.sh",
        "srun -D s true; bash job.sh",
        "sbatch --chdir=s job.sh",
        "sbatch -D s/t job.sh",
        "cd s; sbatch -D t job.sh",
        "cd s; sbatch --export=NONE job.sh",
        "sbatch -D s --wrap 'bash job.sh'",
        "sbatch -D s < job.sh",
        "env -C s sbatch -D t job.sh",
        "sbatch lines.sh",
        "sbatch -D s/t lines.sh",
        "sbatch -D s asks.sh",
        "sbatch -D s goes.sh",
    ],
)
def test_files_are_those_of_the_folder_that_slurm_enters(script: str, tmp_path: Path) -> None:
    line = f"swift rlhf {RUN.removeprefix('swift rlhf')} --learning_rate $LR --beta"
    for place, rate in ((".", 1), ("s", 2), ("s/t", 3)):
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        texts = {"e": f"LR={rate}e-6\n", "job": f"#!/bin/bash\n. ./e.sh\n{line} 0.{rate}\n"}
        texts["lines"] = texts["job"].replace("bash\n", "bash\n#SBATCH --chdir=s\n#SBATCH -N 1\n")
        texts["asks"] = texts["job"].replace(" ./", " $SLURM_SUBMIT_DIR/")
        texts["goes"] = texts["job"].replace("\n.", "\ncd ${SLURM_SUBMIT_DIR}/s/t\n.")
        for name, text in texts.items():
            (folder / f"{name}.sh").write_text(text)
            (folder / f"{name}.sh").chmod(0o755)
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "sbatch": SBATCH, "swift": '#!/bin/bash\necho "${@: -3:1} ${@: -1}"\n'}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run.sh").write_text(f"{script}\n")
    path = f"{tmp_path}/bin:/usr/bin:/bin:."
    done = subprocess.run(["bash", "run.sh"], cwd=tmp_path, capture_output=True, text=True, env={"PATH": path})
    found = convert(f"{script}\n", folder=tmp_path, name="run.sh")
    told = f"{found.config.optimizer.lr} {found.config.algorithm.kl_beta}"
    assert not found.open
    assert [float(word) for word in told.split()] == [float(word) for word in done.stdout.split()]


@pytest.mark.parametrize(
    ("script", "beta"),
    [
        ("#SBATCH --chdir=s\n. ./e.sh", 0.3),
        ("#SBATCH -D s\n#SBATCH -N 1\ncd ..\n. ./e.sh", 0.7),
        ('#SBATCH -D s\n[ -z "$SLURM_JOB_ID" ] && { sbatch "$0"; exit; }\n. ./e.sh', 0.3),
        ('#SBATCH -D s\n[ -z "$SLURM_JOB_ID" ] && { sbatch -D s/t "$0"; exit; }\n. ./e.sh', 0.1),
        ("#SBATCH --chdir=$HOME/x\n. ./e.sh", 0.7),  # not at hand, and so not known
        ("#SBATCH -D s\n. $SLURM_SUBMIT_DIR/e.sh", 0.7),
    ],
)
def test_a_script_that_is_handed_in_begins_in_the_folder_of_its_lines(script: str, beta: float, tmp_path: Path) -> None:
    for folder, value in ((tmp_path, 0.7), (tmp_path / "s", 0.3), (tmp_path / "s" / "t", 0.1)):
        folder.mkdir(exist_ok=True)
        (folder / "e.sh").write_text(f"B={value}\n")
    text = f"#!/bin/bash\n{script}\n{RUN} --beta $B\n"
    (tmp_path / "run.sh").write_text(text)
    found = convert(text, folder=tmp_path, name="run.sh")
    assert (found.config.algorithm.kl_beta, found.open) == (beta, ())


@pytest.mark.parametrize(
    ("start", "beta"),
    [
        ("srun --chdir=s {} trl.yaml", 0.3),
        ("cd s; mpirun -wdir .. {} trl.yaml", 0.7),
        ("uv run --directory s {} trl.yaml", 0.3),
        ("sudo -D s {} trl.yaml", 0.3),
        ("#SBATCH -D s\n{} trl.yaml", 0.3),
        ("#SBATCH -D s\n{} $SLURM_SUBMIT_DIR/trl.yaml", 0.7),
    ],
)
def test_a_yaml_is_that_of_the_folder_which_a_launcher_enters(start: str, beta: float, tmp_path: Path) -> None:
    for folder, value in ((tmp_path, 0.7), (tmp_path / "s", 0.3)):
        folder.mkdir(exist_ok=True)
        (folder / "trl.yaml").write_text(f"model_name_or_path: q\ndataset_name: d\nbeta: {value}\n")
    found = convert(f"{start.format('trl grpo --config')}\n", folder=tmp_path, name="run.sh")
    assert found.config.algorithm.kl_beta == beta


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


@pytest.mark.parametrize(
    "script",
    [
        "mkdir -p s; cd s; cat > e.sh <<E\nLR=7e-6\nE\ncd ..; . ./e.sh",
        "mkdir -p s\n(cd s; echo LR=7e-6 > e.sh); . ./e.sh",
        "mkdir -p s; pushd s; echo LR=7e-6 > e.sh; popd; . ./e.sh",
        "mkdir -p s; cd s; echo LR=7e-6 > e.sh; . ./e.sh",
        'D=$(cd "$(dirname "$0")"; pwd); echo LR=7e-6 > "$D/e.sh"; . ./e.sh',
        'D="$(dirname "$(readlink -f "$0")")"; mkdir -p $D/s; echo LR=7e-6 > $D/s/k.sh; cd s; . ./k.sh',
        "echo LR=7e-6 > n.sh; mkdir -p s; cd s; . ../n.sh",
        "mkdir -p s; echo LR=7e-6 > s/n.sh; cd s; . ./n.sh",
        'echo LR=7e-6 > "$PWD/n.sh"; . ./n.sh',
        "mkdir -p s; cd s; echo LR=7e-6 > ../n.sh; cd ..; . ./n.sh; echo LR=9e-6 >> s/n.sh; . ./n.sh",
        "mkdir -p s; cd s; echo LR=7e-6 > e.sh; rm ../e.sh; . ./e.sh",
    ],
)
def test_a_file_that_a_script_writes_is_the_one_in_its_folder(script: str, tmp_path: Path) -> None:
    """One of the same name beside the script was taken for it, and the other way round. As bash does it."""
    text = f"{script}\nswift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate $LR\n"
    folders = tmp_path / "read", tmp_path / "run"
    for folder in folders:
        folder.mkdir()
        (folder / "e.sh").write_text("LR=2e-6\n")
        (folder / "run.sh").write_text(text)
    rate = convert(text, folder=folders[0], name="run.sh").config.optimizer.lr
    line = "swift() { echo ${@: -1}; }; export -f swift; bash run.sh"
    done = subprocess.run(["bash", "-c", line], cwd=folders[1], capture_output=True, text=True, timeout=20)
    assert float(done.stdout.split()[-1]) == rate, done.stderr


CHANGED = [
    "sed -i s/4/5/ *.yaml",
    "for f in *.yaml; do sed -i s/4/5/ $f; done",
    'find . -name "*.yaml" -exec sed -i s/4/5/ {} +',
    "ls *.yaml | xargs sed -i s/4/5/",
    "srun -N1 sed -i s/4/5/ c.yaml",
    "perl -pi -e s/4/5/ c.yaml",
    "yq -i .learning_rate=1 c.yaml",
    'sed -i "$ d" c.yaml',
    "cp s/c.yaml .",
    "cp s/* ./",
    "cp -r s/. .",
    "cp -t . s/c.yaml",
    "mv -f s/c.yaml ./",
    "rsync -a s/c.yaml .",
    "truncate -s 0 c.yaml",
    "printf 'd\\nw\\n' | ed -s c.yaml",
    "echo 'a: 1\\nb: 2' > c.yaml",
    "cd s; cp c.yaml ..; cd ..",
]
LEFT = [
    "sed -i s/4/5/ *.sh",
    "sed -i 's/.*yaml/x/' other.sh",
    "sed -i s/4/5/ $SITE/packages/a.py",
    'find . -name "*.py" -exec sed -i s/4/5/ {} +',
    "cp c.yaml s/",
    "cp s/other.yaml .",
    "rm -rf $OUT; echo x > $LOG",
    "sed s/4/5/ c.yaml > other.yaml",
    "sed -i s/4/5/ *.yaml; cat > c.yaml <<E\n{}E",
]


@pytest.mark.parametrize(("commands", "changed"), [*((one, True) for one in CHANGED), *((one, False) for one in LEFT)])
def test_a_file_that_commands_change_is_not_read_as_it_was(commands: str, changed: bool, tmp_path: Path) -> None:
    text = "rlhf_type: grpo\nmodel: q\ndataset: d\nnum_generations: 8\nlearning_rate: 4e-6\n"
    (tmp_path / "s").mkdir()
    for folder in (tmp_path, tmp_path / "s"):
        (folder / "c.yaml").write_text(text)
    script = f"{commands.replace('{}E', f'{text}E')}\nswift rlhf --config c.yaml\n"
    if changed:
        with pytest.raises(ValueError, match="changed by the script in a way that is not followed"):
            convert(script, folder=tmp_path, name="run.sh")
    else:
        assert convert(script, folder=tmp_path, name="run.sh").config.optimizer.lr == 4e-6


@pytest.mark.parametrize("home", ["~/s", "~", "~user/s"])
def test_the_home_of_whoever_runs_it_is_no_folder_beside_the_script(home: str, tmp_path: Path) -> None:
    (tmp_path / home).mkdir(parents=True)
    for folder, rate in ((tmp_path, "2e-6"), (tmp_path / home, "3e-6")):
        (folder / "e.sh").write_text(f"LR={rate}\n")
    text = f"cd {home}; . ./e.sh\nswift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate $LR\n"
    assert convert(text, folder=tmp_path, name="run.sh").config.optimizer.lr != 3e-6


@pytest.mark.parametrize("here", ["$PWD", "${PWD}", "$(pwd)", "`pwd`", "${BASE:-$PWD}"])
def test_a_folder_that_is_kept_before_cd_is_not_the_one_after_it(here: str, tmp_path: Path) -> None:
    """The file of that name in the new folder was read, without a word."""
    (tmp_path / "s").mkdir()
    for folder, rate in ((tmp_path, "2e-6"), (tmp_path / "s", "3e-6")):
        (folder / "e.sh").write_text(f"LR={rate}\n")
    text = f"W={here}\ncd s\n. $W/e.sh\nswift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate $LR\n"
    found = convert(text, folder=tmp_path, name="run.sh")
    assert found.config.optimizer.lr == 2e-6 or any("learning_rate" in line for line in found.open)


def test_a_folder_within_one_that_is_not_known_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "e.sh").write_text("LR=3e-6\n")
    text = (
        "read X\ncd $X\ncd s\n. ./e.sh\nswift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate $LR\n"
    )
    assert any("learning_rate" in line for line in convert(text, folder=tmp_path, name="run.sh").open)


def test_a_file_that_is_too_large_for_a_script_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "e.sh").write_text("LR=3e-6\n" + "#\n" * (1 << 19))
    text = ". ./e.sh\nswift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate $LR\n"
    assert any("learning_rate" in line for line in convert(text, folder=tmp_path, name="run.sh").open)


@pytest.mark.parametrize(
    "folder",
    [
        'realpath "$(dirname "$0")"',
        'readlink -f "$(dirname "$0")"',
        'realpath -e -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        'dirname "$(realpath "$0")"',
        'realpath "$(dirname "$0")/s/.."',
    ],
)
def test_the_folder_of_the_script_is_known_however_it_is_asked_for(folder: str, tmp_path: Path) -> None:
    """After `cd $D/s` the file beside the script was read."""
    (tmp_path / "s").mkdir()
    for place, rate in ((tmp_path, "2e-6"), (tmp_path / "s", "3e-6")):
        (place / "e.sh").write_text(f"LR={rate}\n")
    run = "swift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate $LR\n"
    for commands, rate in (("cd $D/s\n. ./e.sh", 3e-6), ("cd s; . $D/e.sh", 2e-6)):
        found = convert(f"D=$({folder})\n{commands}\n{run}", folder=tmp_path, name="run.sh")
        assert found.config.optimizer.lr == rate and not found.open


@pytest.mark.parametrize(
    "entering",
    ["[ -d s ] && cd s", "if [ -d s ]; then cd s; fi", "test -d s && pushd s", "case $(hostname) in h*) cd s;; esac"],
)
def test_a_file_of_a_folder_that_a_condition_decides_is_not_known(entering: str, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    line = "swift rlhf --rlhf_type grpo --model q --num_generations 8 --learning_rate $LR"
    (tmp_path / "e.sh").write_text("LR=2e-6\n")
    text = f"{entering}\n. ./e.sh\n{line}\n"
    assert convert(text, folder=tmp_path, name="run.sh").config.optimizer.lr == 2e-6, "there is no other"
    (tmp_path / "s" / "e.sh").write_text("LR=3e-6\n")
    assert any("learning_rate" in one for one in convert(text, folder=tmp_path, name="run.sh").open)
    (tmp_path / "i.sh").write_text(f"{line.replace('$LR', '2e-6')}\n")
    (tmp_path / "s" / "i.sh").write_text(f"{line.replace('$LR', '3e-6')}\n")
    with pytest.raises(ValueError, match="may be any of 2 files"):
        convert(f"{entering}\nbash i.sh\n", folder=tmp_path, name="run.sh")
