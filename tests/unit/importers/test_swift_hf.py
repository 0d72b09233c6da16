"""Runs of ms-swift on Hugging Face's trainer, and its YAML for Ray, as sizes and settings of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.importers.convert import convert
from gspo_hpc.planning.plan import make_plan

GSPO = """
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
NPROC_PER_NODE=8 \\
swift rlhf \\
    --rlhf_type grpo --tuner_type full --model /models/Qwen2.5-7B-Instruct --dataset math#10000 \\
    --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --beta 0 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --steps_per_generation 32 --num_generations 16 \\
    --max_completion_length 8192 --vllm_mode colocate --use_vllm true --vllm_max_model_len 16384 \\
    --learning_rate 1e-6 --warmup_ratio 0.05 --deepspeed zero3 --num_train_epochs 1 --save_steps 1000
"""


def test_its_batch_sizes_are_those_of_one_process_and_its_steps_micro_batches() -> None:
    found = convert(GSPO, rows=10000)
    config = found.config
    assert found.project == "ms-swift" and config.cluster.gpus_per_node == 8
    assert config.batch.global_batch_size == 2 * 8 * 8 and config.batch.steps_per_generation == 4  # 32 / 8
    assert (config.algorithm.name, config.algorithm.clip_low, config.algorithm.clip_high) == ("gspo", 3e-4, 4e-4)
    assert config.optimizer.lr == 1e-6 and config.optimizer.lr_decay_style == "cosine"
    assert (config.optimizer.weight_decay, config.optimizer.adam_beta2) == (0.1, 0.95)
    assert config.rollout.temperature == 0.9 and config.rollout.max_prompt_length == 8192
    assert config.run.max_steps == 10000 * 16 // 512 * 4 and config.optimizer.distributed is True  # 312 whole rollouts
    assert any("steps_per_generation counts micro-batches in ms-swift" in line for line in found.differs)
    assert not any("chosen for adapters" in line for line in found.assumed)


@given(
    size=st.integers(1, 8),
    accumulated=st.integers(1, 8),
    processes=st.sampled_from([1, 2, 4, 8, 16]),
    updates=st.integers(1, 4),
    by_size=st.booleans(),
    sequence=st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_sizes(size: int, accumulated: int, processes: int, updates: int, by_size: bool, sequence: int) -> None:
    update = size * accumulated * processes
    rollout = (
        f"--generation_batch_size {update * updates}" if by_size else f"--steps_per_generation {accumulated * updates}"
    )
    text = (
        f"NPROC_PER_NODE={processes} swift rlhf --rlhf_type grpo --per_device_train_batch_size {size} "
        f"--num_generations 2 --gradient_accumulation_steps {accumulated} {rollout} --sequence_parallel_size {sequence}"
    )
    quantities = make_plan(convert(text).config).quantities
    assert quantities["global_batch_size"] == update and quantities["generation_batch_size"] == update * updates


def test_accumulation_that_is_not_given_is_chosen_as_it_chooses_it() -> None:
    """Since 3.7 there is none for GRPO (`_set_default` of rlhf_args.py); before, updates had 16 completions or more."""
    run = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --per_device_train_batch_size 1 --num_generations 4"
    found = convert(run)
    assert found.config.batch.global_batch_size == 4 and found.config.batch.steps_per_generation == 1
    assert any("gradient_accumulation_steps is not given: 1; ms-swift up to 3.6" in line for line in found.assumed)
    found = convert(f"{run} --num_infer_workers 1")
    assert found.config.batch.global_batch_size == 16 and found.config.batch.steps_per_generation == 1
    assert any("gradient_accumulation_steps is not given: 4" in line for line in found.assumed)
    assert not any("gradient_accumulation" in line for line in convert(f"{run} --tuner_type full").assumed)  # 4


@pytest.mark.parametrize(
    ("more", "warned"),
    [("--tuner_type adalora", True), ("--tuner_type adalora --learning_rate 1e-6", False), ("", False),
     ("--tuner_type adalora --learning_rate 5e-6", False), ("--tuner_type adalora --learning_rate 6e-6", True),
     ("--tuner_type adalora --learning_rate 2e-5", True), ("--tuner_type full", False), ("--tuner_type lora", False)],
)  # fmt: skip
def test_a_rate_is_warned_of_only_where_it_is_one_for_adapters(more: str, warned: bool) -> None:
    found = convert(f"NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --num_generations 8 --max_steps 5 {more}")
    assert any("was chosen for adapters" in line for line in found.assumed) == warned


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--chord_sft_dataset x", "--chord_sft_dataset x: the loss follows more than rewards then"),
        ("--advantage_estimator rloo --scale_rewards batch", "--advantage_estimator rloo with scale_rewards batch"),
        ("--loss_type real", "loss_type real is another objective"),
        ("--steps_per_generation 3 --gradient_accumulation_steps 2", "3 micro-batches are no whole updates"),
    ],
)
def test_what_it_does_besides_is_refused(more: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --num_generations 8 --max_steps 5 {more}")
    assert expected in str(refused.value)


RAY = """
rlhf_type: grpo
model: /models/Qwen2.5-7B
micro_batch_size: 2
global_batch_size: 32
num_generations: 8
steps_per_generation: 4
train_iters: 100
lr: 1e-6
{groups}train:
  gpus: 4
  tuner_type: full
  tensor_model_parallel_size: 2
