"""YAML's and OmegaConf's less usual forms have the right value, or one clear line."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert

VERL = """
size: 256
data: {train_batch_size: "${size}", max_response_length: 1024, max_prompt_length: "${.max_response_length}"}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: /m}
  actor: &actor
    optim: {lr: 2e-6, weight_decay: "${..clip}"}
    clip: 0.1
    ppo_mini_batch_size: "${data.train_batch_size}"
    ppo_micro_batch_size_per_gpu: 4
    strategy: megatron
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: "${.tensor_model_parallel_size}"}
  ref: {%s}
  rollout: {n: 8, response_length: "${oc.decode:4}"}
trainer: {n_gpus_per_node: 8, nnodes: 1, total_epochs: 1}
"""


def _of(ref: str) -> Converted:
    return convert(VERL % ref)


def test_a_key_may_be_named_from_the_top_or_from_where_it_is_used() -> None:
    found = _of("")
    config = found.config
    assert config.batch.global_batch_size == 256 * 8 and config.rollout.max_prompt_length == 1024
    assert config.optimizer.weight_decay == 0.1
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)


def test_a_group_may_be_named() -> None:
    for text in ("${actor_rollout_ref.actor.megatron}", "${..actor.megatron}"):
        found = _of(f'megatron: "{text}"')
        every = {item.name: item.given for item in (*found.carried, *found.left, *found.strange)}
        name = "actor_rollout_ref.ref.megatron.tensor_model_parallel_size"
        assert every[name] == f"{name}=2" and every[name.replace("tensor", "pipeline")].endswith("=2")
        assert "actor_rollout_ref.ref.megatron" not in every


@pytest.mark.parametrize("text", ["${nothing.there}", "${.nothing}", "${oc.decode:${oc.env:TP,2}}"])
def test_what_cannot_be_resolved_is_open(text: str) -> None:
    found = convert((VERL % "").replace("response_length: 1024", f'response_length: "{text}"'))
    assert "data.max_response_length" in {item.name for item in found.left}
    assert any(given.startswith("data.max_response_length=") for given in found.open)


TRL = "num_generations: 8\nper_device_train_batch_size: 8\nmax_completion_length: 64\n"


def test_tags_and_keys_that_stand_twice_are_as_in_the_original() -> None:
    found = convert(f"{TRL}learning_rate: 1e-6\nlearning_rate: !!float 5e-6\nbeta: !!str 0.1\n", gpus=1)
    assert found.config.optimizer.lr == 5e-6 and found.config.algorithm.kl_beta == 0.1
    with pytest.raises(ValueError, match="line 4: .*tag '!mine'"):
        convert(f"{TRL}learning_rate: !mine 1e-6\n")


def test_several_documents_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{TRL}---\n{TRL}")
    assert str(refused.value) == "line 4: it holds several YAML documents: leave one"
