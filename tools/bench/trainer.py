"""A trainer without an engine, for benchmarks of what it does: one rank, a model folder, completions of random tokens.

What is imported here imports torch; set OMP_NUM_THREADS before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.table import ShardedGroups
from gspo_hpc.models import architecture
from gspo_hpc.policy import weight_stream
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def make_policy(model: Path, config: Config, place: Mapping[str, str] = ALONE) -> Policy:
    """The model with its weights and an optimizer, as the only rank or that of this place."""
    os.environ.update(place)
    policy = Policy(architecture.read(str(model)), config, start(config))
    weight_stream.load(policy.chunks, policy.arch, str(model))
    policy.make_optimizer()
    return policy


def noise(policy: Policy, groups: int, completions: int, prompt_length: int, length: int, seed: int) -> ShardedGroups:
    """Groups of random tokens with random advantages; all prompts have one length, and so have all completions.

    Each data-parallel rank makes so many.
    """
    first = policy.ranks.dp_rank * groups
    rng = np.random.default_rng(seed + policy.ranks.dp_rank)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, policy.arch.vocab_size, count).astype(np.int32)

    def completion(index: int) -> Completion:
        values = np.full(length, -5.0, np.float32)
        return Completion(tokens(length), values, "", "length", index, advantage=float(rng.standard_normal()))

    def group(slot: int) -> Group:
        prompt = Prompt(slot, tokens(prompt_length), "", {})
        return Group(slot, prompt, tuple(completion(i) for i in range(completions)))

    return policy.ranks.exchange.gather_table(group(slot) for slot in range(first, first + groups))
