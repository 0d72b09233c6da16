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
        "ref_model": "switched off",
        "adapters": "switched off",
    }


def test_a_choice_that_ends_the_script_is_another_one_in_a_run() -> None:
    """A value that the condition names need not be what the script alone makes it, where nothing in it is empty."""
    text = f'M=0.5\nif [ "$M" = 0.5 ]; then echo "choose"; exit 1; fi\n{RUN} --beta 0.1 --temperature "$M"'
    assert "--temperature $M" in convert(text, name="x.sh").open


def test_what_a_demanded_variable_adds_is_not_known() -> None:
    text = f'A="${{A:-}}"\nE=()\nif [ -n "$A" ]; then E+=(--beta 0.5); else exit 1; fi\n{RUN} "${{E[@]}}"'
    found = convert(text, name="x.sh")
    assert any(given.startswith("--beta") for given in found.open)


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
