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
