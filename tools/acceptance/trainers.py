"""A trainer on one rank for the parts: its config, its policy, and the memory that the plan gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer import make_policy, noise

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.data.table import ShardedGroups
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, memory

from .environment import Environment

__all__ = ["completions", "config", "make_policy", "planned"]


def config(env: Environment, model: Path, dtype: str = "", layers: str = "auto", **sections: Any) -> Config:
    """Return a configuration of one rank; `sections` change those of all parts."""
    sizes = env.sizes
    base: dict[str, Any] = {
        "cluster": {"platform": env.platform, "gpus_per_node": 1},
        "model": {"path": str(model), "dtype": dtype or sizes.dtype, "layers": layers},
        "batch": {"global_batch_size": 8 * sizes.groups, "num_generations": 8, "micro_batch_tokens": sizes.micro_batch},
        "rollout": {"max_prompt_length": sizes.prompt, "max_response_length": sizes.length},
        "run": {"max_steps": 10},
    }
    for name, section in (*sizes.extra.items(), *sections.items()):
        base[name] = base.get(name, {}) | section
    return from_dict(base)


def completions(env: Environment, policy: Any, groups: int) -> ShardedGroups:
    """Return groups of eight completions of random tokens, all of the longest lengths, with random advantages."""
    return noise(policy, groups, 8, env.sizes.prompt, env.sizes.length, 0)


def planned(env: Environment, settings: Config) -> dict[str, dict[str, int]]:
    """Return the bytes by phase and part that `gspo-hpc plan` shows for this GPU (on a CPU: for an H100)."""
    import torch

    found = devices.of(torch.cuda.get_device_name()) if env.cuda else None
    arch = architecture.read(str(settings.model.path))
    estimate = memory.estimate(arch, settings, found or devices.DEVICES["H100-80GB"])
    return {phase.name: phase.parts for phase in estimate.phases}
