"""Changes where no layout fits: each was tried, and with it there is a layout.

The fewest GPUs or nodes, the smallest other GPU, the smallest engine over nodes, the longest responses, and the largest
other model with which one of the layouts fits; nothing here is a guess. Where none of the first three is enough alone,
two things are short at once, and pairs are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import written
from gspo_hpc.planning.estimates import devices, parameters
from gspo_hpc.planning.estimates.memory import shown
from gspo_hpc.planning.fixes import candidates
from gspo_hpc.planning.layouts import Search
from gspo_hpc.planning.settings import divisors, with_value
from gspo_hpc.system.text import in_gib

_NODE = 8  # GPUs of the usual node
_MOST_NODES = 32  # times as many nodes as there are
_MOST_OF_ENGINE = 4  # nodes of one engine
_ENGINE = "rollout.tensor_parallel_size"
_STATE = 16  # bytes that a parameter takes at least, over all ranks: weights, gradients and Adam's state
_SHORTEST = 256  # tokens of a response
_MODELS = 6  # smaller models that are tried
_PAIRS = 2  # that are offered
_ROOM = 6  # pairs of a kind for which all layouts are looked at, at most: that takes seconds each


@dataclass(frozen=True)
class Remedy:
    """Changes with which there is a layout."""

    changes: dict[str, Any]
    text: str  # what they are

    def __str__(self) -> str:
        settings = " ".join(f"{key}={written(value)}" for key, value in self.changes.items())
        return f"{settings}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc suggest --json` prints them."""
        return vars(self)


Kind = Callable[[Config], Iterator[Remedy]]  # yields changes, the one that is wanted most first


def find(config: Config, keep: frozenset[str] = frozenset()) -> list[Remedy]:
    """Return changes of one kind, or of two where other machines are not enough alone, with which a layout fits.

    The list is empty where nothing that is tried is enough.
    """
    kinds = [_more_gpus, _other_gpu, *([] if _ENGINE in keep else [_engine_over_nodes])]
    machines = [found for kind in kinds if (found := _first(config, keep, kind)) is not None]
    others = [_first(config, keep, kind) for kind in (_shorter_responses, _smaller_model)]
    return (machines or _pairs(config, keep)) + [found for found in others if found is not None]


def lacking(search: Search) -> str:
    """Return why no layout is left: the memory that the nearest one lacks, or the rule that all of them break."""
    least = [search.least_memory(wanted) for wanted in search.allowed()]
    if not least:
        return "every layout breaks a rule that is not about memory; `gspo-hpc plan` shows those of this one"
    memory, card = search.device.memory, in_gib(search.device.memory)
    trainer, engine = min(one.passes for one in least), min(one.generation for one in least)
    if trainer[0] > memory and engine > memory:
        return (
            f"two things are short at once: the lightest layout takes {in_gib(trainer[0])} GiB of a GPU in "
            f"{shown(trainer[1])}, and the largest engine {in_gib(engine)} in generation; a GPU has {card}"
        )
    needed, name = min(max(one.peak, (one.generation, "generation")) for one in least)
    if needed <= memory:
        return "what is short is room for the longest sequence in an engine, or memory of a node"
    return f"the lightest layout takes {in_gib(needed)} GiB of a GPU in {shown(name)}, which has {card}"


def _first(config: Config, keep: frozenset[str], kind: Kind) -> Remedy | None:
    """Return the first change of a kind with which a layout fits."""
    return next((one for one in kind(config) if _fits(config, keep, one.changes)), None)


def _pairs(config: Config, keep: frozenset[str]) -> list[Remedy]:
    """Return the first pair of each of several kinds with which a layout fits."""
    pairs: list[tuple[Kind, Kind]] = [
        (_other_gpu, _engine_over_nodes),
        (_more_gpus, _engine_over_nodes),
        (_other_gpu, _more_gpus),
        (_more_gpus, _shorter_responses),
        (_other_gpu, _shorter_responses),
    ]
    kinds = (pair for pair in pairs if _ENGINE not in keep or _engine_over_nodes not in pair)
    found = (_pair(config, keep, *pair) for pair in kinds)
    return list(itertools.islice((one for one in found if one is not None), _PAIRS))


def _pair(config: Config, keep: frozenset[str], kind: Kind, other: Kind) -> Remedy | None:
    """Return the first change of one kind with the first of the other with which a layout fits."""
    room = _ROOM
    for first in kind(config):
        for second in other(_changed(config, first.changes)):
            both = first.changes | second.changes
            search = _search(config, both, keep)
            if search is None or not _may_fit(search):
                continue
            if search.fits():
                return Remedy(both, f"{first.text}, with {second.text}")
            room -= any(True for _ in search.allowed())
            if room <= 0:
                return None
    return None


