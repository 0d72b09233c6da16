"""Scripts and commands that a script starts in a shell of their own, or hands to Slurm, are read with what these get.

It would catch a run that is not found there, and one that is read with variables that it does not have. What a shell
gets is also tried in bash. The tests take a few seconds.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.importers.scripts.shell import follow
from tests.unit.importers.in_bash import given_to_swift

RUN = "megatron rlhf --rlhf_type grpo --model q --num_generations 8 --lr"
SIZES = "NNODES=${SLURM_NNODES:-1} NPROC_PER_NODE=$SLURM_GPUS_ON_NODE"
INNER = f"#!/bin/bash\n#SBATCH -N 2 --gres=gpu:h100:4  # a node each\n{SIZES} {RUN} ${{LR:-1e-6}}\n"
PYTHON = f"#!/usr/bin/env python3\nrun {RUN} 1e-6\n"  # whatever stands in it
JOB = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --export=ALL,LR=8e-6\nNNODES=$SLURM_NNODES NPROC_PER_NODE=8 " + RUN


def of(text: str, folder: Path, **files: str) -> Converted:
    """Convert a script beside others, whose names lack their endings."""
    for name, inner in {"inner": INNER, **files}.items():
        (folder / f"{name}.sh").write_text(inner)
    return convert(text, folder=folder, name="run.sh")


def found(text: str, folder: Path, **files: str) -> tuple[float, int, int]:
    """Return the rate, the nodes and the GPUs of each; nothing may be left open."""
    one = of(text, folder, **files)
    assert not one.open, one.open
    return one.config.optimizer.lr, one.config.cluster.nodes, one.config.cluster.gpus_per_node


@pytest.mark.parametrize(
    "script",
    [
        "LR=1\nexport LR\nenv -u LR sh inner.sh\nsh inner.sh",
        "export LR=1 N=2\nenv -u LR -uN P=3 bash inner.sh\nbash inner.sh",
        "export LR=1 N=2\nenv --unset=N --unset LR -- bash inner.sh x 'y z'",
        "export LR=1 N=2\nenv -i N=4 PATH=$PATH bash inner.sh",
        "export LR=1 N=2\nenv - PATH=$PATH bash inner.sh",
        "export LR=1\n/usr/bin/env -u LR /bin/bash inner.sh",
        "export LR=1\nenv -C . -u LR bash -c 'swift ${LR-none}'\nswift $LR",
        "LR=1\nenv LR=2 true\nenv LR=3 > /dev/null\nswift $LR",
        "LR=1\nbash <<END\nLR=2\nswift $LR \\$LR \"$LR\" '$LR' $((LR + 2)) \\\\\\$LR\nEND",
        "LR=1\nbash <<'END'\nswift ${LR-none}\nLR=2\nswift $LR\nEND",
        "export LR=1\nbash -s a 'b c' <<END\nswift \\$1 \\$2 \\$# \\$LR\nEND",
        "export LR=1\nenv -u LR bash -s a <<\"END\"\nswift $1 ${LR-none}\nEND",
        "cat <<END | bash\nswift \\$((1 + 1))\nEND",
        "cat <<'END' | LR=3 bash -e\nswift $LR\nEND",
        "( N=4\nexport N\nbash <<'END'\nswift $N\nEND\n)\nswift ${N-none}",
        "bash <<'END' && swift after\nswift one\nEND",
        "export LR=1\nbash < inner.sh",
        "LR=1\nbash <<< \"swift $LR; LR=2; swift \\$LR\"",
        "LR=1\nLR=2 bash <<END\nswift \"$LR\" \\$LR\nEND",
        "LR=1\nexport LR\nenv -u LR bash <<< \"swift $LR \\${LR-none}\"",
        "LR=1\nLR=2 bash -c \"swift $LR \\$LR\"",
        "export LR=1\n./inner.sh 5",
        "export LR=1\nbash -eu -o pipefail inner.sh 5 6",
        "export LR=1\nbash --norc -x inner.sh 2>/dev/null",
        "export LR=1\nbash -n inner.sh\nswift end",
        "export LR=1\nnice timeout 9 bash inner.sh 7",
        "export LR=1\nnohup env -u LR bash inner.sh >out 2>&1 <<END &\nLR=3\nEND\nwait\nswift $(echo done)",
        "cat > made.sh <<'END'\nswift $1 $LR\nEND\nLR=2 bash made.sh 4",
    ],
)  # fmt: skip
def test_a_shell_that_is_started_gets_what_bash_gives_it(script: str, tmp_path: Path) -> None:
    read, told = given_to_swift(
        script, tmp_path, {"inner.sh": '#!/bin/bash\nswift "${LR-none}" "${N-none}" "${P-none}" "$#" "$@"\n'}
    )
    assert read == told and told


def test_a_variable_that_env_takes_away_is_no_variable_of_the_program(tmp_path: Path) -> None:
    head = "export NNODES=4 NPROC_PER_NODE=2 SLURM_NNODES=9\n"
    assert found(f"{head}env -u NNODES {RUN} 1e-6\n{RUN[:0]}echo $NNODES", tmp_path) == (1e-6, 1, 2)
    one = of(f"{head}read K\nenv -u $K {RUN} 1e-6\n", tmp_path)
    assert any("may be taken away by env" in line for line in one.assumed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sbatch inner.sh", (1e-6, 2, 4)),
        ("LR=3e-6 sbatch inner.sh", (3e-6, 2, 4)),
        ("LR=3e-6\nsbatch inner.sh", (1e-6, 2, 4)),  # not exported
        ("export LR=3e-6\nsbatch --nodes=3 inner.sh", (3e-6, 3, 4)),  # the command goes before the line
        ("sbatch -N3 --gpus-per-node h100:2 -J name inner.sh", (1e-6, 3, 2)),
        ("sbatch -vN 3 --exclusive --gres gpu:1 inner.sh", (1e-6, 3, 1)),
        ("sbatch --export=ALL,LR=2e-6 inner.sh", (2e-6, 2, 4)),
        ("sbatch --export 'ALL,X=\"a,b\",LR=2e-6' inner.sh", (2e-6, 2, 4)),
        ("export LR=3e-6 X=1\nsbatch --export=X,Y=2 inner.sh", (1e-6, 2, 4)),
        ("export LR=3e-6 X=1\nsbatch --export=X,LR inner.sh", (3e-6, 2, 4)),
        ("export LR=3e-6\nsbatch --export=NONE inner.sh", (1e-6, 2, 4)),
        ("export LR=3e-6\nsbatch --export=NIL,A=1 inner.sh", (1e-6, 2, 4)),
        ("export LR=3e-6\nenv -u LR sbatch inner.sh", (1e-6, 2, 4)),
        ("export SLURM_NNODES=7\nsbatch inner.sh", (1e-6, 2, 4)),  # Slurm sets it anew
        ("O='--export=ALL,LR=2e-6 -N 5'\nsbatch $O $NEVER inner.sh", (2e-6, 5, 4)),
        ("ID=$(sbatch --parsable -N 1 inner.sh)\nsbatch --dependency=afterok:$ID other.sh", (1e-6, 1, 4)),
        ("export ID=$(LR=4e-6 sbatch inner.sh | awk '{print $4}')", (4e-6, 2, 4)),
        ("if sbatch inner.sh > log; then echo started; fi", (1e-6, 2, 4)),
        ("sbatch --wrap 'LR=4e-6 bash inner.sh' -N 3 --gres=gpu:8", (4e-6, 3, 8)),
        ('export LR=4e-6\nsbatch -N 3 --gres=gpu:8 --wrap="bash inner.sh"', (4e-6, 3, 8)),
        ("sbatch --test-only -N 4 inner.sh\nsbatch inner.sh", (1e-6, 2, 4)),
        (f"sbatch -N 3 <<'END'\n{JOB} $LR\nEND", (8e-6, 3, 8)),
        (f"LR=2e-6\nsbatch <<END\n{JOB.replace('$', chr(92) + '$')} $LR\nEND", (2e-6, 2, 8)),
        (f"ID=$(sbatch --parsable <<'END'\n{JOB} $LR\nEND\n)\necho $ID", (8e-6, 2, 8)),
        (f"cat <<'END' | sbatch\n{JOB} $LR\nEND", (8e-6, 2, 8)),
        (f"sbatch --export=ALL,LR=5e-6 <<'END'\n{JOB} $LR\nEND", (5e-6, 2, 8)),
        (f"cat > job.sh <<'END'\n{JOB} $1\nEND\nsbatch --export=NONE job.sh 5e-6", (5e-6, 2, 8)),
        ('job() { sbatch --export="ALL,LR=$1" inner.sh; }\njob 7e-6', (7e-6, 2, 4)),
    ],
)
def test_a_job_is_read_with_what_slurm_gives_it(text: str, expected: tuple[float, int, int], tmp_path: Path) -> None:
    assert found(f"#!/bin/bash\n#SBATCH --nodes=9 --gres=gpu:9\n{text}\n", tmp_path) == expected


def test_lines_of_sbatch_count_before_the_first_command_only(tmp_path: Path) -> None:
    head = "#!/bin/bash\n# a comment\n\n#SBATCH --nodes=3 --gres=gpu:2\n#SBATCH --export ALL,LR=2e-6\n"
    assert found("sbatch inner.sh", tmp_path, inner=f"{head}{SIZES} {RUN} $LR\n") == (2e-6, 3, 2)
    assert found("sbatch inner.sh", tmp_path, inner=f"{head}true\n#SBATCH -N 5\n{SIZES} {RUN} $LR\n") == (2e-6, 3, 2)
    assert found(f"{head}true\n#SBATCH -N 5\n{SIZES} {RUN} $LR\n", tmp_path) == (2e-6, 3, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("read x\nsbatch --export=ALL,LR=$x inner.sh", "$LR is read from the input by read"),
        ("read x\nsbatch --export=$x inner.sh", "$LR may be set by sbatch in line 2, whose --export is not known"),
        ("read x\nsbatch $x inner.sh", "$LR may be set by sbatch in line 2, whose --export is not known"),
        ("sbatch --export-file=vars.env inner.sh", "$LR may be set by sbatch in line 1, whose --export is not known"),
        ('read x\nsbatch --wrap "LR=3e-6; Y=$x; ' + RUN + ' \\$LR"', "$LR stands in the commands that sbatch gives to"),
        (f"read x\nbash <<END\nLR=3e-6\nY=$x\n{RUN} \\$LR\nEND", "$LR stands in the commands that bash gives to a"),
        ("LR=3e-6\n[ -d /data ] && export LR\nbash inner.sh", "$LR is perhaps not exported"),
        ("export LR=3e-6\nsudo bash inner.sh", "$LR is set in line 1, but not on the way that is followed"),
        ("sudo bash inner.sh", "$LR may be set by sudo, which starts a script in line 1"),
        ("docker run image bash inner.sh", "$LR may be set by docker, which starts a script in line 1"),
        ("srun --export=NONE ./inner.sh", "$LR may be set by srun, which starts a script in line 1"),
    ],
)
def test_what_is_not_known_of_it_is_told(text: str, why: str, tmp_path: Path) -> None:
    left = {item.name: item.why for item in of(text, tmp_path).left}
    assert left["lr"].startswith(why)


def test_sizes_that_a_command_gives_and_that_are_not_known_are_not_those_of_the_line(tmp_path: Path) -> None:
    one = of("read n\nsbatch -N $n --gres=gpu:$n inner.sh", tmp_path, inner=INNER.replace("ES:-1", "ES"))
    assert one.open == ("NNODES=${SLURM_NNODES}", "NPROC_PER_NODE=$SLURM_GPUS_ON_NODE")
    assert of("sbatch --nodes 2-4 inner.sh", tmp_path, inner=INNER.replace("ES:-1", "ES")).open == (
        "NNODES=${SLURM_NNODES}",
    )


@pytest.mark.parametrize(
    "condition",
    [
        '[ -z "$SLURM_JOB_ID" ]',
        '[ "$SLURM_JOB_ID" = "" ]',
        "[[ $SLURM_JOB_ID == '' ]]",
        '[ ! "$SLURM_JOBID" ]',
        "[[ ! -v SLURM_JOB_ID ]]",
        '[ "x$SLURM_JOB_ID" = x ]',
        '[ -z "${SLURM_JOB_ID+set}" ]',
        '[ "$1" != go ]',
        "! [[ ${SLURM_JOB_ID:-} ]]",
    ],
)
def test_a_script_that_submits_itself_is_read_as_the_job(condition: str, tmp_path: Path) -> None:
    hand_in = f"if {condition}; then\n  sbatch -N 4 --export=ALL,LR=2e-6 $0 go\n  exit\nfi\n"
    text = f"#!/bin/bash\n#SBATCH --gres=gpu:4\n{hand_in}{SIZES} {RUN} ${{LR:-1e-6}}\n"
    assert found(text, tmp_path, run=text) == (2e-6, 4, 4)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOBID"])
def test_a_job_has_its_number_under_both_names(name: str, tmp_path: Path) -> None:
    inner = f'#!/bin/bash\nLR=1e-6\n[ -n "${name}" ] && LR=2e-6\n{RUN} $LR\n'
    assert found("sbatch inner.sh", tmp_path, inner=inner)[0] == 2e-6


@pytest.mark.parametrize(("start", "nodes"), [("env -u SLURM_NNODES", 1), ("env -i", 1), ("env -u A", 9), ("", 9)])
def test_sizes_that_slurm_sets_can_be_taken_away(start: str, nodes: int, tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=9 --gres=gpu:4\n"
    inner = f"NNODES=${{SLURM_NNODES:-1}} NPROC_PER_NODE=8 {RUN} 1e-6\n"
    assert found(f"{head}{start} bash inner.sh\n", tmp_path, inner=inner)[1] == nodes


@pytest.mark.parametrize("start", ['bash "$0" $1', '"$0" $1', "nice ./run.sh $1"])
def test_a_script_that_starts_itself_again_and_again_is_followed_a_few_times(start: str, tmp_path: Path) -> None:
    text = f"read x\nif [ $x = a ]; then {start}; fi\nif [ $x = b ]; then {start} c; fi\n{RUN} 1e-6\n"
    assert found(text, tmp_path, run=text)[0] == 1e-6


def test_a_script_that_submits_itself_with_several_values_starts_several_runs(tmp_path: Path) -> None:
    loop = 'if [ -z "$SLURM_JOB_ID" ]; then\n  sbatch "$0" 1e-6\n  sbatch "$0" 2e-6\n  exit\nfi\n'
    text = f"{loop}{RUN} $1\n"
    with pytest.raises(ValueError, match="it starts 2 runs"):
        of(text, tmp_path, run=text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo\nbash gone.sh", "line 2 starts gone.sh with bash, which is not at hand: convert gone.sh itself"),
        ("sbatch -N 2 gone.sh", "line 1 starts gone.sh with sbatch, which is not at hand: convert gone.sh itself"),
        ("./gone.sh", "line 1 starts ./gone.sh, which is not at hand: convert ./gone.sh itself"),
        ("env -u X srun bash gone.sh", "line 1 starts gone.sh with bash, which is not at hand"),
        ("bash $SCRIPT", "line 1 starts $SCRIPT with bash, and its name is known only when the script runs: convert"),
        ("sed -i s/a/b/ inner.sh\nsbatch inner.sh", "line 2 starts inner.sh with sbatch: inner.sh is changed by the"),
        ("make_script | bash", "line 1: the commands that bash reads from its input are not followed: convert them as"),
        ("cat <<'END' | sed s/1/2/ | bash\n" + RUN + " 1e-6\nEND", "line 1: the commands that bash reads from its"),
        ("bash two.sh", "line 2 of two.sh starts gone.sh with sh, which is not at hand"),
        ("bash bad.sh", "bad.sh is not followed: line 1: "),
        (
            "sbatch prep.sh",
            "line 1 starts prep.sh, which is no script of bash or sh by its first line: convert prep.sh",
        ),
        ("echo\n./prep.sh", "line 2 starts ./prep.sh, which is no script of bash or sh by its first line: convert ./p"),
        ("srun prep.sh", "line 1 starts prep.sh, which is no script of bash or sh by its first line: convert prep.sh"),
        ("sbatch <<END\n" + PYTHON + "END", "line 1 starts a text, which is no script of bash or sh by its first line"),
    ],
)
def test_a_refusal_names_what_was_not_followed_and_the_way_out(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        of(text, tmp_path, two="true\nsh gone.sh\n", bad="if x; then\n", prep=PYTHON)
    assert str(caught.value).startswith(f"no run of ms-swift, verl or TRL is recognised; {why}")


@pytest.mark.parametrize(("start", "rate"), [("bash prep.sh", 1e-6), ("./prep.sh", 2e-6), ("sbatch prep.sh", 2e-6)])
def test_the_first_line_names_the_program_where_none_is_given(start: str, rate: float, tmp_path: Path) -> None:
    more = "" if start.startswith("bash") else f"\n{RUN} 2e-6\n"
    assert found(f"{start}{more}", tmp_path, prep=PYTHON)[0] == rate


def test_files_that_a_script_changes_on_the_way_are_not_read_as_they_were(tmp_path: Path) -> None:
    text = "cat <<'END' | sed s/1e-6/2e-6/ | tee made.sh\n" + RUN + " 1e-6\nEND\nbash made.sh\n"
    with pytest.raises(ValueError, match=r"made\.sh is changed by the script in a way that is not followed"):
        of(text, tmp_path)


def test_a_mistake_in_a_script_that_is_started_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^line 1: inner\.sh: line 2: A is read-only"):
        of("bash inner.sh", tmp_path, inner=f"readonly A=1\nA=2\n{RUN} 1e-6\n")
    one = of("bash inner.sh", tmp_path, inner=f"if [ $# -lt 1 ]; then exit 1; fi\n{RUN} 1e-6\n")
    assert any(
        line.startswith("started without arguments, the script ends in line 1 of inner.sh: ") for line in one.assumed
    )


@pytest.mark.parametrize("start", ["bash inner.sh", "sbatch inner.sh", "source inner.sh"])
def test_variables_that_only_the_started_script_asks_for_are_told(start: str, tmp_path: Path) -> None:
    inner = f'LR=1e-6\n[ -n "$BIG" ] && LR=2e-6\n{RUN} $LR --seed ${{SLURM_NTASKS:-3}}\n'
    one = of(f"{start}\n", tmp_path, inner=inner)
    decides = "is taken, and decides seed; a batch system or a launcher may set another value"
    assert f"$SLURM_NTASKS: the script's default {decides}" in one.assumed
    (line,) = [line for line in one.assumed if line.startswith("$BIG (line 2 of inner.sh) is not set here, and may")]
    assert " decide --lr: " in line
    none = of("sbatch --export=NONE inner.sh\n", tmp_path, inner=inner)
    assert not any("$BIG" in line for line in none.assumed)


@pytest.mark.parametrize("words", ["", " 5 6"])
@pytest.mark.parametrize("inner", ["shift", "set -- 8 9", "while [ $# -gt 1 ]; do shift; done", "true"])
def test_a_sourced_file_shares_the_arguments_unless_it_is_given_its_own(inner: str, words: str, tmp_path: Path) -> None:
    """As bash has it; but that bash keeps what `set` gives in a file with arguments of its own."""
    (tmp_path / "inner.sh").write_text(f"{inner}\n")
    script = f"set -- 4 7\n. ./inner.sh{words}\nswift $1 $#"
    line = 'swift() { echo "$@"; }; ' + script
    told = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=20).stdout.split()
    found = [one.words[1:] for one in follow(script, tmp_path, "run.sh").commands if one.words[0] == "swift"]
    if not (words and inner.startswith("set")):
        assert found == [tuple(told)]
