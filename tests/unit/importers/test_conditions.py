"""Conditions of scripts, each held against bash itself: every operator where it holds, and where it does not (6 s)."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.shell import follow, read_script

from .in_bash import given_to_swift

NUMBERS = [f"[ {left} {sign} {right} ]" for sign in ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
           for left, right in ((1, 2), (2, 2), (3, 2))]  # fmt: skip
JOINED = [
    template.format(*sides)
    for template in ("[ {0} {1} 1 {2} {3} {1} 1 ]", "[[ {0} {1} 1 {4} {3} {1} 1 ]]")
    for sides in itertools.product("01", ("-eq",), ("-a", "-o"), "01", ("&&", "||"))
]
TEXTS = [
    "[ a = a ]",
    "[ a == b ]",
    "[ \\( a = a -o b = c \\) -a a = b ]",
    "[ \\( a = b -a b = c \\) -o a = a ]",
    "[ ! \\( a = a \\) ]",
    '[ \\( "$Y" \\) ]',
    '[ \\( -n "$Y" -o \\( a = a \\) \\) ]',
    "[ $X = - ]",
    "[ a = a -a $X = -- ]",
    "[ a = + -o / = / ]",
    '[ -n "$Y" -a -d / ]',
    "[ a = a -o -d ~ ]",
    "[[ a = b && -d / ]]",
    "[ '(' = \"\\(\" ]",
    "[ a != b ]",
    "[ a != a ]",
    "[[ abc == a* ]]",
    '[[ abc == "a*" ]]',
    "[[ abc != a* ]]",
    "[[ abc != 'a*' ]]",
    '[ "$X" = "a*" ]',
    "[[ $X == 'a*' ]]",
    "[[ -z $X && -n $Y ]]",
    "[ ! -n $X ]",
    "[ a = a -o b = c ]",
    "[ a = b -a b = b -o c = c ]",
    "[ c = c -o a = b -a b = c ]",
    '[ -n "$X" -a -z "$X" ]',
    '[ -z "$X" -o 1 -eq 1 ]',
    "[ ! a = a -o ! a = b ]",
    '[ "$X" -a "$Y" ]',
    "[ -n $Y ]",
    "[ -z $Y ]",
    '[ -n "$Y" ]',
    "[ ! -n $Y ]",
    "[ -z ${Y+x} ]",
    "[ $Y ]",
    "[ ! $Y ]",
    "[ ]",
    '[ "$X" -o "$Y" ]',
    "[ $Y -eq 0 ]",
    '[ "$Y" -lt 1 ]',
    "[ $Y = 0 ]",
    "[[ $Y -eq 0 ]]",
    "[[ $Y -ne 0 ]]",
    "[[ -n $X && a = a ]]",
    '[[ a = "b" || b = b ]]',
    '[[ "$X" = "a*" && 1 -eq 1 && b = c || b = b ]]',
    "[[ a = b || b = b && c = d ]]",
    "[[ ! a = b && b = b ]]",
    "[[ a = a && ! ( b = b || c = d ) ]]",
    "[[ ! -z $X && $X = 'a*' ]]",
    "[[ $X = 'a*' && a = a ]]",
    "[[ abc = a* && ( $X = 'b' || $X = \"a*\" ) ]]",
    "[[ 'a = b' = a\\ =* && $X = a* ]]",
    "[[ a = a ]] && [ 'x = y' = \"x = y\" ]",
]


@pytest.mark.parametrize("condition", [*NUMBERS, *dict.fromkeys(JOINED), *TEXTS])
def test_a_condition_holds_where_it_does_in_bash(condition: str) -> None:
    script = f"X='a*'\nif {condition}; then run yes; else run no; fi\n"
    done = subprocess.run(
        ["bash", "-c", f"run() {{ echo $1; }}\n{script}"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        env={},
    )
    assert [item.words for item in read_script(script) if item.words[0] == "run"] == [("run", done.stdout.strip())]


@pytest.mark.parametrize(
    ("script", "known"),
    [
        ("[ -o errexit ] || X=2", False),
        ("set -e; [ -o errexit ] && X=2", False),
        ("[ a = b -o -o errexit ] || X=2", False),
        ("[ -o errexit -a a = a ] || X=2", False),
        ("test -o errexit || X=2", False),
        ("[ -a /nope ] || X=2", False),
        ("[ ! -o errexit ] && X=2", True),  # of three words -o joins two
        ("[ a = a -o -o errexit ] && X=2", True),
        ("[ -o ] && X=2", True),
        ('[ "" -o x ] && X=2', True),
        ("declare -A m=([a]=1); [[ -v m ]] && X=2", True),
        ("declare -A m=([0]=1); [ -v m ] && X=2", True),
        ("m=(); [[ -v m ]] && X=2", True),
        ("m=(1); [[ -v m ]] && X=2", True),
        ("m=(); declare -n r=m; [[ -v r ]] && X=2", True),
        ("declare -p NOPE &> /dev/null || X=2", True),
        ("typeset -p NOPE 2> /dev/null || X=2", True),
        ("Q=1; declare -p Q && X=2", True),
        ("Q=1; declare -p Q NOPE 2> /dev/null && X=2", True),
        ("Q=1; unset Q; declare -p Q 2> /dev/null || X=2", True),
        ("f() { local Q=1; }; f; declare -p Q 2> /dev/null || X=2", True),
        ("declare -A Q; if declare -p Q; then X=2; fi", True),
        ("declare -p PATH && X=2", True),
        ("declare -p && X=2", True),
        ("declare Q; declare -p Q && X=2", False),
        ("export Q; declare -p Q && X=2", False),
        ("source gone.sh; declare -p NOPE || X=2", False),
        ("declare -F nofunc || X=2", True),
        ("declare -f nofunc > /dev/null || nofunc() { X=2; }; nofunc", True),
        ("export -f nofunc 2> /dev/null || X=2", True),
        ("f() { :; }; declare -F f && X=2", True),
        ("f() { :; }; typeset -f f nofunc || X=2", True),
        ("f() { :; }; unset -f f; declare -f f || X=2", True),
        ("if [ -n /x$Q ]; then f() { :; }; fi; declare -f f && X=2", True),
        ("if [ -d /dev ]; then f() { :; }; fi; declare -F f && X=2", False),
        ("declare -F module || X=2", False),
        ("source gone.sh; declare -F nofunc || X=2", False),
        ("f() { :; }; type f && X=2", True),
        ("type nofunc &> /dev/null || X=2", False),
        ("type ls && X=2", False),
    ],
)
def test_what_a_shell_tells_of_itself_is_what_bash_says_or_not_known(script: str, known: bool) -> None:
    text = f"X=1\n{script}\n"
    done = subprocess.run(["bash", "-c", f'{text}echo "$X"'], capture_output=True, text=True, timeout=20, check=True)
    (found,) = [item.words[1] for item in read_script(f"{text}swift $X\n") if item.words[0] == "swift"]
    assert found == (done.stdout.split()[-1] if known else "$X")


@pytest.mark.parametrize(
    "script",
    [
        '[ "$0" = run.sh ] && X=2',
        '[ run.sh != "$0" ] && X=2',
        '[ "x$0" = xrun.sh ] && X=2',
        '[ "$0" = bash -o "$0" = -bash ] && X=2',
        '[ "$0" ] && [ "$0" != "" ] && X=2',
        'test "$0" = ./run.sh && X=2',
        "[[ $0 == run.sh ]] && X=2",
        '[[ run.sh == "$0" ]] && X=2',
        "[[ $0 == *run.sh && $0 != *bash ]] && X=2",
        "[[ $0 == */* ]] && X=2",
        "[[ $0 == *[st].sh ]] || X=2",
        '[[ "${BASH_SOURCE[0]}" == "$0" ]] && X=2',
        '[ "$(dirname "$0")" = . ] && X=2',
        '[ "$(basename "$0")" = run.sh ] && X=2',
        '[ "$(dirname "$0")/a.yaml" = "$(dirname "$0")/a.yaml" ] && [ a.yaml != "$(dirname "$0")/b.yaml" ] && X=2',
        'case "$0" in ./*) X=2 ;; /*) X=3 ;; esac',
        'case "$0" in bash | -bash) X=2 ;; *run.sh) X=3 ;; esac',
    ],
)
def test_a_script_may_be_started_by_any_path(script: str, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    (folder / "run.sh").write_text(f'X=1\n{script}\necho "$X"\n')
    starts = ((folder, "run.sh"), (folder, "./run.sh"), (tmp_path, "some/run.sh"), (tmp_path, f"{folder}/run.sh"))
    told = {subprocess.run(["bash", path], cwd=place, capture_output=True, text=True, check=True).stdout.strip()
            for place, path in starts}  # fmt: skip
    read = follow(f"X=1\n{script}\nswift $X\n", folder, "run.sh").commands
    (found,) = [item.words[1] for item in read if item.words[0] == "swift"]
    assert {found} == (told if len(told) == 1 else {"$X"})


def test_what_looks_like_a_condition_in_a_text_stays_as_it_is() -> None:
    read = read_script("run \"[[ a = b ]]\" '[[ a = b ]]' # [[ a\n[[ a = a ]]; run x = y\n")
    words = [item.words for item in read]
    assert words == [("run", "[[ a = b ]]", "[[ a = b ]]"), ("run", "x", "=", "y")]


@pytest.mark.parametrize(("tp", "split"), [(1, False), (4, True)])
def test_verl_divides_sequences_only_where_there_is_tensor_parallelism(tp: int, split: bool) -> None:
    """Its default is true, and Megatron-Core refuses it with one tensor-parallel rank."""
    script = (
        "python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo "
        "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=8 "
        f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={tp} trainer.n_gpus_per_node=8 "
    )
    assert convert(script).config.parallel.sequence_parallel == split


@pytest.mark.parametrize("end", ["exit 0", "break", "continue", ":"])
def test_what_ends_a_loop_of_one_round_ends_no_more_than_in_bash(end: str) -> None:
    """A script that exits in its only round starts nothing behind the loop."""
    script = f"for i in 1; do {end}; run in; done\nrun behind\n"
    command = ["bash", "-c", f"run() {{ echo $1; }}\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, env={})
    assert [item.words[1] for item in read_script(script) if item.words[0] == "run"] == done.stdout.split()


@pytest.mark.parametrize(
    ("condition", "rate"),
    [
        ("[ $(pick) = big ]", 2e-6),
        ("[ `pick` = big ]", 2e-6),
        ("[ $(pick) = small ]", 1e-6),
        ("[ $(uname) = Linux ]", None),
        ("[ `hostname` = h ]", None),
        ("[ $(( N % 8 )) -ne 0 ]", None),
        ("[ -n $(pick 9) ]", 2e-6),
    ],
)
def test_a_command_within_brackets_is_no_escaped_bracket(condition: str, rate: float | None) -> None:
    run = (
        "swift rlhf --rlhf_type grpo --model q --gradient_accumulation_steps 8 --num_generations 8 --learning_rate $LR"
    )
    script = f"pick() {{ echo big; }}\nLR=1e-6\nif {condition}; then LR=2e-6; fi\nNPROC_PER_NODE=8 {run}\n"
    found = convert(script)
    assert found.open == (("--learning_rate $LR",) if rate is None else ())
    assert rate in (None, found.config.optimizer.lr)


LISTS = [
    "a && false && swift 1; swift 2",
    "a || true && swift 1",
    "a && [[ -n '' ]] && swift 1; swift 2",
    "M=x; a && [ $M = y ] && swift 1; a && [ $M = x ] && swift 2",
    "if a && false; then swift 1; else swift 2; fi",
    "if a || true; then swift 1; else swift 2; fi",
    "a && b && swift 1; swift 2",
    "a && { b && true; } && swift 1; swift 2",
    "(a || b) && swift 1; swift 2",
    "a || false && swift 1; swift 2",
    "a && b || true && swift 1",
    "a || exit 1 && swift 1",
    "! a && swift 1; a && ! true && swift 2; swift 3",
    "f() { a && return 1; true; }; f && false && swift 1; swift 2",
    "set -e; a && false; swift 1",
]


@pytest.mark.parametrize("script", LISTS)
def test_what_runs_behind_commands_of_which_nobody_knows_whether_they_succeed(script: str, tmp_path: Path) -> None:
    """Each command fails and succeeds in turn: what runs in some case is found, and what runs in none is not."""
    ever = set[str]()
    for fails in itertools.product("01", repeat=2):
        given = {name: f"#!/bin/sh\nexit {status}\n" for name, status in zip("ab", fails, strict=True)}
        (tmp_path / "told").write_text("")
        _, told = given_to_swift(script, tmp_path, given)
        ever |= {"".join(words) for words in told}
    both = follow(script)
    found = {command.words[-1] for command in (*both.commands, *both.possible) if command.words[0] == "swift"}
    assert found == ever
