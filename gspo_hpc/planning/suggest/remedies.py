"""Changes where no layout fits: each was tried, and with it there is a layout.

The fewest GPUs or nodes, the smallest other GPU, the smallest engine over nodes, adapters, the longest responses, and
the largest other models with which one of the layouts fits; nothing here is a guess. Where none of the first three is
enough alone, two things are short at once, and pairs are tried. Each has the headroom and the risk of the best layout
with it, and beside one that may run out of memory stands the next larger change of its kind with which the best layout
leaves more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from gspo_hpc.config.constants import USUAL_GPUS_PER_NODE
from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import written
from gspo_hpc.models import catalog
from gspo_hpc.planning import layouts
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import devices, parameters
from gspo_hpc.planning.estimates.phases import left, risk, shown
from gspo_hpc.planning.fixes import candidates, distances, repair
from gspo_hpc.planning.fixes.change import Change
from gspo_hpc.planning.layouts import Candidate, Search
from gspo_hpc.planning.plan import judge
from gspo_hpc.planning.rules.engine_arguments import takes
from gspo_hpc.planning.settings import ENGINE, divisors, value_of, with_value
from gspo_hpc.planning.suggest import cuts
from gspo_hpc.system.text import GIB, in_gib

_MOST_NODES = 32  # times as many nodes as there are
_MOST_OF_ENGINE = 4  # nodes of one engine
_ENGINE = "rollout.tensor_parallel_size"
_SHORTEST = 256  # tokens of a response
_PAIRS = 2  # that are offered
_CUTS = 4  # layouts of which a repair is looked for, where every one breaks a rule
_ROOM = 6  # pairs of a kind for which all layouts are looked at, at most: that takes seconds each
_ALIKE = 8 * GIB  # of memory, within which cards are about equal
_ROOMY = 100_000.0  # GB of a GPU with which no rule about memory is broken
_LARGER = 1.5  # times as large as one of the same line, so that another one of its family is offered, too
_LARGER_TRIED = 8  # changes that fit after one that may run out of memory, among which one that leaves more is wanted


class Idea(NamedTuple):
    """Changes that may help."""

    changes: dict[str, Any]
    text: str  # what they are


@dataclass(frozen=True)
class Remedy:
    """Changes with which there is a layout."""

    changes: dict[str, Any]
    text: str  # what they are
    headroom: float  # share of the card that passes of the best layout leave
    risk: str  # the same in words
    layout: dict[str, Any]  # settings of the best layout, those that the config with the changes has not

    def __str__(self) -> str:
        settings = " ".join(f"{key}={written(value)}" for key, value in self.changes.items())
        return f"{settings}: {self.text}; memory: {self.risk}, {left(self.headroom)}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc suggest --json` prints them."""
        return vars(self)


_FIRST = "what fixes a rule that every layout breaks"
_FITS = "with which a layout fits"
_TENSORS_FIT = "with which the tensors of a layout fit, but not their fragmentation"
_LEAVES = "with which the best layout has room for fragmentation, too"
_WORDS = {  # for a smaller model
    catalog.Kinship.LINE: "the largest smaller size of this model",
    catalog.Kinship.FAMILY: "the largest smaller model of this family and generation",
}

Kind = Callable[[Config], Iterator[Idea]]  # yields changes, the one that is wanted most first


class Asked(NamedTuple):
    """Options that `suggest` was given beside the config."""

    keep: frozenset[str] = frozenset()  # settings that stay as the config has them
    response_tokens: float | None = None  # of a response, on average: it decides which layout is the best
    models: Models | None = None  # read so far, each once for all changes


def find(config: Config, keep: frozenset[str] = frozenset(), response_tokens: float | None = None) -> list[Remedy]:
    """Return changes of one kind, or of two where other machines are not enough alone, with which a layout fits.

    The list is empty where nothing that is tried is enough. Where every layout breaks a rule that is not about memory,
    every change has what fixes it, too.
    """
    asked = Asked(keep, response_tokens, Models())
    first = _mending(config, asked)
    if not first:
        return _found(config, asked)
    if (best := _best(config, asked, first)) is not None:
        return [_remedy(_changed(config, first), Idea(first, _FIRST), best)]
    found = _found(_changed(config, first), asked)
    return [replace(one, changes=first | one.changes, text=f"{one.text}, and {_FIRST}") for one in found]


def _mending(config: Config, asked: Asked) -> dict[str, Any]:
    """Return what fixes the rules that every layout breaks, of settings that are no part of one and of no machine."""
    wider = _budgets(config, asked)
    changed = _changed(config, wider)
    if _is_allowed(changed, asked):
        return wider
    return min(_mendings(changed, wider, asked), key=len, default=wider)