rollout:
  gpus: 4
  vllm_tensor_parallel_size: 2
  vllm_gpu_memory_utilization: 0.8
"""


def test_groups_of_workers_on_the_same_gpus() -> None:
    found = convert(RAY.format(groups="colocate_groups: [[train, rollout]]\n"))
    config = found.config
    assert found.project == "Megatron-SWIFT" and found.strange == ()
    assert (config.cluster.gpus_per_node, config.rollout.mode, config.rollout.tensor_parallel_size) == (
        4,
        "colocate",
        2,
    )
    assert config.parallel.tensor_model_parallel_size == 2 and config.batch.steps_per_generation == 4
    assert config.rollout.engine["gpu_memory_utilization"] == 0.8


def test_groups_of_workers_on_gpus_of_their_own() -> None:
    found = convert(RAY.format(groups="nnodes: 1\n"))
    config = found.config
    assert (config.cluster.gpus_per_node, config.rollout.mode, config.rollout.engines_per_node) == (8, "server", 2)
    assert any("the group rollout runs beside the trainer" in line for line in found.differs)
    with pytest.raises(ValueError, match="settings of a teacher are not carried over"):
        convert(RAY.format(groups="teacher: {gpus: 2, teacher_model: m}\n"))


def _ray(groups: str, train: int, rollout: int) -> str:
    text = RAY.format(groups=groups)
    return text.replace("train:\n  gpus: 4", f"train:\n  gpus: {train}").replace(
        "rollout:\n  gpus: 4", f"rollout:\n  gpus: {rollout}"
    )


def test_groups_of_workers_on_more_gpus_than_a_node_has() -> None:
    found = convert(_ray("colocate_groups: [[train, rollout]]\n", 16, 16))
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (2, 8)
    assert "--train.gpus 16: taken for 2 nodes of 8" in found.assumed
    found = convert(_ray("", 16, 8))
    config = found.config
    assert (config.cluster.nodes, config.cluster.gpus_per_node, config.rollout.engines_per_node) == (2, 12, 2)
    found = convert(_ray("", 32, 4))  # 2 engines on 4 nodes
    assert found.config.cluster.nodes == 4 and any(
        "each of 2 GPUs: 2 in the original, and 4 here" in line for line in found.differs
    )
    with pytest.raises(ValueError, match="train.gpus 12: must be divisible by the number of nodes"):
        convert(_ray("nnodes: 8\n", 12, 12))
    with pytest.raises(ValueError, match="rollout.gpus 3: must be divisible by vllm_tensor_parallel_size"):
        convert(_ray("", 8, 3))


def test_the_script_that_starts_ray_names_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "ray.yaml").write_text(RAY.format(groups="colocate_groups: [[train, rollout]]\n"))
    script = (
        'SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n'
        'megatron rlhf --use_ray true --config "$SCRIPT_DIR/ray.yaml" --lr 2e-6\n'
    )
    found = convert(script, folder=tmp_path, name="run.sh")
    assert found.config.batch.global_batch_size == 32 and found.config.optimizer.lr == 2e-6
