"""Rules of adapters: what they can be on, and what they cannot be combined with yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import auto

from gspo_hpc.config import engine_arguments
from gspo_hpc.models.adapter_table import ALL, CHOICES, EMBEDDING, TO_MIXTRAL, embedding, examples, kinds
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule
from gspo_hpc.system.text import near_miss, nearest

_LEFT = {
    "lm_head": "the head is computed in chunks, from its weight alone",
    "gate": "routers stay as they are",
}
_OTHERS = {
    **_LEFT,
    **{theirs: f"here its name is {target}" for target, theirs in TO_MIXTRAL.items()},
}


class AdapterRule(RuleId):
    """Names of the rules in this file."""

    ADAPTER_TYPE_GIVEN = auto()
    ADAPTER_TARGETS_KNOWN = auto()
    ADAPTER_EMBEDDING_APART = auto()
    ADAPTER_DROPOUT = auto()
    ADAPTER_KNOWN_LAYERS = auto()
    ADAPTER_OWN_PROVIDER = auto()
    ADAPTER_LAYERS_OF_TORCH = auto()
    ADAPTER_RANK = auto()
    ADAPTER_ENGINE = auto()


def _adapted(plan: PlanBuilder) -> bool:
    return plan.config.adapter.type is not None


@rule(AdapterRule.ADAPTER_TYPE_GIVEN, "settings of `adapter` come with `adapter.type`")
def _type(plan: PlanBuilder) -> Iterator[str]:
    adapter = plan.config.adapter
    if _adapted(plan) or "type" in adapter.model_fields_set:  # null means that the whole model is wanted
        return
    given = [f"adapter.{name}" for name in type(adapter).model_fields if name in adapter.model_fields_set]
    if given:
        verb = "are" if len(given) > 1 else "is"
        yield (
            f"{', '.join(given)} {verb} given without adapter.type, so the whole model would be trained: set "
            "adapter.type=lora, or adapter.type=null if that is meant"
        )


@rule(AdapterRule.ADAPTER_TARGETS_KNOWN, "`adapter.targets` names layers that can have adapters, at least one")
def _targets(plan: PlanBuilder) -> Iterator[str]:
    targets = plan.config.adapter.targets
    if _adapted(plan) and not targets:
        yield f"adapter.targets is empty, so nothing would be trained: give adapter.targets=[{ALL}]"
    known = ", ".join(CHOICES)
    for name in targets if _adapted(plan) else ():
        if name in _OTHERS:
            yield f"adapter.targets: {name} cannot have an adapter: {_OTHERS[name]}; known: {known}"
        elif name not in CHOICES:
            hint = near_miss(name, CHOICES)
            yield f"adapter.targets: {name} is no layer of the model{hint}; known: {known}"


def meant(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the layers that are meant by `targets`: the nearest one for a name of none, and none for the others."""
    here = {theirs: target for target, theirs in TO_MIXTRAL.items()}
    found = (
        name if name in CHOICES else here.get(name) or nearest(name, CHOICES) for name in targets if name not in _LEFT
    )
    return tuple(dict.fromkeys(name for name in found if name is not None))


@rule(AdapterRule.ADAPTER_EMBEDDING_APART, "an adapter on the embedding needs a model whose head has its own weights")
def _embedding(plan: PlanBuilder) -> Iterator[str]:
    arch = plan.architecture
    if _adapted(plan) and EMBEDDING in plan.config.adapter.targets and arch is not None and arch.tie_word_embeddings:
        yield (
            f"adapter.targets: {EMBEDDING} cannot have an adapter in a model whose head is the embedding's weight "
            "(tie_word_embeddings): merged into it, what is trained for the input alone would change the head, too; "
            f"leave {EMBEDDING} out"
        )


@rule(AdapterRule.ADAPTER_DROPOUT, "`adapter.dropout` is 0")
def _dropout(plan: PlanBuilder) -> Iterator[str]:
    dropout = plan.config.adapter.dropout
    if _adapted(plan) and dropout:
        yield (
            f"adapter.dropout ({dropout:g}) must be 0: passes over the same weights would draw other masks, so ratios "
            "would not be 1, and no resumed run could be exact in another layout"
        )


@rule(AdapterRule.ADAPTER_RANK, "`adapter.rank` is at most the smaller size of every layer that has an adapter")
def _rank(plan: PlanBuilder) -> Iterator[str]:
    arch, rank = plan.architecture, plan.config.adapter.rank
    if not _adapted(plan) or arch is None:
        return
    targets = plan.config.adapter.targets
    linears = [*embedding(arch, targets), *(one for layer in examples(arch) for one in kinds(arch, targets, layer))]
    sizes = [min(part.inputs, part.outputs) for linear in linears for part in linear.parts]
    least = min(sizes, default=rank)
    if rank > least:
        yield (
            f"adapter.rank ({rank}) must be at most {least}, the smallest size of the layers that have one: two "
            "matrices of a higher rank would have more elements than the weight that they stand for"
        )


def has_experts(plan: PlanBuilder) -> bool:
    """Return whether the model is a mixture of experts, as far as it is known."""
    arch = plan.architecture
    return bool(plan.model_file.experts) or (arch is not None and arch.experts is not None)


@rule(AdapterRule.ADAPTER_KNOWN_LAYERS, "adapters need a model of a family whose layers all have known places")
def _layers_known(plan: PlanBuilder) -> Iterator[str]:
    arch = plan.architecture
    if _adapted(plan) and arch is not None and arch.mixers:
        yield (
            "adapter.type: lora is for layers of attention and their MLPs or experts: this version has no adapters for "
            "this family of models; train the whole model with adapter.type=null, at a lower optimizer.lr"
        )


@rule(AdapterRule.ADAPTER_OWN_PROVIDER, "adapters need `model.provider: own`")
def _provider(plan: PlanBuilder) -> Iterator[str]:
    if _adapted(plan) and plan.config.model.provider != "own":
        yield (
            "adapter.type: lora needs model.provider own: what mcore-bridge builds has other layers, whose weights it "
            "sends by itself"
        )


@rule(AdapterRule.ADAPTER_LAYERS_OF_TORCH, "adapters need the layers of torch, which `model.layers: auto` then takes")
def _layers(plan: PlanBuilder) -> Iterator[str]:
    model = plan.config.model
    if not _adapted(plan):
        return
    if model.layers == "transformer_engine":
        yield (
            "model.layers: transformer_engine cannot be combined with adapter.type lora: its layers fuse a norm with "
            "the matrix product, whose input an adapter needs; give model.layers=auto"
        )
    if model.fp8:
        yield f"model.fp8: {model.fp8} cannot be combined with adapter.type lora, which needs the layers of torch"


@rule(AdapterRule.ADAPTER_ENGINE, "`adapter.engine: adapters` is given only where vLLM can have adapters of its own")
def _engine(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if _adapted(plan) and config.adapter.engine == "adapters":
        if (why := engine_arguments.adapters_obstacle(config, experts=has_experts(plan))) is not None:
            yield f"adapter.engine: adapters cannot be: {why}; give adapter.engine=merged"
