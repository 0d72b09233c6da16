"""The difference between two configs, and the keys that a run may change between two attempts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_hpc.config.schema import Config, RewardModel, Rows, as_dict

# What may differ between two attempts of one run: how long it goes, where it runs, how work is cut into pieces (which
# is the same update, summed in another order) and what is recorded. Anything else would make it another experiment.
MAY_CHANGE: frozenset[str] = frozenset(
    {
        "run.max_steps",  # see refused_changes: only while the learning rate does not depend on it
        "run.dir",  # the same directory, moved or reached by another path
        "cluster.nodes",
        "cluster.gpus_per_node",
        "cluster.generation_gpus_per_node",
        "cluster.threads_per_rank",
        "cluster.gpu",
        "cluster.gpu_memory_gb",
        "cluster.network_gb_per_s",
        "parallel.*",
        "memory.*",
        "moe.token_dispatcher",
        "optimizer.distributed",
        "rollout.tensor_parallel_size",
        "batch.micro_batch_size",
        "batch.micro_batch_tokens",
        "batch.logprob_micro_batch_size",
        "batch.logprob_micro_batch_tokens",
        "batch.reference_micro_batch_size",
        "batch.reference_micro_batch_tokens",
        "rollout.engines_per_node",
        "rollout.kv_cache_gb",
        "rollout.oversampling_factor",  # see refused_changes: only while prompts beyond those that are used do nothing
        "rollout.sleep_level",
        "rollout.probe_max_gap",  # what a gap between engine and trainer may be changes no update
        "rollout.probe_mean_gap",
        "rollout.engine.gpu_memory_utilization",
        "reward.models[].tensor_parallel_size",
        "reward.models[].gpu_memory_utilization",
        "reward.models[].kv_cache_gb",
        "reward.workers",
        "reward.memory_gb",
        "judges.max_requests",
        "judges.max_prompt_tokens",
        "judges.max_completion_tokens",
        "judges.max_cost",
        "judges.used_up",
        "environment.workers",
        "sandbox.kind",  # where programs run; what they may use decides what they do
        "sandbox.image",
        "sandbox.url",
        "sandbox.readable",
        "eval.interval",
        "eval.before",
        "eval.after",
        "checkpoint.*",
        "tracking.*",
        "slurm.*",
        "faults.*",
        "notify.*",
    }
)

_NOT_GIVEN = "(not given)"


def difference(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) for every key that differs, in the order of schema.py.

    Free-form values such as rollout.engine are compared key by key, and so are sources of data, evaluation
    sets and reward models where they are the same in number and in name.
    """
    names = [{key: [one.name for one in listed] for key, listed in _named(config)} for config in (old, new)]
    same = frozenset(key for key in names[0] if names[0][key] == names[1][key])
    before, after = (_flat(config, same) for config in (old, new))
    pairs = [(key, before.get(key, _NOT_GIVEN), after.get(key, _NOT_GIVEN)) for key in before | after]
    # Compared as JSON, which tells 1 from 1.0 and from true.
    return [row for row in pairs if json.dumps(row[1], sort_keys=True) != json.dumps(row[2], sort_keys=True)]


def may_change(key: str) -> bool:
    """Return True if a key may differ between two attempts of one run."""
    return re.sub(r"\[\d+\]", "[]", key) in MAY_CHANGE or f"{key.split('.')[0]}.*" in MAY_CHANGE


def refused_changes(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Return the part of :func:`difference` that must not change between two attempts of one run.

    run.max_steps may change only while the learning rate stays constant: a decaying rate is stretched over max_steps,
    and another length would mean other rates in the steps that are already done. rollout.oversampling_factor may change
    only while rollouts wait for all that they draw: what they draw is used up otherwise.
    """
    refused = set[str]()
    if "constant" not in (old.optimizer.lr_decay_style, new.optimizer.lr_decay_style):
        refused.add("run.max_steps")
    if old.rollout.unfinished != "wait":
        refused.add("rollout.oversampling_factor")
    return [row for row in difference(old, new) if not may_change(row[0]) or row[0] in refused]


def _named(config: Config) -> Iterator[tuple[str, Sequence[Rows | RewardModel]]]:
    """Yield the keys whose values are lists of sections with names, and these."""
    yield "data.sources", config.data.sources
    yield "data.eval_sets", config.data.eval_sets
    yield "reward.models", config.reward.models


def _flat(config: Config, lists: frozenset[str]) -> dict[str, Any]:
    """Return the value of every dotted key, in order; mappings are taken apart, and `lists` of sections."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and (value or prefix.count(".") < 2):  # an empty mapping inside is a value
            for key, item in value.items():
                yield from walk(f"{prefix}.{key}", item)
        elif prefix in lists:
            for number, item in enumerate(value):
                yield from ((f"{prefix}[{number}].{key}", one) for key, one in item.items())
        else:
            yield prefix, value

    return {key: v for name, section in as_dict(config).items() for key, v in walk(name, section)}
