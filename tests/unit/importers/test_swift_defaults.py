"""Defaults of Megatron-SWIFT, and its YAML for Ray on several nodes (under a second).

What a script leaves out decides as much as what it says: a default that is read wrongly is a wrong config, in silence.
"""

from __future__ import annotations

import pytest

from gspo_hpc.config.schema import Config
from gspo_hpc.importers.convert import convert

RUN = "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --dataset d.jsonl --micro_batch_size 1 "
RAY = """use_ray: true
rlhf_type: grpo
model: Qwen/Qwen3-8B
dataset: d.jsonl
nnodes: 2
global_batch_size: 32
micro_batch_size: 1
train:
  gpus: 8
  tensor_model_parallel_size: 2
rollout:
  gpus: 8
  vllm_tensor_parallel_size: 2
"""


def converted(words: str, rows: int | None = None) -> Config:
    return convert(RUN + words, rows=rows).config


def test_what_a_script_leaves_out() -> None:
    config = converted("--train_iters 10")
    assert (config.batch.global_batch_size, config.batch.num_generations) == (16, 8)
    assert config.memory.recompute_granularity == "selective"
    assert converted("--train_iters 10 --recompute_granularity none").memory.recompute_granularity is None


@pytest.mark.parametrize(("words", "rate"), [("", 1e-5), ("--tuner_type full", 1e-5), ("--tuner_type lora", 1e-4)])
def test_the_rate_is_that_of_the_weights_that_are_trained(words: str, rate: float) -> None:
    assert converted(f"--train_iters 10 {words}").optimizer.lr == rate
    assert converted(f"--train_iters 10 {words} --lr 3e-6").optimizer.lr == 3e-6


def test_prompts_that_fill_no_micro_batch_of_all_ranks_are_left_out_of_an_epoch() -> None:
    """1,003 prompts on 8 ranks: 1,000 of them, 8 completions each, twice, in updates of 32."""
    assert converted("--num_train_epochs 2 --global_batch_size 32", rows=1003).run.max_steps == 500


def test_gpus_of_a_yaml_for_ray_are_those_of_all_nodes() -> None:
    """Eight that train and eight that generate, on two nodes: four of each on one, in engines of two."""
    config = convert(RAY).config
    assert (config.cluster.nodes, config.cluster.gpus_per_node) == (2, 8)
    assert (config.rollout.mode, config.rollout.engines_per_node) == ("server", 2)
    assert config.world_size == 8
    together = convert(f"{RAY}colocate_groups: [[train, rollout]]\n").config
    assert (together.rollout.mode, together.cluster.gpus_per_node, together.world_size) == ("colocate", 4, 8)
