"""Arguments that are empty by a variable are told, however the script tests it: that a run had one is likely (2 s)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert

RUN = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model q --gradient_accumulation_steps 8 --num_generations 8 "
VERL = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=t data.train_batch_size=8 "
    "actor_rollout_ref.model.path=q actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 "
    "trainer.n_gpus_per_node=8 "
)
TRL = "trl grpo --model_name_or_path q --dataset_name d --num_generations 8 --gradient_accumulation_steps 8 "
FOLDER = "actor_rollout_ref.model.lora_adapter_path"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
LORA = RUN + "--tuner_type lora "


def told(text: str) -> list[str]:
    return [line for line in convert(text).assumed if "is empty, since" in line]


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ('A="${A:-}"\nB=$A\n[ -d "$B" ] || exit 1\n', "A"),
        ('A="${A:-}"\nls "$A" || exit 1\n', "A"),
        ('A="${1:-}"\nneed() { local d=$1; [ -d "$d" ] || exit 1; }\nneed "$A"\n', "A"),
        ('set -e\nA=""\nf() { [ -d "$A" ]; }\nf\n', "A"),
    ],
)
@pytest.mark.parametrize(
    ("run", "option"),
    [
        (f'{LORA}--adapters "$A"\n', "--adapters"),
        (f"{LORA}--adapters \\\n  $A --lora_rank 4\n", "--adapters"),
        (f"{LORA}--adapters=${{A}} --lora_rank 4\n", "--adapters"),
        (f'ARGS="--lora_rank 4 --adapters $A"\n{LORA}$ARGS\n', "--adapters"),
        (f'ARGS=(--adapters "$A" --lora_rank 4)\n{LORA}"${{ARGS[@]}}"\n', "--adapters"),
        (f'run() {{ {LORA}"$@"; }}\nrun --adapters "$A"\n', "--adapters"),
        (f'{LORA}--adapters "${{A%/}}"\n', "--adapters"),
        (f'{LORA}--adapters "${{A-}}"\n', "--adapters"),
        (f'{LORA}--adapters out --vllm-limit-mm-per-prompt "$A"\n', "--vllm_limit_mm_per_prompt"),
        (f'{LORA}--adapters "${{A:-${{Z:-}}}}"\n', "--adapters"),
        (f'{LORA}--adapters "$(echo $A)"\n', "--adapters"),
        (f'Z=\n{LORA}--adapters "$A$Z"\n', "--adapters"),
        (f'A=($A)\n{LORA}--adapters "${{A[@]}}"\n', "--adapters"),
        (f"{VERL}actor_rollout_ref.model.lora_rank=8 {FOLDER}=\"'$A'\"\n", FOLDER),
        (f'{VERL}actor_rollout_ref.model.lora_rank=8 "{FOLDER}=$A"\n', FOLDER),
        (f"{VERL}actor_rollout_ref.model.lora_rank=8 {FOLDER}=$A\n", FOLDER),
        (f"{VERL}+actor_rollout_ref.rollout.engine_kwargs.vllm.tool-parser=$A\n", f"{ENGINE}.tool-parser"),
    ],
)
def test_an_argument_that_is_empty_by_a_variable_is_told(before: str, name: str, run: str, option: str) -> None:
    (line,) = told(before + run)
    assert line.startswith(f"{option} is empty, since ${name} is (line ")


def test_the_line_is_that_of_the_option_and_a_default_may_stand_there() -> None:
    (line,) = told(f"{LORA}\\\n --lora_rank 4 \\\n --adapters ${{ADAPTERS:-}}\n")
    assert line.startswith("--adapters is empty, since $ADAPTERS is (line 3)")


@pytest.mark.parametrize(
    "text",
    [
        f'A=\nX=(--lora_rank 4)\nX+=(--adapters)\nX+=("$A")\n{LORA}"${{X[@]}}"\n',
        f'A=\nO=--adapters\n{LORA}$O "$A"\n',
        f'A=\n{VERL}actor_rollout_ref.model.lora_rank=8 {FOLDER}=\\"$A\\"\n',
    ],
)
def test_an_argument_that_a_script_empties_in_another_way_is_told(text: str) -> None:
    assert any("is empty as the script makes it" in line for line in convert(text).assumed)


def test_what_is_advised_works() -> None:
    text = f'A=${{1:-}}\nls "$A" || exit 1\n{LORA}--adapters "$A"\n'
    (line,) = told(text)
    assert line.endswith("(line 3): if the original run had a value, write it out there")
    found = convert(text.replace('--adapters "$A"', "--adapters out"))
    assert found.config.adapter.path == "out" and not any("is empty" in one for one in found.assumed)


def test_a_part_of_a_text_that_is_no_word_is_no_mistake() -> None:
    assert convert(f"A=\nbash -c '{LORA}--beta 0.1 --adapters \"$A\"'\n").config.adapter.type == "lora"


@pytest.mark.parametrize(
    "text",
    [
        f'{LORA}--adapters ""\n',  # empty by its own text
        f'A=\necho --adapters "$A"\n{LORA}--adapters x\n',  # of another command, and the run has one
        f'A=\necho --adapters "$A"\n{LORA}--adapters ""\n',
        f"A=out\n{LORA}--adapters $A\n",
        f"A=\n{LORA}--adapters x$A\n",  # a part of a value
        f"A=\n{LORA}--lora_rank 4 ${{A:+--adapters $A}}\n",  # not given at all
        f'A=\nif [ -n "$A" ]; then X="--adapters $A"; fi\n{LORA}$X\n',
        f'A=\nX="--adapters $A"\nX=\n{LORA}$X\n',
    ],
)
def test_nothing_is_told_of_an_argument_that_is_not_empty_by_a_variable(text: str) -> None:
    assert not told(text)


def test_a_variable_that_the_script_never_sets_is_still_open() -> None:
    found = convert(f"{LORA}--adapters $A\n")
    assert not told(f"{LORA}--adapters $A\n") and any("$A" in line for line in found.open)


def test_looking_for_empty_values_changes_no_variable() -> None:
    """Each of these words counts up where bash expands it, once."""
    text = 'i=0\nX=(0.1 0.2 0.3)\nARGS="--beta ${X[i++]} --temperature ${X[i++]}"\necho --seed ${X[i++]}\n'
    found = convert(f"{text}{RUN}$ARGS --max_steps $i\n").config
    assert (found.algorithm.kl_beta, found.rollout.temperature, found.run.max_steps) == (0.1, 0.2, 3)


@pytest.mark.parametrize(
    ("run", "wrong", "option"),
    [
        (f"{RUN}--learning_rate $A\n", "--learning_rate: must be a number", "--learning_rate"),
        (f'{LORA}--lora_rank "$A"\n', "--lora_rank : must be a whole number", "--lora_rank"),
        (f"{TRL}--use_peft --lora_target_modules $A\n", "must name linear layers", "--lora_target_modules"),
        (f'{TRL}--use_peft "$A"\n', "must be true or false", "--use_peft"),
    ],
)
def test_an_error_of_an_empty_argument_names_the_variable(run: str, wrong: str, option: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        convert(f"A=\nB=\n{run}")
    first, second = str(caught.value).splitlines()
    assert first.endswith(wrong)
    assert second.startswith(f"{option} is empty, since $A is (line 3)")


def test_an_error_of_another_argument_says_nothing_of_what_is_empty() -> None:
    with pytest.raises(ValueError, match="must") as caught:
        convert(f'A=\n{LORA}--adapters "$A" --lora_rank x\n')
    assert "empty" not in str(caught.value)
