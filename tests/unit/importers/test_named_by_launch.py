"""Refusals say what is there: a project by what is launched, a YAML by its keys; options are known by their beginning.

Takes four seconds. It would catch a run that is called another project's for a word in it, a YAML of somebody's own
that is called ms-swift's, an option that argparse takes and convert refuses, and what srun starts and is not followed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert

NONE = r"^no run of ms-swift, verl or TRL is recognised"
SWIFT = "swift rlhf --rlhf_type grpo --model m --dataset d.jsonl --num_generations 8 --per_device_train_batch_size 4"


@pytest.mark.parametrize(
    "text",
    [
        "ROLL=$1\npython -m mine.train --out $ROLL\n",
        "echo 'rollout: roll 8 times'\npython own.py --roll 3\n",
        "F=--monitor_backend_type=tinker\npython own.py $F\n",
        "python own.py --monitor_backend_type=tinker --engine ROLL\n",
        "cd slime\npython own.py --dir areal\n",
        "ssh host 'cd verifiers; ls'\n",
    ],
)
def test_a_word_names_no_project(text: str) -> None:
    with pytest.raises(ValueError, match=NONE):
        convert(text, name="run.sh")


@pytest.mark.parametrize(
    ("text", "project"),
    [
        ("docker run image sh -c 'nohup python -m roll.pipeline.start &'\n", "ROLL"),
        ("cat <<END | docker exec -i box python\nfrom tinker_cookbook import train\nEND\n", "Tinker"),
        ("if false; then\n  echo\nfi\nbox exec 'python examples/run_grpo.py a=1 &'\n", "NeMo-RL"),
        ("own --engine OpenRLHF\n", "OpenRLHF"),
        ("box exec 'cd slime && bash run.sh'\n", "slime"),
        ("python -m examples.countdown.train rllm/backend=fireworks training.learning_rate=1e-5\n", "rLLM"),
    ],
)
def test_what_is_imported_or_started_somewhere_names_it(text: str, project: str) -> None:
    with pytest.raises(ValueError, match=rf"^this is a run of {project}, "):
        convert(text, name="run.sh")


CHECK = 'if [ "$#" -lt 2 ]; then\n  echo usage\n  exit 1\nfi\nN=$1\nshift 1\n'


@pytest.mark.parametrize("check", ["", CHECK])
def test_the_supervised_trainer_of_verl_is_named_also_behind_a_check(check: str) -> None:
    text = f"{check}torchrun --nnodes=1 -m verl.trainer.fsdp_sft_trainer data.train_files=x.parquet optim.lr=1e-4\n"
    with pytest.raises(ValueError, match=r"^verl\.trainer\.fsdp_sft_trainer does no reinforcement learning$"):
        convert(text, name="run.sh")


OF_ITS_OWN = (
    "model_name_or_path: m\nseed: 1\nbf16: true\noutput_dir: o\ndataset: {name: d}\nmodel: {torch_dtype: bfloat16}\n"
)
ACTOR = "_target_: verl.workers.config.ActorConfig\nstrategy: fsdp\noptim: {lr: 1.0e-6}\nloss_agg_mode: token-mean\n"
REWARD = (
    "reward_model: {_target_: verl.workers.config.RewardModelConfig, model: m}\nnum_workers: 8\ndataset: d\nmodel: m\n"
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            f"{OF_ITS_OWN}training: {{num_generations: 4, loss_type: dr_grpo}}\n",
            "training.num_generations: arguments of",
        ),
        (
            f"{OF_ITS_OWN}grpo: {{lr: 1.0e-6, scale_rewards: false}}\n",
            "grpo.scale_rewards: arguments of TRL or ms-swift",
        ),
        (f"{OF_ITS_OWN}training: {{max_steps: 4}}\n", "no argument shows that this is a GRPO run of TRL"),
        (ACTOR, "this is a part of verl's own config (verl.workers.config.ActorConfig), without actor_rollout_ref: "),
        (REWARD, "this is a part of verl's own config (verl.workers.config.RewardModelConfig), without actor_rollout"),
    ],
)
def test_a_yaml_is_called_ms_swifts_only_by_its_arguments(text: str, why: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(text, name="run.yaml")
    assert str(refused.value).startswith(why)


def test_arguments_of_ms_swift_are_still_known() -> None:
    with pytest.raises(ValueError, match=r"^these are arguments of ms-swift without rlhf_type"):
        convert("model: m\ndataset: d\nlearning_rate: 1.0e-6\ntemplate: qwen\nmax_length: 5\n", name="run.yaml")


MINE = """from dataclasses import dataclass
from trl import GRPOConfig, GRPOTrainer, TrlParser
@dataclass
class Mine:
    max_completion_len: int = 3
