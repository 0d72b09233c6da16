"""Settings under the names of other projects: answered with ours (milliseconds)."""

from __future__ import annotations

import re

import pytest

from gspo_hpc.config.loader import ConfigError, from_dict, load
from gspo_hpc.config.reading.peer_names import PEER_NAMES
from gspo_hpc.config.schema import Config, keys


@pytest.mark.parametrize("name", PEER_NAMES)
def test_ours_are_settings_and_theirs_are_not(name: str) -> None:
    """A setting that is renamed here would be recommended under a name that does not exist."""
    ours = re.findall(rf"\b(?:{'|'.join(Config.model_fields)})\.\w+(?:\.\w+)?", PEER_NAMES[name])
    known = {*keys(), "rollout.engine.gpu_memory_utilization"}
    assert ours and {*ours} <= known
    assert name == name.lower() and not any(key.split(".")[1] == name for key in known if key.count(".") == 1)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"algorithm": {"epsilon": 0.2}}, "algorithm.epsilon; here it is algorithm.clip_low and algorithm.clip_high"),
        ({"learning_rate": 1e-6}, "unknown key learning_rate; here it is optimizer.lr"),
        ({"batch": {"ppo_mini_batch_size": 64}}, "here it is batch.global_batch_size, which counts completions"),
        ({"run": {"Num_Train_Epochs": 2}}, "here it is run.max_epochs"),
        ({"rollout": {"n": 8}}, "unknown key rollout.n; here it is batch.num_generations"),
        (
            {"actor_rollout_ref": {"actor": {"clip_ratio_low": 0.1, "x": 1}, "rollout": {"n": 8}}},
            "unknown section 'actor_rollout_ref'; here actor_rollout_ref.actor.clip_ratio_low is algorithm.clip_low, "
            "actor_rollout_ref.rollout.n is batch.num_generations",
        ),
        ({"model": {"attn_impl": "flash_attn"}}, "unknown key model.attn_impl; here it is model.attention_backend"),
        ({"parallel": {"tp": 2}}, "unknown key parallel.tp; here it is parallel.tensor_model_parallel_size"),
        ({"algorithm": {"eps_clip": 0.2}}, "eps_clip; here it is algorithm.clip_low and algorithm.clip_high"),
        ({"algorithm": {"delta": 2}}, "algorithm.delta; here it is algorithm.dual_clip, the bound"),
        ({"algorithm": {"importance_sampling_level": "sequence_token"}}, "gspo_token for sequence_token, and grpo for"),
        ({"optimizer": {"warmup_ratio": 0.1}}, "which counts steps: write the ratio times run.max_steps"),
        ({"trainer": {"total_epochs": 3}}, "unknown section 'trainer'; here trainer.total_epochs is run.max_epochs"),
    ],
)
def test_the_answer_names_the_setting(raw: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        from_dict(raw)


def test_the_algorithms_that_are_named_exist() -> None:
    names = set(re.findall(r"\bg[rs]po\w*", PEER_NAMES["importance_sampling_level"]))
    assert names == {"gspo", "gspo_token", "grpo"}
    for name in names:
        assert from_dict({"algorithm": {"name": name}}).algorithm.name == name


def test_a_name_without_its_section_is_answered_too() -> None:
    with pytest.raises(ConfigError, match=re.escape("'epsilon=0.2' is not a setting; here it is algorithm.clip_low")):
        load(None, ["epsilon=0.2"])