def _mendings(changed: Config, wider: dict[str, Any], asked: Asked) -> Iterator[dict[str, Any]]:
    """Yield such changes of the nearest repairs: that of the config as it is may be another layout or machine."""
    for found in (fix for broken in (changed, *_nearest_cuts(changed, asked)) for fix in repair.find_all(broken)):
        mending = wider | {change.key: change.value for change in found.changes if _is_mending(change)}
        if _is_allowed(_changed(changed, mending), asked):
            for key in mending.keys() - wider.keys():  # what another layout does without
                fewer = {other: value for other, value in mending.items() if other != key}
                mending = fewer if _is_allowed(_changed(changed, fewer), asked) else mending
            yield mending


def _nearest_cuts(config: Config, asked: Asked) -> list[Config]:
    """Return layouts that break the fewest rules, on GPUs with memory enough."""
    search = _search(config, {}, asked)
    tried = [] if search is None else cuts.every(search.arch, config, asked.keep, search.models)
    roomy = [with_value(wanted, "cluster.gpu_memory_gb", _ROOMY) for wanted in tried]
    return sorted(roomy, key=lambda one: len(judge(one, models=asked.models).broken))[:_CUTS]


def _is_mending(change: Change) -> bool:
    """Return whether a change is of something that layouts leave alone, or of a value that engines do not take."""
    if change.key.startswith(ENGINE) and not takes(change.key.removeprefix(ENGINE), change.before):
        return True
    return distances.size(change.key) < distances.Size.HARDWARE and change.key not in layouts.PRINTED


def _is_allowed(config: Config, asked: Asked) -> bool:
    """Return whether there is a layout that keeps every rule that is not about memory."""
    search = _search(config, {}, asked)
    return search is not None and any(True for _ in search.allowed())


def _budgets(config: Config, asked: Asked) -> dict[str, Any]:
    """Return token budgets that hold the longest sequence, for those that do not."""
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    names = ("micro_batch_tokens", "logprob_micro_batch_tokens", "reference_micro_batch_tokens")
    short = [f"batch.{name}" for name in names if 0 < (getattr(config.batch, name) or 0) < longest]
    return {} if asked.keep.intersection(short) else dict.fromkeys(short, longest)


def _found(config: Config, asked: Asked) -> list[Remedy]:
    kinds = [_more_gpus, _other_gpu, *([] if _ENGINE in asked.keep else [_engine_over_nodes])]
    machines = [one for kind in kinds for one in _first(config, asked, kind)]
    others = _first(config, asked, _adapters) + _shorter(config, asked) + _smaller_models(config, asked)
    return (machines or _pairs(config, asked)) + others


def _shorter(config: Config, asked: Asked) -> list[Remedy]:
    """Return the longest of shorter responses with which a layout fits: none where not even the shortest are enough."""
    *_, shortest = (None, *_shorter_responses(config))
    if shortest is None or _best(config, asked, shortest.changes) is None:
        return []
    return _first(config, asked, _shorter_responses)


def lacking(search: Search) -> str:
    """Return why no layout is left: the memory that the nearest one lacks, or the rule that all of them break."""
    least = [search.least_memory(wanted) for wanted in search.allowed()]
    if not least:
        return _broken_by_all(search)
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
    more = needed - memory
    short = in_gib(more, 1 if more >= GIB / 10 else 4)  # a little is not shown as nothing
    return f"the lightest layout takes {in_gib(needed)} GiB of a GPU in {shown(name)}, {short} more than its {card}"


def _broken_by_all(search: Search) -> str:
    """Return the message of a rule that every layout breaks, if it is one rule."""
    messages: dict[str, str] | None = None
    tried = list(cuts.every(search.arch, search.config, search.keep, search.models))
    for wanted in tried or [search.config]:  # none: the GPUs that train are not known
        broken = {str(item.rule): item.message for item in judge(wanted, models=search.models).broken}
        messages = broken if messages is None else {rule: text for rule, text in messages.items() if rule in broken}
    for rule, text in (messages or {}).items():
        return f"every layout breaks the rule {rule}: {text}"
    return "every layout breaks a rule that is not about memory; `gspo-hpc plan` shows those of this one"


def _first(config: Config, asked: Asked, kind: Kind) -> list[Remedy]:
    """Return the first change of a kind with which a layout fits, and one that leaves more if that is too little."""
    return _with_larger(config, ((idea, _best(config, asked, idea.changes)) for idea in kind(config)))


