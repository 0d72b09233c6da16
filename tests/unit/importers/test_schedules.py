"""Steps and rates of verl's schedules, which count rollouts where ours count updates (under a second)."""

from __future__ import annotations

import pytest

from gspo_hpc.config.schema import Optimizer
from gspo_hpc.importers.convert import convert
from gspo_hpc.planning.settings import value_of

RUN = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
    "data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.model.path=Qwen/Qwen3-8B "
    "trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_training_steps=100 "
)
OPTIM = "actor_rollout_ref.actor.optim"


def optimizer(*words: str) -> Optimizer:
    config = convert(f"{RUN}{' '.join(words)}").config
    assert value_of(config, "run.max_steps") == 400  # four updates of a rollout
    return config.optimizer


def test_steps_of_warm_up_are_rollouts() -> None:
    assert optimizer(f"{OPTIM}.lr_warmup_steps=10").lr_warmup_steps == 40
    assert optimizer(f"{OPTIM}.lr_warmup_steps=10", f"{OPTIM}.lr_warmup_steps_ratio=0.5").lr_warmup_steps == 40
    assert optimizer(f"{OPTIM}.lr_warmup_steps=-1", f"{OPTIM}.lr_warmup_steps_ratio=0.05").lr_warmup_steps == 20


@pytest.mark.parametrize(("words", "least"), [("min_lr_ratio=0.1", 2e-7), ("min_lr=1e-8", 1e-8), ("lr=2e-6", 0.0)])
def test_the_least_rate_is_a_share_of_the_rate_or_given(words: str, least: float) -> None:
    found = optimizer(f"{OPTIM}.lr=2e-6", f"{OPTIM}.{words}")
    assert found.min_lr == pytest.approx(least) and found.lr == 2e-6
