"""Arguments of vLLM in `rollout.engine`: those that other settings decide, and the defaults of those that count."""

from __future__ import annotations

from typing import Any

from gspo_hpc.config.schema import Config

# Arguments that are not the user's to give, and the settings that they follow from.
OWN_ENGINE_ARGUMENTS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "rollout.max_prompt_length and rollout.max_response_length",
    "seed": "run.seed",
    "logprobs_mode": "the log-probs that training needs",
    "weight_transfer_config": "the way weights are sent",
}

# Settings of rollout.engine that the estimates know, each a number above 0, with vLLM's own default.
ENGINE_DEFAULTS = {
    "gpu_memory_utilization": 0.92,  # of the card, at most 1
    "max_num_batched_tokens": 8192,  # of one step
    "max_num_seqs": 1024,  # sequences at once
}


def engine_setting(config: Config, name: str) -> float:
    """Return a number of rollout.engine: what is given, or vLLM's default if that is absent, null or impossible."""
    given = config.rollout.engine.get(name)
    return ENGINE_DEFAULTS[name] if given is None or not _possible(name, given) else float(given)


def _possible(name: str, given: Any) -> bool:
    """Return True for a value that an estimate can count with; the plan refuses the others."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    return 0 < given <= 1 if name == "gpu_memory_utilization" else 1 <= given < 1e9 and given == int(given)
