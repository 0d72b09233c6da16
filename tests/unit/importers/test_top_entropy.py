"""The share of tokens with the highest entropy is carried over, but not where it would mean something else.

It would catch a share that is dropped or lost, and one beside a ratio per sequence, which TRL takes and nobody means.
Takes a second.
"""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert

TRL = "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 9 --use_vllm true"
SWIFT = "megatron rlhf --rlhf_type grpo --global_batch_size 32 --num_generations 4 --train_iters 10 --beta 0"


@pytest.mark.parametrize("text", [TRL, f"{SWIFT} --importance_sampling_level sequence_token"])
def test_it_is_carried_over_with_what_differs(text: str) -> None:
    found = convert(f"{text} --top_entropy_quantile 0.2", gpus=1)
    assert found.config.algorithm.top_entropy_quantile == 0.2
    assert any("top_entropy_quantile" in line and "threshold" in line for line in found.assumed)
    assert convert(text, gpus=1).config.algorithm.top_entropy_quantile == 1


@pytest.mark.parametrize("text", [TRL, SWIFT])
def test_beside_a_ratio_per_sequence_it_is_left_with_the_reason(text: str) -> None:
    found = convert(f"{text} --top_entropy_quantile 0.2 --importance_sampling_level sequence", gpus=1)
    assert found.config.algorithm.top_entropy_quantile == 1
    (left,) = [item for item in found.left if item.name.strip("-") == "top_entropy_quantile"]
    assert "gspo_token" in left.why