def _more_gpus(config: Config) -> Iterator[Remedy]:
    """Yield more GPUs of this kind, the fewest first: fuller nodes, or more of them."""
    cluster, total = config.cluster, config.cluster.nodes * config.cluster.gpus_per_node
    for nodes, gpus in _machines(cluster.nodes, cluster.gpus_per_node):
        changes = {
            key: value
            for key, before, value in (
                ("cluster.nodes", cluster.nodes, nodes),
                ("cluster.gpus_per_node", cluster.gpus_per_node, gpus),
            )
            if before != value
        }
        yield Remedy(changes, f"{nodes * gpus} {cluster.gpu} instead of {total}, the fewest of those that were tried")


def _machines(nodes: int, gpus: int) -> list[tuple[int, int]]:
    """Return larger machines as nodes and GPUs of a node, those with the fewest GPUs first."""
    found = {(nodes, more) for more in (2, 4, _NODE) if more > gpus}
    fuller = max(gpus, _NODE)
    more = nodes + 1
    while more <= nodes * _MOST_NODES:
        found |= {(more, fuller)} | ({(more, gpus)} if nodes > 1 else set())
        step = max(1, 2 ** (more.bit_length() - 3))  # up to 8 nodes all, up to 16 the even ones, and so on
        more = (more // step + 1) * step
    return sorted(found, key=lambda one: (one[0] * one[1], one))


def _other_gpu(config: Config) -> Iterator[Remedy]:
    """Yield other GPUs with more memory, the smallest first."""
    own = devices.find(str(config.cluster.gpu))
    larger = sorted((one for one in devices.DEVICES.values() if one.memory > own.memory), key=lambda one: one.memory)
    for device in larger:
        yield Remedy({"cluster.gpu": device.name}, f"GPUs with {in_gib(device.memory, 0)} GiB each")


def _engine_over_nodes(config: Config) -> Iterator[Remedy]:
    """Yield engines over several nodes, the smallest first."""
    for count in divisors(config.cluster.nodes):
        changes = {_ENGINE: count * config.cluster.gpus_per_node}
        if 1 < count <= _MOST_OF_ENGINE:
            yield Remedy(changes, f"engines over {count} nodes, which this version plans and does not run")


def _shorter_responses(config: Config) -> Iterator[Remedy]:
    """Yield shorter responses, halved again and again."""
    prompt, response = config.rollout.max_prompt_length, config.rollout.max_response_length
    while (response := response // 2) >= _SHORTEST:
        changes: dict[str, Any] = {"rollout.max_response_length": response}
        if config.batch.micro_batch_tokens:
            changes["batch.micro_batch_tokens"] = min(config.batch.micro_batch_tokens, prompt + response)
        yield Remedy(changes, "shorter responses, and micro-batches of one")


def _smaller_model(config: Config) -> Iterator[Remedy]:
    """Yield smaller models that are trained: those of the family first, the larger ones first."""
    for path in _smaller(config, candidates.models(config)):
        yield Remedy({"model.path": path}, "a smaller model")


def _smaller(config: Config, names: Iterable[str]) -> list[str]:
    """Return those of these models that are smaller: those of the family first, the larger ones first."""
    own, sizes = Search(config).arch, dict[str, int]()
    for name in names:
        arch = _search(config, {"model.path": name}, frozenset())
        if arch is not None:
            sizes[name] = parameters.parameters(arch.arch)
    family = _family(str(config.model.path))
    smaller = [name for name, size in sizes.items() if size < parameters.parameters(own)]
    smaller.sort(key=lambda name: (_family(name) != family, -sizes[name]))
    return smaller[:_MODELS]


def _family(path: str) -> str:
    return Path(path).name.split("-")[0].lower()


def _fits(config: Config, keep: frozenset[str], changes: dict[str, Any]) -> bool:
    search = _search(config, changes, keep)
    return search is not None and _may_fit(search) and search.fits()


def _may_fit(search: Search) -> bool:
    """Return whether all GPUs together hold what parameters take at least, and those of an engine its weights."""
    config, size, card = search.config, parameters.parameters(search.arch), search.device.memory
    engine = max(config.cluster.gpus_per_node, config.rollout.tensor_parallel_size)
    item = 4 if config.model.dtype == "float32" else 2
    return size * _STATE <= config.world_size * card and size * item <= engine * card


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        config = with_value(config, key, value)
    return config


def _search(config: Config, changes: dict[str, Any], keep: frozenset[str]) -> Search | None:
    """Return the search for layouts of a changed config; None if the sizes of its model are not known."""
    try:
        return Search(_changed(config, changes), keep)
    except ValueError:
        return None
