"""Words of a command that are known only when the script runs, and may be any number of arguments (seconds)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert

SWIFT = "NPROC_PER_NODE=8 swift rlhf {} --rlhf_type grpo --model q --num_generations 8 {}"
MEGATRON = "NPROC_PER_NODE=8 megatron rlhf {} --rlhf_type grpo --model q --global_batch_size 64 --num_generations 8 {}"
TRL = "accelerate launch --num_processes 8 train_grpo.py {} --model_name_or_path q --num_generations 8 {}"
VERL = (
    "python3 -m verl.trainer.main_ppo {} algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "actor_rollout_ref.model.path=q actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
    "trainer.n_gpus_per_node=8 trainer.nnodes=1 {}"
)
# What stands before the command, and the word in it that is not known.
WORDS = [
    ("", "$(cat extra.txt)"),
    ("", '$( [[ -n "$STOP" ]] && echo --beta "$STOP" )'),
    ("EXTRA=$(cat extra.txt)\n", "$EXTRA"),
    ("EXTRA=$(cat extra.txt)\n", "${EXTRA}"),
    ("EXTRA=($(cat extra.txt))\n", '"${EXTRA[@]}"'),
    ("read -r EXTRA < extra.txt\n", "$EXTRA"),
]
# What stands before the word: an option that takes several values, one that is left out, and one of a number.
BEFORE = [
    "--reward_funcs a",
    "--reward_weights 0.1 0.4",
    "--report_to wandb",
    "--log_completions true",
    "--beta 0.1",
]


@pytest.mark.parametrize(("line", "word"), WORDS)
@pytest.mark.parametrize("run", [SWIFT, MEGATRON, TRL], ids=["swift", "megatron", "trl"])
def test_a_word_after_a_value_may_be_further_options(run: str, line: str, word: str) -> None:
    for before in BEFORE:
        found = convert(line + run.format("", f"{before} {word}"), name="run.sh")
        told = [item for item in found.left if item.why.endswith("what it adds is not known")]
        assert len(told) == 1 and told[0].given in found.open, (before, found.left)
        given = before.removeprefix("--")
        assert any(item.given.removeprefix("--") in (given, given.replace(" ", "=", 1))
                   for item in (*found.carried, *found.left)), before  # fmt: skip


@pytest.mark.parametrize(("line", "word"), WORDS)
@pytest.mark.parametrize("run", [SWIFT, MEGATRON, TRL, VERL], ids=["swift", "megatron", "trl", "verl"])
@pytest.mark.parametrize("first", [True, False])
def test_a_word_of_its_own_is_told(run: str, line: str, word: str, first: bool) -> None:
    last = "" if run == VERL else "--beta 0.1"
    found = convert(line + run.format(*((word, last) if first else ("", f"{last} {word}"))), name="run.sh")
    told = [item for item in found.left if item.why.endswith("what it adds is not known")]
    assert len(told) == 1 and told[0].given in found.open
    assert any(line.endswith("what it adds is not known") for line in found.assumed)


def test_a_word_in_quotes_and_a_part_of_a_word_are_values() -> None:
    run = SWIFT.format("", '--dataset $DATA/a.jsonl $DATA/b.jsonl "$(ls c)" --beta 0.1')
    found = convert(f"DATA=$(pwd)\n{run}", name="run.sh")
    (dataset,) = [item for item in found.left if item.name == "dataset"]
    assert dataset.given.startswith("--dataset $(pwd)/a.jsonl $(pwd)/b.jsonl $(ls")
    assert not any("what it adds" in item.why for item in found.left)


@pytest.mark.parametrize(
    ("before", "word", "told"),
    [
        ("", "$(cat extra.txt)", True),
        ("", "$(sed s/x/y/ extra.txt)", True),
        ("EXTRA=($(cat extra.txt))\n", '"${EXTRA[@]}"', True),
        ("EXTRA=()\n[ -f x ] && EXTRA+=(--beta 0.5)\n", '"${EXTRA[@]}"', True),
        ("", "$(date +%s)", False),
        ("", '"$(cat extra.txt)"', False),
        ("EXTRA=true\n", "$EXTRA", False),
    ],
)
def test_the_first_word_after_a_switch_may_be_further_options(before: str, word: str, told: bool) -> None:
    """`--log_completions` takes no value as a rule, so what follows it may be anything."""
    found = convert(before + TRL.format("", f"--log_completions {word}"), name="run.sh")
    added = [item.given for item in found.left if item.why.endswith("what it adds is not known")]
    assert bool(added) == told and {*added} <= {*found.open}
    assert any(item.name == "log_completions" for item in found.left)


def test_options_that_a_list_may_add_are_no_value_of_the_one_at_its_end() -> None:
    script = f'A=(--log_completions)\n[ -f x ] && A+=(--beta 0.5)\n{TRL.format("", "")} "${{A[@]}}"'
    given = {item.name: item.given for item in convert(script, name="run.sh").left}
    assert given["log_completions"] == "log_completions=true" and given["beta"] == "beta=${A}"


LISTS = {
    "array": ("A=(--beta 0.1 --epsilon 0.3)", "A+=({})", '"${A[@]}"'),
    "array again": ("A=(--beta 0.1 --epsilon 0.3)", 'A=("${{A[@]}}" {})', '"${A[@]}"'),
    "text": ('A="--beta 0.1 --epsilon 0.3"', 'A="$A {}"', "$A"),
    "text added to": ('A="--beta 0.1 --epsilon 0.3"', 'A+=" {}"', "$A"),
}
LOOPS = {
    "files": "for f in $(ls cfg); do {}; done",
    "lines": "while read -r f; do {}; done < extra.txt",
    "until": "until probe; do {}; done",
    "nested": "for d in $(ls cfg); do for f in $(ls $d); do {}; done; done",
}


@pytest.mark.parametrize(("begins", "adds", "word"), LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_list_that_a_loop_makes_longer_keeps_what_it_began_with(loop: str, begins: str, adds: str, word: str) -> None:
    script = f"{begins}\n{loop.format(adds.format('--epsilon $f'))}\n{TRL.format('', word)}"
    found = convert(script, name="run.sh")
    assert found.config.algorithm.kl_beta == 0.1
    assert any(item.why.endswith("changes in the loop of line 2; what it adds is not known") for item in found.left)
    assert any(given.startswith("epsilon") for given in found.open)  # the loop may give it another value


@pytest.mark.parametrize(
    "body", ["A=(--beta 0.2)", 'A=("${A[@]:2}")', 'A=(--x "${A[@]}")', "A[1]=0.5", "unset A", "f A"]
)
def test_a_list_that_a_loop_changes_otherwise_is_not_known(body: str) -> None:
    script = f"f() {{ read -ra $1; }}\nA=(--beta 0.1)\nfor g in $(ls); do A+=(--epsilon 0.3); {body}; done\n"
    found = convert(script + TRL.format("", '"${A[@]}"'), name="run.sh")
    assert "beta" not in {item.name for item in found.carried}


def test_what_several_conditions_may_add_is_told_of_each() -> None:
    added = "[ -f a ] && A+=(--beta 0.5)\n[ -f b ] && A+=(--epsilon 0.9)\n"
    script = f'A=(--beta 0.1 --epsilon 0.3)\n{added}{TRL.format("", "")} "${{A[@]}}"'
    found = convert(script, name="run.sh")
    assert {"beta=${A}", "epsilon=${A}"} <= {*found.open}


def test_a_refusal_names_words_that_may_have_what_is_not_given() -> None:
    """It said only that adv_estimator is not given, of a script whose arguments are a list that is not known."""
    run = 'ARGS=($(cat args.txt))\npython3 -m verl.trainer.main_ppo "${ARGS[@]}" actor_rollout_ref.model.path=q'
    with pytest.raises(ValueError, match="adv_estimator is not given") as refused:
        convert(run, name="run.sh")
    assert str(refused.value).endswith("\n$(cat...): known only when the script runs; what it adds is not known")
    with pytest.raises(ValueError, match="adv_estimator is not given") as refused:
        convert("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=q", name="run.sh")
    assert "what it adds" not in str(refused.value)


@pytest.mark.parametrize("run", [SWIFT.format("", "--beta 0.1"), MEGATRON.format("", "--beta 0.1"), TRL.format("", ""),
                                 f"{VERL.format('', '')}"])  # fmt: skip
@pytest.mark.parametrize("dots", ["...", "…"])
def test_dots_of_an_example_stand_for_arguments_that_it_leaves_out(run: str, dots: str) -> None:
    """They were refused (`--beta 0.1 ...: must be one value`), or taken for one more item of a list."""
    whole, found = convert(run), convert(f"{run} \\\n  {dots}\n")
    assert found.config == whole.config and found.carried == whole.carried
    assert "leaves out" in {item.given: item.why for item in found.left}[dots]
    assert any(line.startswith(f"{dots}: ") for line in found.assumed)


RUN = SWIFT.format("", "")
ADDS = "; what it adds is not known"
GIVEN = {
    "run x --beta 0.5 --seed 3": "",
    'run "$M" --beta 0.5': "",  # one word, whatever it is
    "run x --beta 0.5 $(cat more)": f"$(cat...): known only when the script runs{ADDS}",
    "run x --beta 0.5 $(cat more) --seed 3": f"$(cat...): known only when the script runs{ADDS}",
    "run $(cat more) --beta 0.5": (
        f"${{@:2}}: arguments of the script or of a function, which are not known in full{ADDS}"
    ),
    'A=(--beta 0.5)\n[ -n "$SLURM_JOB_ID" ] && A+=(--seed 3)\nrun x "${A[@]}"': (
        f"${{A}}: $A depends on a condition in line 3, which is not known before the script runs{ADDS}"
    ),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_part_of_the_arguments_of_a_function_is_told_as_what_it_is(given: str) -> None:
    found = convert(f'run() {{ {RUN} "${{@:2}}"; }}\n{given}', name="x.sh", gpus=8)
    assert [line for line in found.assumed if line.endswith(ADDS)] == [GIVEN[given]] * bool(GIVEN[given])
    if "(cat more) --beta" not in given:
        assert found.config.algorithm.kl_beta == 0.5


def test_a_form_that_is_not_followed_is_called_one() -> None:
    for text, why in (("A=(x y)\n", "this form of expansion is not followed"), ("", "not set in the script")):
        found = convert(f'{text}{RUN} "${{A[@]:1:$N}}"', name="x.sh", gpus=8)
        assert f"${{A[@]:1:$N}}: {why}{ADDS}" in found.assumed
    for form in ("${N:-8}", "${N:0:1}", "$N"):
        found = convert(f"N=$(nvidia-smi -L | wc -l)\n{RUN} --save_steps {form}", name="x.sh", gpus=8)
        told = next(line for line in found.assumed if line.startswith("--save_steps "))
        assert "known only when the script runs" in told, form