def _with_larger(config: Config, tried: Iterable[tuple[Idea, Candidate | None]]) -> list[Remedy]:
    """Return the first idea that has a layout; where that may run out of memory, also the first one that leaves more.

    The best layout of that has enough for what allocators reserve, so it is not one that may run out of memory, too.
    """
    fitting = ((idea, best) for idea, best in tried if best is not None)
    if (first := next(fitting, None)) is None:
        return []
    idea, best = first
    words = _FITS if best.memory.headroom >= 0 else _TENSORS_FIT
    found = [_remedy(config, idea._replace(text=f"{idea.text} {words}"), best)]
    if found[0].headroom < 0:
        larger = itertools.islice(fitting, _LARGER_TRIED)
        roomy = ((idea, best) for idea, best in larger if best.memory.headroom >= 0)
        found += [
            _remedy(config, idea._replace(text=f"{idea.text} {_LEAVES}"), best)
            for idea, best in itertools.islice(roomy, 1)
        ]
    return found


def _remedy(config: Config, idea: Idea, best: Candidate) -> Remedy:
    changed = _changed(config, idea.changes)
    layout = {key: value for key in layouts.PRINTED if (value := value_of(best.config, key)) != value_of(changed, key)}
    return Remedy(idea.changes, idea.text, best.memory.headroom, risk(best.memory.headroom), layout)


def _pairs(config: Config, asked: Asked) -> list[Remedy]:
    """Return the first pair of each of several kinds with which a layout fits, and what leaves more, as in `_first`."""
    pairs: list[tuple[Kind, Kind]] = [
        (_other_gpu, _engine_over_nodes),
        (_more_gpus, _engine_over_nodes),
        (_other_gpu, _more_gpus),
        (_more_gpus, _shorter_responses),
        (_other_gpu, _shorter_responses),
    ]
    kinds = (pair for pair in pairs if _ENGINE not in asked.keep or _engine_over_nodes not in pair)
    found = (_with_larger(config, _tried_pairs(config, asked, *pair)) for pair in kinds)
    return [one for both in itertools.islice(filter(None, found), _PAIRS) for one in both]


def _tried_pairs(config: Config, asked: Asked, kind: Kind, other: Kind) -> Iterator[tuple[Idea, Candidate | None]]:
    """Yield the changes of one kind, each with those of the other, and the best layout of both."""
    room = _ROOM
    for first in kind(config):
        for second in other(_changed(config, first.changes)):
            both = first.changes | second.changes
            search = _search(config, both, asked)
            if search is None or not _may_fit(search):
                continue
            best = next(iter(search.ranked(1)), None)
            yield Idea(both, f"{first.text}, with {second.text}"), best
            if best is None:
                room -= any(True for _ in search.allowed())
            if room <= 0:
                return


def _more_gpus(config: Config) -> Iterator[Idea]:
    """Yield more GPUs of this kind, the fewest first: fuller nodes, or more of them."""
    cluster, total = config.cluster, config.num_ranks
    for nodes, gpus in _machines(cluster.nodes, cluster.gpus_per_node):
        changes = {
            key: value
            for key, before, value in (
                ("cluster.nodes", cluster.nodes, nodes),
                ("cluster.gpus_per_node", cluster.gpus_per_node, gpus),
            )
            if before != value
        }
        more = _changed(config, changes).num_ranks
        yield Idea(changes, f"{more} {devices.plural(cluster)} instead of {total}, the fewest of those tried")


