"""Settings that a run of TRL or verl leaves out, where its default is not ours (under a second)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert

TRL = "trl grpo --model_name_or_path Qwen/Qwen3-1.7B --dataset_name d --num_generations 8 --max_steps 10 "
VERL = (
    "python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo "
    "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
    "trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_training_steps=10 "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
)


@pytest.mark.parametrize(("words", "interval"), [("", 500), ("--save_steps 20", 20)])
def test_checkpoints_of_trl_are_500_steps_apart(words: str, interval: int) -> None:
    assert convert(TRL + words, gpus=8).config.checkpoint.interval == interval


@pytest.mark.parametrize("size", ["expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"])
def test_a_reference_with_a_size_that_the_actor_leaves_open_has_another_layout(size: str) -> None:
    """Open is not 1: experts are then cut as the rest is, by 4."""
    found = convert(f"{VERL} actor_rollout_ref.ref.megatron.{size}=1")
    assert any(f"ref.megatron.{size}=1: the actor has None" in line for line in found.differs), found.differs
    alike = convert(f"{VERL} actor_rollout_ref.ref.megatron.{size}=2 actor_rollout_ref.actor.megatron.{size}=2")
    assert not any(f"ref.megatron.{size}" in line for line in alike.differs)


@pytest.mark.parametrize(
    ("mode", "ours"), [("R2", "old_logprobs"), ("R3", "rollout"), ("disabled", "off"), (None, "off")]
)
def test_what_routing_verl_replays(mode: str | None, ours: str) -> None:
    """R2 is that of the pass for old log-probs, R3 that of the rollout."""
    words = "" if mode is None else f" actor_rollout_ref.actor.router_replay.mode={mode}"
    assert convert(VERL + words).config.moe.router_replay == ours
    engine = "" if mode is None else f" model_engine=veomni actor_rollout_ref.actor.veomni.router_replay.mode={mode}"
    assert convert(VERL.replace("model_engine=megatron", "") + engine).config.moe.router_replay == ours
