"""Changes where no layout fits: each was tried, and with it alone there is a layout.

The fewest GPUs or nodes, the smallest other GPU, the smallest engine over nodes, the longest responses, and the largest
other model with which one of the layouts fits; nothing here is a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def find(config: Config, keep: frozenset[str] = frozenset()) -> list[Remedy]:
    """Return changes of one kind each with which a layout fits; none where nothing that is tried is enough."""
    tries = (_more_gpus, _other_gpu, _engine_over_nodes, _shorter_responses, _smaller_model)
    return [found for one in tries if (found := one(config, keep)) is not None]


def lacking(search: Search) -> str:
    """Return why no layout is left: the memory that the nearest one lacks, or the rule that all of them break."""
    allowed = list(search.allowed())
    if not allowed:
        return "every layout breaks a rule that is not about memory; `gspo-hpc plan` shows those of this one"
    needed, name = min(search.least_memory(wanted) for wanted in allowed)
    if needed <= search.device.memory:
        return "what is short is room for the longest sequence in an engine, or memory of a node"
    card = in_gib(search.device.memory)
    return f"the lightest layout takes {in_gib(needed)} GiB of a GPU in {shown(name)}, which has {card}"


def _more_gpus(config: Config, keep: frozenset[str]) -> Remedy | None:
    """Return the fewest GPUs of this kind with which a layout fits: a fuller node, or more nodes."""
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
        if _fits(config, keep, changes):
            more = f"{nodes * gpus} {cluster.gpu} instead of {total}"
            return Remedy(changes, f"{more}, the fewest of those that were tried")
    return None


def _machines(nodes: int, gpus: int) -> Iterator[tuple[int, int]]:
    """Yield larger machines, the smallest first: a fuller node, then more nodes."""
    if nodes == 1:
        yield from ((1, more) for more in (2, 4, _NODE) if more > gpus)
    gpus = max(gpus, _NODE) if nodes == 1 else gpus
    more = nodes + 1
    while more <= nodes * _MOST_NODES:
        yield more, gpus
        step = max(1, 2 ** (more.bit_length() - 3))  # up to 8 nodes all, up to 16 the even ones, and so on
        more = (more // step + 1) * step


def _other_gpu(config: Config, keep: frozenset[str]) -> Remedy | None:
    """Return the smallest other GPU with which a layout fits."""
    own = devices.find(str(config.cluster.gpu))
    larger = sorted((one for one in devices.DEVICES.values() if one.memory > own.memory), key=lambda one: one.memory)
    for device in larger:
        changes = {"cluster.gpu": device.name}
        if _fits(config, keep, changes):
            return Remedy(changes, f"the same number of GPUs with {in_gib(device.memory, 0)} GiB")
    return None


def _engine_over_nodes(config: Config, keep: frozenset[str]) -> Remedy | None:
    """Return the smallest engine over several nodes with which a layout fits."""
    for count in divisors(config.cluster.nodes):
        changes = {_ENGINE: count * config.cluster.gpus_per_node}
        if 1 < count <= _MOST_OF_ENGINE and _ENGINE not in keep and _fits(config, keep, changes):
            return Remedy(changes, f"engines over {count} nodes, which this version plans and does not run")
    return None


def _shorter_responses(config: Config, keep: frozenset[str]) -> Remedy | None:
    """Return the longest response, halved again and again, with which a layout fits."""
    prompt, response = config.rollout.max_prompt_length, config.rollout.max_response_length
    while (response := response // 2) >= _SHORTEST:
        changes: dict[str, Any] = {"rollout.max_response_length": response}
        if config.batch.micro_batch_tokens:
            changes["batch.micro_batch_tokens"] = min(config.batch.micro_batch_tokens, prompt + response)
        if _fits(config, keep, changes):
            return Remedy(changes, "shorter responses, and micro-batches of one")
    return None


def _smaller_model(config: Config, keep: frozenset[str]) -> Remedy | None:
    """Return the largest smaller model that is trained and with which a layout fits, one of the family if there is."""
    path = Path(str(config.model.path))
    for name in _smaller(config, [Path(trained).name for trained in candidates.models(config)]):
        changes = {"model.path": str(path.with_name(name))}
        if _fits(config, keep, changes):
            return Remedy(changes, "a smaller model")
    return None


def _smaller(config: Config, names: Iterable[str]) -> list[str]:
    """Return smaller models: those of the family first, the larger ones first."""
    own, sizes = Search(config).arch, dict[str, int]()
    for name in names:
        arch = _search(config, {"model.path": name}, frozenset())
        if arch is not None:
            sizes[name] = parameters.parameters(arch.arch)
    family = _family(Path(str(config.model.path)).name)
    smaller = [name for name, size in sizes.items() if size < parameters.parameters(own)]
    smaller.sort(key=lambda name: (_family(name) != family, -sizes[name]))
    return smaller[:_MODELS]


def _family(name: str) -> str:
    return name.split("-")[0].lower()


def _fits(config: Config, keep: frozenset[str], changes: dict[str, Any]) -> bool:
    search = _search(config, changes, keep)
    if search is None:
        return False
    least = parameters.parameters(search.arch) * _STATE
    return least <= search.config.world_size * search.device.memory and search.fits()


def _search(config: Config, changes: dict[str, Any], keep: frozenset[str]) -> Search | None:
    """Return the search for layouts of a changed config; None if the sizes of its model are not known."""
    for key, value in changes.items():
        config = with_value(config, key, value)
    try:
        return Search(config, keep)
    except ValueError:
        return None
