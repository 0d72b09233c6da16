"""Settings under the names of other projects: answered with ours (milliseconds)."""

from __future__ import annotations

import re

import pytest

from gspo_hpc.config.loader import ConfigError, from_dict
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
    ],
)
def test_the_answer_names_the_setting(raw: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        from_dict(raw)
