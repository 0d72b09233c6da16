"""Random configs that the plan accepts, for runs on cards that count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.plan import make_plan


def _settings(chance: random.Random) -> dict[str, dict[str, Any]]:
    """Return the sections of a config in which engines share the GPUs of the trainer."""
    name, card = chance.choice(
        [
            ("Qwen2.5-7B", "H100-80GB"),
            ("Qwen2.5-7B", "A100-40GB"),
            ("Qwen3-8B", "H20-96GB"),
            ("Qwen2.5-32B", "H200-141GB"),
            ("Qwen3-30B-A3B", "H100-80GB"),
            ("Qwen3-30B-A3B", "B200-180GB"),
        ]
    )
    gpus = chance.choice([4, 4, 8])
    tp = chance.choice([1, 2, 4])
    return {
        "run": {"max_steps": 5},
        "eval": {"interval": 3, "before": True},
        "checkpoint": {"interval": 3, "async_save": chance.choice([True, False])},
        "algorithm": {"kl_beta": chance.choice([0.0, 0.0, 0.01])},
        "faults": {"max_engine_restarts": 99},
        "cluster": {"nodes": chance.choice([1, 2, 4]), "gpus_per_node": gpus, "gpu": card},
        "model": {"path": f"models/{name}"},
        "adapter": {"type": "lora", "rank": 32} if (gpus, tp) in ((4, 2), (8, 1)) else {},
        "parallel": {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": chance.choice([1, 2, 4]),
            "expert_model_parallel_size": chance.choice([1, 4, 8]) if "A3B" in name else 1,
            "expert_tensor_parallel_size": 1,
            "context_parallel_size": chance.choice([1, 1, 2]),
            "sequence_parallel": tp > 1,
        },
        "batch": {
            "num_generations": 4,
            "global_batch_size": 4 * 32,
            "steps_per_generation": chance.choice([1, 2]),
            "micro_batch_tokens": 4096,
        },
        "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "reward": {"functions": [{"function": "number_match"}]},
        "memory": {
            "recompute_granularity": chance.choice([None, "full"]),
            "offload_optimizer": chance.choice([False, False, True]),
            "offload_trainer": chance.choice([None, None, None, False]),
            "offload_parts": chance.choice(
                [
                    ["weights", "gradients", "optimizer"],
                    ["weights", "gradients", "optimizer"],
                    ["gradients", "optimizer"],
                    ["optimizer"],
                    ["weights"],
                ]
            ),
        },
        "optimizer": {
            "distributed": chance.choice([True, True, False]),
            "grad_reduce_in_fp32": chance.choice([True, False]),
        },
        "rollout": {
            "tensor_parallel_size": chance.choice([1, 2, 4]),
            "sleep_level": chance.choice([1, 2]),
            "max_prompt_length": 1024,
            "max_response_length": 2048,
            "engine": {"gpu_memory_utilization": chance.choice([0.6, 0.7, 0.8, 0.85])},
        },
    }


def _repeating(given: dict[str, dict[str, Any]], chance: random.Random) -> dict[str, dict[str, Any]]:
    """Return the same, where there are experts, with choices of experts that updates repeat, or none."""
    replay = chance.choice(["off", "rollout", "old_logprobs"])
    return given | {"moe": {"router_replay": replay}} if "A3B" in given["model"]["path"] else given


def _apart(given: dict[str, dict[str, Any]], chance: random.Random) -> dict[str, dict[str, Any]]:
    """Return the same with engines on GPUs of each node, or on a node, of their own."""
    cluster, rollout = given["cluster"], given["rollout"]
    rollout |= {"mode": "server", "max_staleness": chance.choice([0, 1, 2])}
    if chance.random() < 0.3:  # so many ranks train as before, on as many nodes
        return given | {"cluster": cluster | {"nodes": cluster["nodes"] + 1, "generation_nodes": 1}}
    rollout["engines_per_node"] = chance.choice([1, 2, 3])
    set_apart = rollout["engines_per_node"] * rollout["tensor_parallel_size"]
    return given | {"cluster": cluster | {"gpus_per_node": cluster["gpus_per_node"] + set_apart}}


def random_configs(count: int, apart: bool = False) -> Iterator[Config]:
    """Give `count` configs: of server mode if `apart`, otherwise of engines that share the GPUs of the trainer."""
    chance, of_choices = random.Random(20261126 if apart else 20261123), random.Random(20261127)
    while count:
        given = _repeating(_settings(chance), of_choices)
        config = loader.from_dict(_apart(given, chance) if apart else given)
        plan = make_plan(config)
        if plan.valid and plan.memory is not None:
            count -= 1
            yield config
