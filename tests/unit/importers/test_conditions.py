"""Conditions of scripts, each held against bash itself: every operator where it holds, and where it does not (2 s)."""

from __future__ import annotations

import itertools
import subprocess

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.shell import read_script

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