p = TrlParser((Mine, GRPOConfig))
mine, c = p.parse_args_and_config()
GRPOTrainer(model='m/m', args=c).train()
"""


def length(found: Converted) -> int | None:
    return found.config.rollout.max_response_length


@pytest.mark.parametrize(
    ("command", "given", "taken"),
    [
        (SWIFT, "--max_completion 77", True),
        (f"{SWIFT} --max_completion_length 5", "--max_completion 77", True),  # the later of the two counts
        (SWIFT, "--max_completion 77 --max_completion_length 5", False),
        (SWIFT, "--max 77", False),  # several begin so
        ("trl grpo --learning_rate 1e-6 --beta 0.1", "--max_completion_lengt 77", True),
        ("python -m trl.scripts.grpo --learning_rate 1e-6", "--max_completion_lengt 77", True),
        ("python mine.py --learning_rate 1e-6", "--max_completion_lengt 77", True),
        ("python mine.py --learning_rate 1e-6", "--max_completion_len 77", False),  # its own
        ("python grpo.py --learning_rate 1e-6 --beta 0 --num_generations 4", "--max_completion_lengths 77", None),
    ],
)
def test_the_beginning_of_one_option_is_taken_for_it(
    tmp_path: Path, command: str, given: str, taken: bool | None
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    if taken is None:  # a parser that is not at hand, and a typo
        with pytest.raises(ValueError, match="nearest: max_completion_length"):
            convert(f"{command} {given}\n", folder=tmp_path, name="run.sh", gpus=1)
        return
    found = convert(f"{command} {given}\n", folder=tmp_path, name="run.sh", gpus=1)
    assert (length(found) == 77) is taken
    note = f"{given.split()[0]}: taken for --max_completion_length, which alone begins so"
    assert (note in found.assumed) is (taken or given.endswith(" 5"))


def test_a_beginning_without_the_sign_between_words_is_that_of_two_options() -> None:
    """HfArgumentParser has --importance_sampling_level and --importance-sampling-level, which both begin so."""
    found = convert(f"{SWIFT} --loss_ dapo --epsilon_hi 0.28\n", name="run.sh", gpus=1)
    assert found.config.algorithm.clip_high == 0.28
    other = convert(f"{SWIFT} --importance sequence\n", name="run.sh", gpus=1)
    assert [item.given for item in other.strange] == ["--importance sequence"]


STEP = "#SBATCH --nodes=2\nA=$(scontrol show hostnames | head -n 1)\n"


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        (f'{STEP}srun bash -c "NNODES=\\$SLURM_NNODES NPROC_PER_NODE=4 MASTER_ADDR=$A {SWIFT}"\n', 2),
        (f'{STEP}srun bash -c "NNODES=\\$SLURM_NNODES NPROC_PER_NODE=4 {SWIFT}"\n', 2),
        (f'{STEP}srun -N 1 bash -c "NNODES=\\$SLURM_NNODES NPROC_PER_NODE=4 MASTER_ADDR=$A {SWIFT}"\n', 1),
        (f"{STEP}srun --nodes=1 bash -c 'NNODES=$SLURM_NNODES NPROC_PER_NODE=4 {SWIFT}'\n", 1),
        (f"{STEP}srun --nodes=1 bash -c 'NNODES=$SLURM_JOB_NUM_NODES NPROC_PER_NODE=4 {SWIFT}'\n", 2),
    ],
)
def test_nodes_of_a_job_are_known_in_what_srun_starts(text: str, nodes: int) -> None:
    found = convert(text, name="run.sh")
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (nodes, 4) and not found.open


def test_what_a_variable_of_the_job_is_changed_to_is_not_known_there() -> None:
    text = f'{STEP}export SLURM_NNODES=7\nbash -c "NNODES=\\$SLURM_NNODES NPROC_PER_NODE=4 MASTER_ADDR=$A {SWIFT}"\n'
    assert convert(text, name="run.sh").open == ("NNODES=$SLURM_NNODES",)


@pytest.mark.parametrize("sum_", ["$(($WORLD - 1))", "$((WORLD - 1))", "$(( ${WORLD} / 2 ))", "$WORLD"])
def test_a_sum_of_an_unknown_sum_can_be_read_again(sum_: str) -> None:
    begin = f"N=$SLURM_NNODES\nWORLD=$(($N * $(nvidia-smi -L | wc -l)))\nTRAIN={sum_}\n"
    found = convert(f'{begin}srun bash -c "NPROC_PER_NODE=$TRAIN {SWIFT}"\n', name="run.sh")
    assert len(found.open) == 1 and found.open[0].startswith("NPROC_PER_NODE=$((")
    assert found.config.batch.num_generations == 8