def _machines(nodes: int, gpus: int) -> list[tuple[int, int]]:
    """Return larger machines as nodes and GPUs of a node, those with the fewest GPUs first."""
    found = {(nodes, more) for more in (2, 4, USUAL_GPUS_PER_NODE) if more > gpus}
    fuller = max(gpus, USUAL_GPUS_PER_NODE)
    more = nodes + 1
    while more <= nodes * _MOST_NODES:
        found |= {(more, fuller)} | ({(more, gpus)} if nodes > 1 else set())
        step = max(1, 2 ** (more.bit_length() - 3))  # up to 8 nodes all, up to 16 the even ones, and so on
        more = (more // step + 1) * step
    return sorted(found, key=lambda one: (one[0] * one[1], one))


def _other_gpu(config: Config) -> Iterator[Idea]:
    """Yield other GPUs with more memory, the smallest first."""
    cluster = config.cluster
    own = devices.card(cluster)
    assert own is not None
    if cluster.gpu_memory_gb is not None:  # which counts before the name
        for memory in (size for size in devices.sold_sizes() if size > cluster.gpu_memory_gb):
            yield Idea({"cluster.gpu_memory_gb": memory}, f"GPUs with {memory} GB each, the smallest of those tried")
        return
    larger = [one for one in devices.offered(cluster) if one.memory > own.memory]
    # Of cards with about the same memory, the one that is most like this one comes first.
    for device in sorted(larger, key=lambda one: (round(one.memory / _ALIKE), abs(math.log(one.flops / own.flops)))):
        yield Idea(
            {"cluster.gpu": device.name}, f"GPUs with {in_gib(device.memory, 0)} GiB each, the smallest of those tried"
        )


def _engine_over_nodes(config: Config) -> Iterator[Idea]:
    """Yield engines over several nodes, the smallest first."""
    for count in divisors(config.cluster.nodes):
        changes = {_ENGINE: count * config.gpus_per_engine_node}
        if 1 < count <= _MOST_OF_ENGINE:
            yield Idea(changes, f"engines over {count} nodes, which this version plans and does not run, the smallest")


def _adapters(config: Config) -> Iterator[Idea]:
    """Yield adapters, where the whole model would be trained."""
    if config.adapter.type is None:
        text = "LoRA adapters in place of the whole model, at about ten times the learning rate,"
        yield Idea({"adapter.type": "lora"}, text)


def _shorter_responses(config: Config) -> Iterator[Idea]:
    """Yield shorter responses, halved again and again."""
    prompt, response = config.rollout.max_prompt_length, config.rollout.max_response_length
    while (response := response // 2) >= _SHORTEST:
        changes: dict[str, Any] = {"rollout.max_response_length": response}
        if config.batch.micro_batch_tokens:
            changes["batch.micro_batch_tokens"] = min(config.batch.micro_batch_tokens, prompt + response)
        yield Idea(changes, "shorter responses, and micro-batches of one, the longest of those tried")


def _smaller_models(config: Config, asked: Asked) -> list[Remedy]:
    """Return the largest smaller model that fits of the nearest kin, and the largest of its family if much larger."""
    own, sizes = str(config.model.path), _smaller(config, asked)
    best = cache(lambda path: _best(config, asked, {"model.path": path}))

    def first(paths: Iterable[str]) -> list[Remedy]:
        """Return the first of these models with which a layout fits, and one that leaves more."""
        ideas = (Idea({"model.path": path}, _WORDS[catalog.kinship(own, path)]) for path in paths)
        return _with_larger(config, ((idea, best(idea.changes["model.path"])) for idea in ideas))

    found = first(sizes)
    if not found:
        return []
    larger = [path for path in sizes if sizes[path] > _LARGER * sizes[found[0].changes["model.path"]]]
    found += first(sorted(larger, key=lambda path: (-sizes[path], path)))
    return [one for place, one in enumerate(found) if one.changes not in [other.changes for other in found[:place]]]


def _smaller(config: Config, asked: Asked) -> dict[str, int]:
    """Return the smaller models of this family and generation with their parameters: nearest kin first, then larger."""
    path, most = str(config.model.path), parameters.parameters(Search(config).arch)
    kin = {name: catalog.kinship(path, name) for name in candidates.models(config)}
    sizes = _sizes(config, [name for name in kin if kin[name] <= catalog.Kinship.FAMILY], asked)
    order = sorted(sizes, key=lambda name: (kin[name], -sizes[name], name))
    return {name: sizes[name] for name in order if sizes[name] < most}


def _sizes(config: Config, names: Iterable[str], asked: Asked) -> dict[str, int]:
    """Return the parameters of those of these models whose sizes are known."""
    found = {name: _search(config, {"model.path": name}, asked) for name in names}
    return {name: parameters.parameters(one.arch) for name, one in found.items() if one is not None}


def _best(config: Config, asked: Asked, changes: dict[str, Any]) -> Candidate | None:
    """Return the layout that `suggest` ranks first with these changes; None if none fits."""
    search = _search(config, changes, asked)
    return next(iter(search.ranked(1)), None) if search is not None and _may_fit(search) else None


def _may_fit(search: Search) -> bool:
    """Return whether all GPUs together hold what parameters take at least, and those of an engine its weights."""
    config, size, card = search.config, parameters.parameters(search.arch), search.device.memory
    engine = max(config.gpus_per_engine_node, config.rollout.tensor_parallel_size)
    item = 4 if config.model.dtype == "float32" else 2
    state = parameters.least_state(search.arch, config)
    return state <= config.world_size * card and size * item <= engine * card


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        config = with_value(config, key, value)
    return config


def _search(config: Config, changes: dict[str, Any], asked: Asked) -> Search | None:
    """Return the search for layouts of a changed config; None if the sizes of its model are not known."""
    try:
        return Search(_changed(config, changes), asked.keep, asked.response_tokens, asked.models or Models())
    except ValueError:
        return None
