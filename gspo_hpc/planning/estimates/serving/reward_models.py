"""The memory of the engines of reward models, and the seconds in which they score a rollout.

Those that share GPUs are awake in turns, while neither the policy's engines nor the trainer are. What sleeping does not
free stays. Those on GPUs of their own never sleep; a rank of the run is there, too, and takes part in weight syncs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from gspo_hpc.config.derived import engines_per_node
from gspo_hpc.config.schema import Config, RewardModel
from gspo_hpc.config.schema import replace as with_
from gspo_hpc.config.sections import reward_models
from gspo_hpc.models import architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.estimates import engines, rates
from gspo_hpc.planning.estimates.devices import Device
from gspo_hpc.planning.estimates.phases import Phase
from gspo_hpc.planning.estimates.serving.sizes import ENGINE, engine_bytes, engine_parts, weights_bytes
from gspo_hpc.planning.estimates.work import Work, sizes
from gspo_hpc.system.text import GIB, in_gib


class Scorer(NamedTuple):
    """The engine of one reward model on each of its GPUs, in bytes."""

    name: str
    parts: dict[str, int]  # while it is awake, without what sleeping does not free
    needed: int  # with a cache for one sequence of the longest; 0 where nothing is known of the model
    allowed: int  # the share of the GPU that it is given

    @property
    def fits(self) -> bool:
        """True if its share has room for what it needs."""
        return self.needed <= self.allowed


def models(config: Config) -> list[RewardModel]:
    """Return the models that terms of the reward ask, each once."""
    return list({model.name: model for model in config.reward.scored.values()}.values())


def find(config: Config, model: RewardModel) -> tuple[Architecture | None, Config]:
    """Return the architecture of a model, None where it is not known, and the config in which it is the policy."""
    own = reward_models.in_place_of_policy(config, model)
    arch = architecture.find(own)
    if arch is not None and model.kind == "classification":  # in the place of a head it has one row
        arch = replace(arch, tie_word_embeddings=True)
    return arch, own


def scorers(config: Config, device: Device) -> tuple[Scorer, ...]:
    """Return the engines of all reward models."""
    return tuple(_scorer(config, model, device) for model in models(config))


def _scorer(config: Config, model: RewardModel, device: Device) -> Scorer:
    arch, own = find(config, model)
    allowed = int(device.memory * model.gpu_memory_utilization)
    if arch is None:
        return Scorer(model.name, {"reward_cache": max(0, allowed - ENGINE)}, 0, allowed)
    found = engine_parts(arch, own, device)
    names = {"engine_weights": "reward_weights", "engine_working": "reward_working", "kv_cache": "reward_cache"}
    parts = {name: found[part] for part, name in names.items()}
    needed = engine_bytes(arch, own, device, reward_models.length(config, model))
    return Scorer(model.name, parts, needed, allowed)


def awake(found: tuple[Scorer, ...]) -> dict[str, int]:
    """Return what the largest of the engines takes of a GPU, beside what sleeping does not free."""
    return max((one.parts for one in found), key=lambda parts: sum(parts.values()))


def seconds(config: Config, device: Device, given: Work) -> float:
    """Return the seconds in which all models score the completions of a rollout, one after the other.

    The weights of one that shares GPUs come from host memory and go back there. All sequences are read once, and of a
    generative model as many replies are sampled, which are taken to be half as long as they may be.
    """
    total = 0.0
    for model in models(config):
        arch, own = find(config, model)
        if arch is None:
            continue
        own = with_(own, rollout=with_(own.rollout, engines_per_node=engines_per_node(config), unfinished="wait"))
        if not reward_models.is_apart(config, model):
            total += 2.0 * weights_bytes(arch, own) / device.host_bytes_per_s + rates.SYNC_SECONDS
        each = given.prompt_tokens + given.response_tokens
        asked = Work(given.completions, 1, each, 1.0, 1)
        size = sizes(arch, own)
        total += engines.prefill(size, own, device, asked)
        if model.kind == "generative":
            asked = asked._replace(response_tokens=model.max_reply_length / 2, longest=model.max_reply_length)
            total += engines.generation(size, own, device, asked, math.inf)
    return total


def asleep(config: Config) -> dict[str, int]:
    """Return what engines that sleep take of a GPU."""
    count = sum(not reward_models.is_apart(config, model) for model in models(config))
    return {"reward_asleep": count * ENGINE} if count else {}


def process(config: Config) -> dict[str, int]:
    """Return what the process of an engine on a GPU of its own takes there beside weights, working memory and cache."""
    return {"reward_process": ENGINE} if any(reward_models.is_apart(config, one) for one in models(config)) else {}


def lacking(found: tuple[Scorer, ...], phase: Phase, card: int) -> Iterator[str]:
    """Yield which engines do not fit on a GPU, or in the share of it that they are given, and the share to give."""
    beside = phase.total - sum(awake(found).values()) - ENGINE  # what the trainer and other engines leave there
    most = math.floor(100 * (1 - beside / card)) / 100
    for one in found:
        least = math.ceil(100 * one.needed / card) / 100
        text = f"reward.models {one.name}: its engine takes {in_gib(one.needed)} GiB of each GPU, weights and a cache "
        text += "for one sequence of max_length,"
        if least > most:
            yield (
                f"{text} and beside what stays there a GPU of {in_gib(card)} GiB has room for {in_gib(card - beside)}: "
                "give a larger tensor_parallel_size, a smaller max_length or model"
            )
        elif not one.fits:
            yield f"{text} and gpu_memory_utilization gives it {in_gib(one.allowed)}: give {least:g} to {most:g}"
        elif one.allowed + beside > card:
            yield (
                f"reward.models {one.name}: gpu_memory_utilization gives its engine {in_gib(one.allowed)} GiB of each "
                f"GPU, and {in_gib(beside)} of {in_gib(card)} stay taken: give {least:g} to {most:g}"
            )


def of_node(config: Config) -> dict[str, int]:
    """Return what the engines take of a node's own memory: on GPUs that of weights, which wait there to wake."""
    kept, on_cpu = 0, config.cluster.platform == "cpu"
    for model in models(config):
        arch, own = find(config, model)
        sleeps = on_cpu or not reward_models.is_apart(config, model)
        weights = 0 if arch is None or not sleeps else weights_bytes(arch, own) * model.tensor_parallel_size
        kept += (weights + int(model.kv_cache_gb * GIB) * on_cpu) * engines_per_node(config)
    if not kept:
        return {}
    return {"reward_models": kept} if on_cpu else {"reward_weights_asleep": kept}
