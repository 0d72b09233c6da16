"""Hydra's mappings, sizes that deepspeed is given, and runs behind eval."""

from __future__ import annotations

import re

import pytest

from gspo_hpc.importers.convert import convert

VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=256 "
    "actor_rollout_ref.model.path=a/b trainer.n_gpus_per_node=8 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
    "actor_rollout_ref.rollout.n=8 data.max_prompt_length=512 data.max_response_length=512 "
)
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("text", ["{lr: 5e-7, weight_decay: 0.1}", "{lr:5e-7,weight_decay:0.1}"])
def test_a_mapping_is_merged_into_its_group(text: str) -> None:
    found = convert(f"{VERL} {ACTOR}.optim.lr=1e-6 '{ACTOR}.optim={text}'").config.optimizer
    assert (found.lr, found.weight_decay) == (5e-7, 0.1)
    later = convert(f"{VERL} '{ACTOR}.optim={text}' {ACTOR}.optim.lr=1e-6").config.optimizer
    assert (later.lr, later.weight_decay) == (1e-6, 0.1)


def test_a_mapping_may_choose_the_objective() -> None:
    assert convert(f"{VERL} '{ACTOR}.policy_loss={{loss_mode:gspo}}'").config.algorithm.name == "gspo"


def test_a_mapping_with_a_value_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim=\{lr: \$LR\}: .* write actor_rollout_ref.actor.optim.KEY=value"):
        convert(f'{VERL} "{ACTOR}.optim={{lr: $LR}}"')


def test_deepspeed_is_given_its_sizes() -> None:
    arguments = "--model_name_or_path a/b --num_generations 8 --per_device_train_batch_size 2 --output_dir o"
    found = convert(f"deepspeed --num_gpus 8 --num_nodes 2 train_grpo.py {arguments}", "trl")
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (2, 8)
    assert not any("how many processes" in line for line in found.assumed)
    sizes = {item.name: item.keys for item in found.carried if item.name in ("num_gpus", "num_nodes")}
    assert sizes == dict.fromkeys(("num_gpus", "num_nodes"), ("cluster.nodes", "cluster.gpus_per_node"))


@pytest.mark.parametrize(
    "text", ["eval $CMD", 'eval "$CMD"', "eval swift rlhf --rlhf_type grpo --model a/b --num_generations 4"]
)
def test_a_run_behind_eval_is_one_run(text: str) -> None:
    script = f'CMD="swift rlhf --rlhf_type grpo --model a/b --num_generations 4"\n{text}\n'
    assert convert(script).config.model.path == "a/b"


@pytest.mark.parametrize(
    ("include", "nodes", "each"),
    [("localhost:0,1,2,3", 1, 4), ("worker-0:0,1@worker-1:2,3", 2, 2), ("worker-0:0@worker-1:0,1", 1, 1)],
)
def test_gpus_that_deepspeed_is_told_one_by_one_are_counted(include: str, nodes: int, each: int) -> None:
    run = "grpo.py --model_name_or_path q --num_generations 8 --gradient_accumulation_steps 8 --dataset_name d"
    found = convert(f"deepspeed --include {include} {run}\n")
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (nodes, each)
    told = [item.name for item in (found.left if each == 1 else found.carried)]
    assert "include" in told and any("1 GPU is assumed" in line for line in found.assumed) == (each == 1)


@pytest.mark.parametrize(
    ("start", "shape"),
    [
        ("mpirun -np 8", (1, 8)),
        ("mpiexec -n 8 -H a:4,b:4", (2, 4)),
        ("mpirun --host a:8,b:8 -x LR=1", (2, 8)),
        ("srun --ntasks=8", (1, 8)),
        ("srun -n8 -N2", (2, 4)),
        ("srun --nodes 2 --ntasks-per-node=4", (2, 4)),
        ("srun -n 3 -N 2", (1, 3)),
        ("srun -N2 torchrun --nnodes 2 --nproc_per_node 8", (2, 8)),
        ("mpirun -np 2 accelerate launch --num_processes 4", (1, 4)),
        ("srun", None),
        ("mpirun -np $N", None),
        ("deepspeed --hostfile h", None),
    ],
)
def test_processes_that_mpi_or_slurm_starts_are_the_ranks(start: str, shape: tuple[int, int] | None) -> None:
    """It was told that nothing says how many they are."""
    ours = not re.search("torchrun|accelerate|deepspeed", start)
    run = "grpo.py --model_name_or_path q --num_generations 2 --per_device_train_batch_size 6 --dataset_name d"
    found = convert(f"{start} {'python ' * ours}{run}\n")
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (shape or (1, 1))
    program = start.split()[0]
    told = f"{program} starts {{}}, which are" if shape else f"how many processes {program} starts is not known"
    count = f"{shape[0] * shape[1]} processes" if shape else ""
    assert any(line.startswith(told.format(count)) for line in found.assumed) == ours
    assert any("1 GPU is assumed" in line for line in found.assumed) == (shape is None)
