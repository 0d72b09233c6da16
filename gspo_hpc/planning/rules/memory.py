"""Rules of memory: every phase fits on the GPU that cluster.gpu names, and a node's own memory is enough.

They are checked if the other rules allow an estimate. What they say of it is imported only where there is something to
say.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto
from typing import TYPE_CHECKING

from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule

if TYPE_CHECKING:
    from gspo_hpc.planning.estimates import advice


class MemoryRule(RuleId):
    """Names of the rules in this file."""

    GPU_IS_KNOWN = auto()
    TRAINER_FITS_GPU_MEMORY = auto()
    ENGINE_FITS_GPU_MEMORY = auto()
    KV_CACHE_HOLDS_LONGEST_SEQUENCE = auto()
    NODE_MEMORY_SUFFICES = auto()
    REWARD_MODEL_FITS_GPU_MEMORY = auto()


@rule(MemoryRule.GPU_IS_KNOWN, "`cluster.gpu` names one GPU that estimates know", Topic.MEMORY)
def _known(plan: PlanBuilder) -> Iterator[str]:
    if plan.config.cluster.gpu is not None:
        from gspo_hpc.planning.estimates import devices

        try:
            devices.card(plan.config.cluster)
        except ValueError as error:
            yield str(error)


@rule(MemoryRule.TRAINER_FITS_GPU_MEMORY, "every phase of the trainer fits in the GPU's memory", Topic.MEMORY)
def _trainer(plan: PlanBuilder) -> Iterator[str]:
    if case := plan.case:
        from gspo_hpc.planning.estimates import advice

        yield from advice.trainer(case)


@rule(MemoryRule.ENGINE_FITS_GPU_MEMORY, "the engine fits in the GPU's memory, beside what stays there", Topic.MEMORY)
def _engine(plan: PlanBuilder) -> Iterator[str]:
    if case := plan.case:
        from gspo_hpc.planning.estimates import advice

        yield from advice.engine(case)


@rule(MemoryRule.KV_CACHE_HOLDS_LONGEST_SEQUENCE, "an engine's KV cache holds the longest sequence", Topic.MEMORY)
def _cache(plan: PlanBuilder) -> Iterator[str]:
    if case := plan.case:
        from gspo_hpc.planning.estimates import advice

        yield from advice.cache(case)


@rule(MemoryRule.NODE_MEMORY_SUFFICES, "`slurm.mem` gives a node as much memory as its processes need", Topic.MEMORY)
def _node(plan: PlanBuilder) -> Iterator[str]:
    if case := plan.case:
        from gspo_hpc.planning.estimates import advice

        yield from advice.node(case, certain=True)


@rule(
    MemoryRule.REWARD_MODEL_FITS_GPU_MEMORY,
    "the engine of a reward model fits in the GPU's memory, beside what stays there, with its longest sequence",
    Topic.MEMORY,
)
def _reward_models(plan: PlanBuilder) -> Iterator[str]:
    if plan.memory is not None and plan.memory.scorers:
        from gspo_hpc.planning.estimates.serving import reward_models

        yield from reward_models.lacking(plan.memory.scorers, plan.memory.phase("reward_model"), plan.memory.card)


def warnings(plan: PlanBuilder) -> Iterator[str]:
    """Yield warnings of what fits only just."""
    if case := plan.case:
        from gspo_hpc.planning.estimates import advice

        yield from advice.warnings(case)


def case(plan: PlanBuilder) -> advice.Case | None:
    """Return what there may be something to say of; None where nothing was estimated, and where all has room."""
    if plan.memory is None:
        return None
    from gspo_hpc.planning.estimates import memory

    if memory.has_room(plan.memory, plan.config):
        return None
    from gspo_hpc.planning.estimates import advice

    return advice.case(plan)
