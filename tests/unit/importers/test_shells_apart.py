"""Pipelines, background jobs, getopts, other names of variables and handlers set what they set in bash, or nothing is
known of it. The tests take a few seconds; they would catch a value that is carried over though bash has another."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.shell import read_script

VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8 trainer.total_training_steps=5 "
    "trainer.n_gpus_per_node=8 actor_rollout_ref.actor.optim.lr=$LR\n"
)
LOOP = 'while getopts "l:n:k" o; do case $o in l) LR=$OPTARG;; n) N=$OPTARG;; k) K=1;; esac; done\n'


def in_bash(script: str, folder: Path | None = None) -> list[tuple[str, ...]]:
    """Return what bash gives to the commands a and b of a script."""
    tell = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\" >&3; printf '\\1\\0' >&3; }}\n" for name in "ab")
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&1\n{tell}{script}"],
        capture_output=True, text=True, timeout=20, check=False, env={"PATH": "/usr/bin:/bin"}, cwd=folder,
    )  # fmt: skip
    return [tuple(part.split("\0")[:-1]) for part in done.stdout.split("\1\0")[:-1]]


@pytest.mark.parametrize(
    "script",
    [
        # shells of their own
        "{ LR=5e-6; } &\nwait\na $LR",
        "f() { LR=9e-6; }\nf &\nwait\na $LR",
        "LR=9e-6 &\nwait\na $LR",
        "true && LR=9e-6 &\nwait\na $LR",
        "for i in 1 2; do LR=$i; done &\nwait\na $LR",
        "f() { LR=9e-6; a $LR; }\nf | cat\na $LR",
        "echo x | LR=9e-6\na $LR",
        "f() { LR=9e-6; export N=3; exit; }\nf | cat\na $LR ${N:-none}",
        "shopt -s lastpipe\nLR=2e-6 | LR=9e-6\na $LR",
        "shopt -s lastpipe\nshopt -u lastpipe\ntrue | LR=9e-6\na $LR",
        "f() { ( return; ); LR=3e-6; }\nf\na $LR",
        "f() { if true; then return; fi | cat; LR=3e-6; }\nf\na $LR",
        "for i in 1 2; do ( break ); LR=$LR$i; done\na $LR",
        "set -- x y\n( shift; a $1 )\nb $1",
        "( . ./none.env ) 2>/dev/null\na $LR",
        # getopts
        f"set -- -l 4e-6\n{LOOP}a $LR $OPTIND",
        f"set -- -kl4e-6 -n 3 rest\n{LOOP}shift $((OPTIND - 1))\na $LR $N $K $1 $#",
        f"set -- -k -- -l 4e-6\n{LOOP}shift $((OPTIND-1))\na $LR $K $1",
        f"f() {{ local OPTIND o; {LOOP} }}\nf -l 4e-6\nf -n 3\na $LR $N $OPTIND",
        'set -- -x -l\nwhile getopts ":l:" o; do S+="$o=$OPTARG "; done\na "$S" $OPTIND',
        'set -- -x -l\nwhile getopts "l:" o; do S+="$o=${OPTARG-none} "; done\na "$S" $OPTIND',
        f"shift $((OPTIND-1))\n{LOOP}a $LR $#",
        f"set -- -l 4e-6\n{LOOP}OPTIND=1\nset -- -n 7\n{LOOP}a $LR $N",
        "getopts k o -k\na $o $OPTIND\nset -- x\nshift 2\nb $1",
        "i=0\nS=\nwhile (( i++ < 3 )); do S=$S$i; done\na $S $i",
        # names in variables
        "declare -n ref=LR\nref=4e-6\na $LR $ref ${!ref}",
        "setv() { local -n out=$1; out=$2; }\nsetv LR 4e-6\na $LR",
        "setv() { local -n out=$1; local more=$out; out+=$2; a $more; }\nsetv LR 0\nb $LR",
        "typeset -n one=two two=LR\none=4e-6\nunset -n one\none=5\na $LR $one",
        "declare -n ref=LR\nunset ref\na ${LR:-gone}",
        "L=(1 2)\nadd() { local -n list=$1; list+=(3); }\nadd L\na ${L[@]}",
        "setd() { declare -g $1=$2; }\nsetd LR 3e-6\na $LR",
        'setd() { declare -g "$1"="$2 x"; }\nsetd LR 3e-6\na $LR',
        'setd() { export "$1=$2"; }\nsetd LR 3e-6\na $LR',
        'setd() { export $1+=$2; readonly "$1"; }\nsetd LR 0\na $LR',
        "V='LR=4e-6 N=3'\nexport $V\na $LR $N",
        "N=1\nV=LR=4e-6\nset -- $V\nexport $1 N=$N\na $LR $N",
        "export $(echo LR=4e-6 N=3)\na $LR $N",
        "export $NEVER_SET >/dev/null\na $LR",
        "export -f a\ndeclare -p LR >/dev/null\na $LR",
        "S=\nwhile getopts \"$NONE\" o; do :; done\na $LR",
        "K=LR\nunset $K\na ${LR:-gone}",
        'read -r k < /dev/null\nunset "$k" 2> /dev/null\na ${NONE:-3}',
        "K=LR\nprintf -v $K %s 4e-6\na $LR",
        # handlers that end the script, or come from outside
        "trap 'LR=2e-6' EXIT INT TERM\na $LR",
        "trap 'echo failed; exit 1' ERR\na $LR",
        "trap - DEBUG\ntrap '' ERR\na $LR",
    ],
)  # fmt: skip
def test_what_bash_has_is_what_is_read(script: str) -> None:
    script = f"LR=1e-6\n{script}"
    told = in_bash(script)
    assert told and [item.words for item in read_script(script) if item.words[0] in ("a", "b")] == told


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("export $(grep -v '^#' .env | xargs)", "$LR may be set by export in line 2, where the variable's name"),
        ("export $(cat .env)", "$LR may be set by export in line 2"),
        ("while IFS='=' read -r k v; do export \"$k=$v\"; done < conf.env", "$LR changes in the loop of line 2"),
        ('while IFS== read -r k v; do declare "$k"="$v"; done < conf.env', "$LR changes in the loop of line 2"),
        ("while read -r k v; do readonly $k=$v; done < conf.env", "$LR changes in the loop of line 2"),
        ("while read -r l; do typeset -x $l; done < conf.env", "$LR changes in the loop of line 2"),
        ('read -r l; export "$l"', "$LR may be set by export"),
        ('read -r k; read -r "$k"', "$LR may be set by read"),
        ('read -r k; printf -v "$k" %s 3', "$LR may be set by printf"),
        ("read -r k; unset $k", "$LR may be set by unset"),
        ("read -r k; declare -n ref=$k; ref=4e-6", "$LR may be set through another name of a variable"),
        ("if [ -f x ]; then declare -n r=LR; else declare -n r=N; fi; r=4e-6", "$LR may be set through another name"),
        ("declare -n r; for r in N LR; do r=4e-6; done", "$LR may be set through another name"),
        ("set -- 1e-6 2e-6\nif [ -f x ]; then shift; fi\nLR=$1", "$1 is an argument, and how many of them are left"),
        ("set -- 1e-6 2e-6\n[ -f x ] && shift\nLR=${2:-3e-6}", "$2 is an argument, and how"),
        ("set -- 1e-6 2e-6\nwhile [ -f x ]; do shift; done\nLR=$1", "$1 is an argument, and how many of them are left"),
        ('read -r k\neval "$k=3"', "$LR may be set by eval"),
        ("read -r k\neval $k", "$LR may be set by eval"),
        ('read -r k\nlet "$k=3"', "$LR may be set by let"),
        ("select x in a b; do LR=2e-6; break; done", "$LR changes in the loop of line 2"),
        ("select LR in 1e-6 2e-6; do break; done", "$LR takes several values in the loop of line 2"),
        ("trap 'LR=2e-6' DEBUG\nLR=3e-6", "$LR may be set by the handler of DEBUG (trap in line 2)"),
        ("trap 'LR=2e-6' ERR", "$LR may be set by the handler of ERR"),
        ("trap back RETURN\nback() { if x; then LR=2e-6; fi; }", "$LR may be set by the handler of RETURN"),
        ("trap '. ./none.sh' DEBUG\nLR=3e-6", "$LR may be set by the handler of DEBUG"),
        ("if [ -f x ]; then shopt -s lastpipe; fi\ntrue | LR=2e-6", "$LR depends on lastpipe in line 3"),
        (f'set -- -n 3 "$(cat x)"\n{LOOP}', "$LR "),
        (f"set -- -n 3 -l $(cat x)\n{LOOP}", "its value is known only when the script runs"),
    ],
)
def test_what_only_running_the_script_tells_is_not_known(before: str, why: str) -> None:
    found = convert(f"LR=1e-6\n{before}\n{VERL}")
    lines = [line for line in found.assumed if "optim.lr=" in line]
    assert len(lines) == 1 and why in lines[0], found.assumed


def test_what_is_set_after_a_file_of_settings_is_known() -> None:
    found = convert(f"export $(grep -v '^#' .env | xargs)\nLR=3e-6\n{VERL}")
    assert found.config.optimizer.lr == 3e-6


@pytest.mark.parametrize(
    ("inner", "given", "expected"),
    [
        ('while [ $# -gt 0 ]; do case $1 in --lr) LR=$2; shift 2;; *) shift;; esac; done\n', "--lr 4e-6", 4e-6),
        ('while [[ $# -gt 0 ]]; do case "$1" in --lr=*) LR="${1#*=}";; esac; shift; done\n', "-x --lr=4e-6", 4e-6),
        (LOOP, "-k -l 4e-6", 4e-6),
        ("LR=2e-6\n", "--lr 4e-6", 2e-6),
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["bash inner.sh", "bash -eu inner.sh", "sh -x -- ./inner.sh"])
def test_a_script_that_is_started_with_options_reads_them(
    inner: str, given: str, expected: float, start: str, tmp_path: Path
) -> None:
    (tmp_path / "inner.sh").write_text(inner + VERL)
    found = convert(f"{start} {given}\n", folder=tmp_path, name="run.sh")
    assert found.config.optimizer.lr == expected
