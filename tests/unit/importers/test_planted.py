"""Numbers and comparisons of the converters that a planted mistake changed without a test that saw it (seconds)."""

from __future__ import annotations

import pytest

from gspo_hpc.config.schema import Optimizer
from gspo_hpc.importers.convert import convert

TRL = "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 100"


def trl_optimizer(words: str) -> Optimizer:
    return convert(f"{TRL} {words}", gpus=1).config.optimizer


@pytest.mark.parametrize(("given", "steps"), [("1", 1), ("10.7", 10), ("0.125", 13), ("0", 0)])
def test_warm_up_of_trl_is_steps_from_1_and_a_share_below(given: str, steps: int) -> None:
    """Steps are rounded down, and a share up, as transformers does."""
    assert trl_optimizer(f"--warmup_steps {given}").lr_warmup_steps == steps


@pytest.mark.parametrize(("given", "interval"), [("1", 1), ("2", 2), ("0.5", 50)])
def test_checkpoints_of_trl_after_each_step(given: str, interval: int) -> None:
    """A share of the run, below 1, is not carried over: the interval is ours."""
    assert convert(f"{TRL} --save_steps {given}", gpus=1).config.checkpoint.interval == interval


@pytest.mark.parametrize(("bound", "kind"), [("1", "truncated"), ("1.5", "truncated"), ("0.9", "none")])
def test_weights_of_at_most_1_are_a_correction(bound: str, kind: str) -> None:
    mode = "--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_max"
    algorithm = convert(f"{TRL} {mode} {bound}", gpus=1).config.algorithm
    assert algorithm.correction == kind and (kind == "none" or algorithm.correction_high == float(bound))


@pytest.mark.parametrize(("cycles", "carried"), [("0.5", True), ("1", False), ("1.5", False)])
def test_half_a_wave_is_the_cosine_that_is_here(cycles: str, carried: bool) -> None:
    words = f"--lr_scheduler_type cosine --lr_scheduler_kwargs '{{\"num_cycles\": {cycles}}}'"
    found = convert(f"{TRL} {words}", gpus=1)
    assert ("lr_scheduler_kwargs" in {item.name for item in found.carried}) is carried
    assert (
        any("num_cycles of lr_scheduler_type cosine: no counterpart" in item.why for item in found.left) is not carried
    )


@pytest.mark.parametrize(
    ("model", "told"),
    [("ZhipuAI/GLM-4.5-Air", True), ("GLM-4.7", True), ("GLM-4-9B", False), ("GLM-4.1V", False), ("Qwen3-8B", True),
     ("deepseek-ai/DeepSeek-V3.1", True), ("Qwen2.5-7B", False)],
)  # fmt: skip
def test_models_that_ms_swift_does_not_let_think(model: str, told: bool) -> None:
    found = convert(f"swift rlhf --rlhf_type grpo --num_generations 4 --beta 0 --model {model}", gpus=4)
    assert any("does not let" in line for line in found.assumed) is told


def test_what_decides_the_dispatcher_of_tokens_is_carried_over() -> None:
    run = "megatron rlhf --rlhf_type grpo --num_generations 4 --train_iters 5 --moe_enable_deepep true"
    found = convert(run, gpus=4)
    assert found.config.moe.token_dispatcher == "flex"
    assert {item.name: item.keys for item in found.carried}["moe_enable_deepep"] == ("moe.token_dispatcher",)


@pytest.mark.parametrize(("given", "norm"), [("null", 0.0), ("0.0", 0.0), ("0.3", 0.3)])
def test_no_gradient_norm_is_no_clipping(given: str, norm: float) -> None:
    text = f"# GRPO trainer config\nnum_generations: 8\nmax_steps: 10\nmax_grad_norm: {given}\n"
    assert convert(text, gpus=1).config.optimizer.clip_grad == norm
