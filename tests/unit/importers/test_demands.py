"""Variables without which a script ends: a run of it has them from elsewhere (seconds)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert

RUN = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model q --gradient_accumulation_steps 8 --num_generations 8 "
DEMANDS = {
    "colon": ': "${A:?set it}"',
    "colon in a value": 'B="${A:?}"',
    "test": '[ -z "$A" ] && exit 1',
    "or": '[[ -n "${A}" ]] || { echo "A?"; exit 1; }',
    "if": 'if [ -z "$A" ]; then echo "A?" >&2; exit 1; fi',
    "elif": 'if [ "$Z" = 1 ]; then echo; elif [ -z "$A" ]; then exit 1; fi',
    "else": 'if [ -n "$A" ]; then echo; else exit 1; fi',
    "case": 'case "$A" in "") exit 1 ;; esac',
    "function": 'die() { echo "$1"; exit 1; }\n[ -n "$A" ] || die "A?"',
    "function in if": 'usage() { echo; exit 1; }\nif [[ -z "$A" ]]; then usage; fi',
    "argument": 'need() { if [[ -z "$1" ]]; then echo "A?"; exit 2; fi; }\nneed "${A}"',
    "second argument": 'require() { [ -n "$2" ] || exit 2; }\nrequire "path of A" "$A"',
    "two": 'Z=""\nif [ -z "$A" ] || [ -z "$Z" ]; then exit 1; fi',
}


@pytest.mark.parametrize("option", ["adapters", "beta", "temperature"])
@pytest.mark.parametrize("demand", DEMANDS.values(), ids=DEMANDS)
def test_a_variable_that_the_script_demands_is_not_known(demand: str, option: str) -> None:
    """It is empty where the script begins; that a run has it so is what the script rules out."""
    found = convert(f'A="${{A:-}}"\n{demand}\n{RUN} --{option} "$A"', name="run.sh")
    (item,) = [item for item in found.left if item.name == option]
    assert "has to be given to the script (line" in item.why and "demands it" in item.why
    assert f"--{option} $A" in found.open


def test_a_variable_that_no_line_demands_is_switched_off() -> None:
    text = f'A="${{A:-}}"\nB=\n: "${{B?}}"\n[ -z "$A" ] && echo\n{RUN} --ref_model "$A" --adapters "$B"'
    found = convert(text, name="x.sh")
    assert {item.name: item.why.partition(" in ")[0] for item in found.left} == {
        "ref_model": "switched off or empty",
        "adapters": "switched off or empty",
    }


def test_a_choice_that_ends_the_script_is_another_one_in_a_run() -> None:
    """A value that the condition names need not be what the script alone makes it, where nothing in it is empty."""
    text = f'M=0.5\nif [ "$M" = 0.5 ]; then echo "choose"; exit 1; fi\n{RUN} --beta 0.1 --temperature "$M"'
    assert "--temperature $M" in convert(text, name="x.sh").open


def test_what_a_demanded_variable_adds_is_added_in_a_run() -> None:
    text = f'A="${{A:-}}"\nE=()\nif [ -n "$A" ]; then E+=(--beta 0.5); else exit 1; fi\n{RUN} "${{E[@]}}"'
    found = convert(text, name="x.sh")
    assert found.config.algorithm.kl_beta == 0.5 and not found.open
    found = convert(text.replace("else exit 1", "else echo; fi\nif [ -z $A ]; then exit 1"), name="x.sh")
    assert found.config.algorithm.kl_beta != 0.5 and not found.open  # it is read as started without A


ONE_VALUE = {
    "double": '[[ "$A" == "0.5" ]] || exit 1',
    "double, one sign": '[[ "$A" = 0.5 ]] || exit 1',
    "single": '[ "$A" = 0.5 ] || exit 1',
    "without quotes": "[ $A = 0.5 ] || exit 1",
    "test": 'test "$A" = 0.5 || exit 1',
    "turned round": '[[ 0.5 == "$A" ]] || exit',
    "unless": '[[ "$A" != 0.5 ]] && exit 1',
    "not": 'if ! [[ "$A" == 0.5 ]]; then exit 1; fi',
    "if": 'if [ "$A" != 0.5 ]; then echo "A?"; exit 1; fi',
    "else": 'if [ "$A" = 0.5 ]; then echo; else exit 1; fi',
    "in the branch": 'if [ "$A" = 0.5 ]; then B=$A; else exit 1; fi\nA=$B',
    "elif": 'if [ "$Z" = x ]; then echo; elif [ "$A" != 0.5 ]; then exit 1; fi',
    "default": '[ "${A:-}" = 0.5 ] || exit 1',
    "another default": '[ "${A:-1}" = 0.5 ] || exit 1',
    "and": '[[ "$Z" == x && "$A" == 0.5 ]] || exit 1',
    "and, one sign": "[[ $Z = x && $A = 0.5 ]] || exit 1",
    "or": 'if [[ -z "$A" || "$A" != 0.5 ]]; then exit 1; fi',
    "-a": '[ -n "$A" -a "$A" = 0.5 ] || exit 1',
    "two tests": '[ -n "$A" ] && [ "$A" = 0.5 ] || exit 1',
    "variable": 'WANT=0.5\n[ "$A" = "$WANT" ] || exit 1',
    "die": 'die() { echo "$1"; exit 1; }\n[ "$A" = 0.5 ] || die "A?"',
    "function": 'check() { [ "$1" = 0.5 ] || exit 2; }\ncheck "$A"',
    "second argument": 'check() { if [[ "$2" != 0.5 ]]; then exit 2; fi; }\ncheck a "${A}"',
    "local": 'check() { local a=$1; [ "$a" = 0.5 ] || exit 2; }\ncheck "$A"',
    "copy": 'B=$A\n[ "$B" = 0.5 ] || exit 1',
    "several": '[ "$A" = 0.5 ] || [ "$A" = 0.7 ] || exit 1\n[ "$A" = 0.7 ] && exit 1\n[ "$A" = 0.5 ] || exit 1',
}


_IN_TWO_PLACES = ("in the branch", "variable", "function", "second argument", "local", "copy")
BEGINS = ("", 'A="${A:-}"\n', "A=$(cat a)\n", 'A="$1"\n', 'A="${1:-}"\n', "A=0.1\n")


@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("demand", ONE_VALUE)
def test_the_one_value_with_which_a_script_goes_on_is_that_of_a_run(begin: str, demand: str) -> None:
    if begin and demand in _IN_TWO_PLACES:
        begin = "A=$(cat a)\n" if demand in ("variable", "function", "second argument") else ""
    found = convert(f'{begin}{ONE_VALUE[demand]}\n{RUN} --beta "$A"', name="x.sh")
    assert found.config.algorithm.kl_beta == 0.5 and not found.open
    assert any("is taken to be 0.5: line" in note and "with any other value" in note for note in found.assumed)


@pytest.mark.parametrize(
    "demand", ['[[ "$A" -eq 8 ]] || exit', "[ $A -ne 8 ] && exit", "[ 8 -eq $A ] || exit", "(( A == 8 )) || exit 1"]
)
def test_the_one_number_with_which_a_script_goes_on_is_that_of_a_run(demand: str) -> None:
    found = convert(f"{demand}\n{RUN.replace('num_generations 8', 'num_generations $A')}", name="x.sh")
    assert found.config.batch.num_generations == 8 and not found.open


def test_an_argument_that_a_script_demands_is_given() -> None:
    for text in ('[[ "$2" == 0.5 ]] || exit 1', 'if [ "${2:-}" != 0.5 ]; then exit; fi'):
        found = convert(f'{text}\n{RUN} --beta "$2" --temperature "$1"', name="x.sh")
        assert found.config.algorithm.kl_beta == 0.5 and found.open == ("--temperature $1",)


def test_what_the_caller_gives_is_in_the_environment() -> None:
    run = RUN.removeprefix("NPROC_PER_NODE=8 ")
    found = convert(f'[ "$NPROC_PER_NODE" = 4 ] || exit 1\n{run}', name="x.sh")
    assert found.config.cluster.gpus_per_node == 4


SEVERAL = {
    '[[ "$A" == 0.5 || "$A" == 0.7 ]] || exit 1': "0.5 or 0.7",
    'if [ "$A" != 0.5 ] && [ "$A" != 0.7 ]; then exit 1; fi': "0.5 or 0.7",
    '[[ "$A" == 0.* ]] || exit 1': "it",
    '[[ "$A" =~ ^0.5$ ]] || exit 1': "it",
    '[ "$A" = 0.5 ] || [ "$Z" = x ] || exit 1': "it",
    '[ "$A" -gt 4 ] || exit 1': "it",
}


@pytest.mark.parametrize("demand", SEVERAL)
def test_of_several_values_with_which_a_script_goes_on_none_is_taken(demand: str) -> None:
    found = convert(f'{demand}\n{RUN} --beta "$A"', name="x.sh")
    assert "--beta $A" in found.open
    why = f"(line 1 demands {SEVERAL[demand]})" if SEVERAL[demand] else "is not set in the script"
    assert [why in item.why for item in found.left if item.name == "beta"] == [True]


@pytest.mark.parametrize(
    "text",
    [
        'A=$(cat a)\nif [ "$A" = 0.5 ]; then A=$(cat b); else exit 1; fi',  # it is another one behind the test
        'A=$(cat a)\nif [ "$A" = 0.5 ]; then echo; else echo; fi',
        'A=$(cat a)\n([ "$A" = 0.5 ] || exit 1)',  # a shell of its own ends
        'A=$(cat a)\nf() { [ "$A" = 0.5 ] || return 1; }\nf',
        'A=$(cat a)\n[ "$A" = 0.5 ] && A=$(cat b) || exit 1',
    ],
)
def test_a_value_that_a_run_need_not_have_is_not_known(text: str) -> None:
    assert len(convert(f'{text}\n{RUN} --beta "$A"', name="x.sh").open) == 1


def test_adapters_that_are_not_known_are_told() -> None:
    found = convert(f'{RUN} --adapters "$(ls -d out/* | tail -1)"', name="x.sh")
    assert found.config.adapter.type == "lora"
    assert any(given.startswith("--adapters") for given in found.open)
    assert any(line.startswith("--adapters") for line in found.assumed)


@pytest.mark.parametrize(
    "command", ["swift rlhf --tuner_type full", "megatron rlhf", "megatron rlhf --tuner_type full"]
)
@pytest.mark.parametrize("demand", ["colon", "test", "case"])
def test_adapters_that_are_demanded_beside_a_full_tuner_are_not_known(command: str, demand: str) -> None:
    run = RUN.replace("swift rlhf", command).replace("--gradient_accumulation_steps 8", "--global_batch_size 64")
    run = run if "megatron" in command else RUN.replace("swift rlhf", command)
    found = convert(f'A="${{A:-}}"\n{DEMANDS[demand]}\n{run} --adapters "$A"', name="run.sh")
    (item,) = [item for item in found.left if item.name == "adapters"]
    assert "has to be given to the script (line" in item.why and "--adapters $A" in found.open


def test_adapters_beside_a_full_tuner_are_told() -> None:
    found = convert(f"{RUN} --tuner_type full --adapters out/ckpt", name="run.sh")
    (item,) = [item for item in found.left if item.name == "adapters"]
    assert "the policy does not begin with them" in item.why
    assert any(line.startswith("--adapters out/ckpt") for line in found.assumed)
