"""The reward function that stands for a model of reward.models.

No process of the pool calls it: once the completions of a rollout are there, an engine of the run scores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from gspo_hpc.rewards.catalogue import reward_function


@reward_function(check_row=lambda fields, **_: None, asks_elsewhere=True)
def reward_model(completion: str, *, prompt: str, fields: Mapping[str, Any], model: str = "") -> NoReturn:
    """Raise RuntimeError: the model that has the name `model` in reward.models scores in engines of a run alone.

    Without a name it is the only model.
    """
    raise RuntimeError("reward models score completions in a run: use gspo-hpc try, eval or train")
