"""Forms that bash reads and the grammar of the parser stumbles over are read as bash reads them (seconds)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.scope import Scope
from gspo_hpc.importers.scripts.shell import read_script

from .test_shells_apart import in_bash

HEAD = "shopt -s extglob\nm=foo-3B-x n=2 p=foo-\nA=(a b c d e)\nset -- q r 's t'\n"
PATTERNS = [
    "*-+([0-9])B-*", "*.@(7b|x)*", "f+(o)-[0-9]B*(-x)", '"foo"-+([0-9])*', "$p+([0-9])B-x", "*+([0-9])?(B)-x",
    "+([a-z])-@(3|7)B*", "f+(o|p)-*", "f@(oo-|'o o')3*", "f+(o o)-*", "[a-f]*(o)-+([[:digit:]])B-x",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "test",
    [
        "[[ $m == {} ]] && L=2",
        "[[ $m != {} && $n ]] && L=2",
        "[[ ( -z $n || $m == {} ) ]] || L=2",
        "case $m in {}) L=2 ;; *) L=3 ;; esac",
        "case $m in no|{}) L=2 ;; *) L=3 ;; esac",
        "case $m in\n  (b|{}) L=2 ;;\nesac",
    ],
)
def test_groups_in_the_midst_of_a_pattern(test: str, pattern: str) -> None:
    script = f'{HEAD}L=1\n{test.format(pattern)}\na "$L"'
    assert read_script(script)[-1].words == in_bash(script)[0]


def test_groups_outside_of_tests_are_refused_where_bash_refuses_them() -> None:
    for text in ("case $m in a+(b)) x;; esac", "a +(b)"):
        with pytest.raises(ValueError, match="line 1: "):
            read_script(text)


@pytest.mark.parametrize(
    "value",
    [
        r'"${X:-{\"a\":1}}"',
        r'"${X:-{\"pass_config\":{\"a\":false}}}"',
        r'"${X-{\"a\":\"$m\",\"b\":\"${n}\"}}"',
        r'"${m:+{\"m\":\"$m\"}}"',
        r'"${X:-[{\"t\":\"x y\"}]}"',
        r'"${X:-[1, 2]}"',
        r'"${X:-${Y:-{\"a\":1}}}"',
        '${X:-{"a":1}}',
        '"${X:-{"a":1}}"',
        '"${X:=a|b}"',
        '"${X:-a;b}"',
        "${X:-a&b}",
        '"${X:-f(x) + g(y)}"',
        "\"${X:-{'a': 1}}\"",
        "${X:-'{\"a\":1}'}",
        '"${A[9]:-{x}"',
    ],
)
def test_signs_in_a_default(value: str) -> None:
    script = f'{HEAD}L={value}\na "$L" "${{X-}}"'
    assert read_script(script)[-1].words == in_bash(script)[0]


def test_brackets_in_a_default_within_a_here_document_stay_as_they_are() -> None:
    script = "cat > made.sh <<'END'\na \"${X:-[b]}\"\nEND\nbash made.sh"
    assert read_script(script)[-1].words == ("a", "[b]")


@pytest.mark.parametrize(
    "line",
    [
        "L=$((10#$y + 1))",
        "L=$(((10#$y + 1) * 10#$y))",
        "L=$((16#$y))",
        "f() { L=$((10#$1)); }; f 09",
        "(( 10#$y > 7 )) && L=2",
        "let L=10#$y+1",
        "L=${A[10#$y]}",
    ],
)
def test_numbers_with_a_base_before_a_variable(line: str) -> None:
    script = f'y=08\n{HEAD}A+=(f g h i j)\n{line}\na "$L"'
    assert read_script(script)[-1].words == in_bash(script)[0]


@pytest.mark.parametrize(
    "text",
    ["10#08", "16#fF", "36#Z", "37#Z", "64#@", "64#_", "2#12", "1#0", "65#1", "010#11", "10#", "-10#08", "0x10#1",
     "10#08+1", "16#FFFFFFFFFFFFFFFFF", "10#0x8", "8#018", "2#101*2#11"],
)  # fmt: skip
def test_numbers_have_the_base_that_is_written_before_them(text: str) -> None:
    value = evaluate(text, Scope())
    assert [("a", str(value))] == in_bash(f"a $(({text}))") or value is None and not in_bash(f"a $(({text}))")


@pytest.mark.parametrize(
    "line",
    [
        "! { L=2; }",
        "! { L=2; } || L=4",
        "! { false; } && L=5",
        '! { [ -n "$Z" ]; } && L=6',
        "! { { L=2; }; [ a = b ]; } && L=${L}7",
        "if ! { L=2; false; }; then L=${L}3; fi",
        "f() { ! { L=2; return; }; L=3; }; f",
        "! {\n  L=2\n  n=3\n} 2>/dev/null",
        "while ! { L=2; true; }; do break; done",
        "{ L=2; } || ! { L=3; }",
        "time { L=2; }",
        "true && time -p { L=2; }",
        "if [[ $m == foo* ]] then L=2; fi",
        '[[ "$1 $3" == q\\ s* ]] && L=2',
        "[[ $3 == s\\ t ]] && L=2",
        "for x do\nL=$L$x\ndone",
        'L="$m \\\n$n"',
        'L="$m\\\n$n"',
        'L="a \\\nb\nc"\nn=4',
        'L=b\\\nc\nL="x\n$L"',
    ],
)
def test_statements(line: str) -> None:
    script = f'{HEAD}L=1\n{line}\na "$L" $n'
    assert read_script(script)[-1].words == in_bash(script)[0]


@pytest.mark.parametrize(
    "words",
    [
        '"${A[@]:0:${#A[@]}-2}"', '"${A[@]: -2}"', '"${A[@]:(-2):1}"', '"${A[@]:n}"', '"${A[@]:$n:$n}"',
        '"${A[@]:1+1:n-1}"', '"${A[@]: -9}"', '"${A[@]:9}"', '"${A[@]:1:0}"', '"${A[*]:1:2}"', '"${@: -1}"',
        '"${@:1:$#-1}"', '"${@:2}"', '"${@:$#}"', '"${m:1:-2}"', '"${m: -3}"', '"${m: -3:2}"', '"${m:n}"',
        '"${m: -99}"', '"${m:99}"', '"${m:2:-4}"', '"${m:0:${#m}-1}"', '"${A[@]: -2:1}"', '"${m:0-4}"',
        "{1..3}", "{3..1}", "${A[@]:0:2} {2..2}",
    ],
)  # fmt: skip
def test_parts_and_ranges(words: str) -> None:
    script = f"{HEAD}a {words}"
    assert read_script(script)[-1].words == in_bash(script)[0]


RUN = "swift rlhf --rlhf_type grpo --model q --num_generations 8 --beta 0.1 --learning_rate"


def test_parts_that_are_not_known_stand_behind_the_value_of_an_argument() -> None:
    more = '"${A[@]:0:${#A[@]}-2}"'
    assert convert(f"A=(x $(date))\n{RUN} 1e-6 {more}", gpus=1).open == ("${A[@]:0:${#A[@]}-2}",)
    assert convert(f"A=(--beta 0.2 x y)\n{RUN} 1e-6 {more}", gpus=1).config.algorithm.kl_beta == 0.2


def test_ranges_with_zeros_or_of_many_numbers_are_not_known() -> None:
    for braces in ("{01..3}", "{1..999}", "{a..c}", "{1..9..2}"):
        assert convert(f"for i in {braces}; do LR=$i; done\n{RUN} $LR", gpus=1).open == ("--learning_rate $LR",)
    assert convert(f"n=0\nfor i in {{1..3}}; do n=$((n+i)); done\n{RUN} 1 --seed $n", gpus=1).values["seed"] == "6"
    assert convert(f"A=({{1..3}})\n{RUN} 1 --num_iterations ${{#A[@]}}", gpus=1).values["num_iterations"] == "3"


def test_angles_in_a_test_are_no_placeholder() -> None:
    assert convert(f'[[ "$t" =~ (<think>) ]]\n{RUN} 2e-6', gpus=1).config.optimizer.lr == 2e-6


@pytest.mark.parametrize("text", ["export A=$A:<your_path>", "A=<your-path> ; true", "(A=b/<path>)"])
def test_a_variable_that_is_set_to_a_placeholder_is_told(text: str) -> None:
    name = text[text.index("<") : text.index(">") + 1]
    found = convert(f"true\n{text}\n{RUN} 2e-6", gpus=1)
    assert f"line 2: {name} is a placeholder, at which bash reads no further: put its value there" in found.assumed
    assert found.config.optimizer.lr == 2e-6
    for known in (f"# {text}", f"B='\n{text}\n'", f"cat > f <<END\n{text}\nEND"):
        assert not any("placeholder" in line for line in convert(f"{known}\n{RUN} 2e-6", gpus=1).assumed)


def test_a_placeholder_at_the_end_of_a_command_is_refused() -> None:
    with pytest.raises(ValueError, match="^line 2: <PATH> is a placeholder, at which bash reads no further"):
        convert(f"true\npython3 prepare.py <PATH>\n{RUN} 1e-6", gpus=1)


def test_what_eval_is_given_is_followed_through_arithmetic() -> None:
    found = convert(f'eval "n=\\$((4*2))"\n{RUN} 1e-6 --seed $n', gpus=1)
    assert found.values["seed"] == "8" and not found.open
    assert convert(f'eval "n=\\$(cat f)"\n{RUN} 1e-6 --seed $n', gpus=1).open == ("--seed $n",)


@pytest.mark.parametrize("kind", ["dpo", "gkd", "kto"])
def test_a_yaml_of_another_trainer_of_ms_swift_is_refused_for_that(kind: str) -> None:
    with pytest.raises(ValueError, match=f"^--rlhf_type {kind}: only --rlhf_type grpo has a counterpart here"):
        convert(f"rlhf_type: {kind}\nmodel: q\ndataset: d\n", name="run.yaml")
    with pytest.raises(ValueError, match="it is not told whether these arguments are those of megatron rlhf or of"):
        convert("rlhf_type: grpo\nmodel: q\ndataset: d\n", name="run.yaml")
