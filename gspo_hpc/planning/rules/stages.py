"""Rules of pipeline stages: how many layers each has, and in what groups these are computed again."""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto

from gspo_hpc.config.schema import replace
from gspo_hpc.planning import divisions
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule


class StageRule(RuleId):
    """Names of the rules in this file."""

    PIPELINE_PARALLEL_LAYERS = auto()
    UNEVEN_PIPELINE_LAYERS = auto()
    UNEVEN_PIPELINE_CHUNKS = auto()
    UNEVEN_PIPELINE_TWO_STAGES = auto()
    RECOMPUTE_GROUPS_WHOLE = auto()


def _ends(plan: PlanBuilder) -> dict[str, int]:
    """Return the settings of the first and the last stage that are given, by name."""
    parallel = plan.config.parallel
    names = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    return {name: getattr(parallel, name) for name in names if getattr(parallel, name) is not None}


@rule(
    StageRule.PIPELINE_PARALLEL_LAYERS,
    "layers are divisible by PP x virtual PP, where no stage has a number of its own",
)
def _even(plan: PlanBuilder) -> Iterator[str]:
    parallel, layers = plan.config.parallel, plan.model_file.size("num_hidden_layers")
    stages = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    if layers is not None and layers < 1:
        yield f"num_hidden_layers ({layers}) of the model must be at least 1"
    elif layers is not None and not _ends(plan) and layers % stages:
        cut = "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size"
        # Not their names in full: whoever searches for fixes tries every setting that a message names.
        own = ", or num_layers_in_first/last_pipeline_stage must give the ends a number of their own"
        uneven = own if parallel.pipeline_model_parallel_size > 1 else ""
        yield f"num_hidden_layers ({layers}) of the model must be divisible by {cut} ({stages}){uneven}"


@rule(
    StageRule.UNEVEN_PIPELINE_LAYERS,
    "what `num_layers_in_first_pipeline_stage` and `num_layers_in_last_pipeline_stage` leave of the layers is "
    "divisible by the other stages",
)
def _uneven(plan: PlanBuilder) -> Iterator[str]:
    parallel, layers, ends = plan.config.parallel, plan.model_file.size("num_hidden_layers"), _ends(plan)
    if layers is None or not ends:
        return
    if divisions.layers_per_stage(layers, replace(parallel, virtual_pipeline_model_parallel_size=None)) is not None:
        return
    stages, given = parallel.pipeline_model_parallel_size, " and ".join(f"{name} ({n})" for name, n in ends.items())
    left, others = layers - sum(ends.values()), max(0, stages - len(ends))
    yield (
        f"{given} of {stages} stages (pipeline_model_parallel_size) leave {left} of num_hidden_layers ({layers}) of "
        f"the model for {others} other{'s' * (others != 1)}: these must share them evenly"
    )


@rule(
    StageRule.UNEVEN_PIPELINE_CHUNKS,
    "the layers of every stage are divisible by virtual PP, where the first or last has a number of its own",
)
def _chunks(plan: PlanBuilder) -> Iterator[str]:
    parallel, layers, ends = plan.config.parallel, plan.model_file.size("num_hidden_layers"), _ends(plan)
    chunks = parallel.virtual_pipeline_model_parallel_size
    if chunks is None or not ends:
        return
    for name, count in ends.items():
        if count % chunks:
            yield f"{name} ({count}) must be divisible by virtual_pipeline_model_parallel_size ({chunks})"
    even = replace(parallel, virtual_pipeline_model_parallel_size=None)
    counts = None if layers is None else divisions.layers_per_stage(layers, even)
    between = set(counts or ()) - set(ends.values())
    if bad := [count for count in between if count % chunks]:
        yield (
            f"the {bad[0]} layers of every other stage must be divisible by virtual_pipeline_model_parallel_size "
            f"({chunks}): num_hidden_layers ({layers}) of the model, less {' and '.join(ends)}"
        )


@rule(
    StageRule.UNEVEN_PIPELINE_TWO_STAGES,
    "a virtual pipeline of two stages has the layers of one of them set at most",
)
def _two_stages(plan: PlanBuilder) -> Iterator[str]:
    parallel, ends = plan.config.parallel, _ends(plan)
    if (
        len(ends) == parallel.pipeline_model_parallel_size == 2
        and parallel.virtual_pipeline_model_parallel_size is not None
    ):
        yield (
            f"{' and '.join(ends)} cannot both be given for a virtual pipeline of two stages "
            "(virtual_pipeline_model_parallel_size, pipeline_model_parallel_size): Megatron-Core counts layers by the "
            "stages between them; give one"
        )


@rule(
    StageRule.RECOMPUTE_GROUPS_WHOLE,
    "with `memory.recompute_method: uniform`, the layers of every stage are divisible by `memory.recompute_num_layers`",
)
def _groups(plan: PlanBuilder) -> Iterator[str]:
    memory, parallel, layers = plan.config.memory, plan.config.parallel, plan.model_file.size("num_hidden_layers")
    if memory.recompute_granularity != "full" or memory.recompute_method != "uniform":
        return
    counts = None if layers is None else divisions.layers_per_stage(layers, parallel)
    if counts is None:
        return
    chunks, wanted = parallel.virtual_pipeline_model_parallel_size or 1, memory.recompute_num_layers
    parts = sorted({count // chunks for count in counts})
    bad = [count for count in parts if count % wanted]
    if bad and wanted <= parts[-1]:  # else another rule says so
        yield (
            f"memory.recompute_num_layers ({wanted}) must divide the {bad[0]} layers of a pipeline stage with "
            "memory.recompute_method uniform: Megatron-Core makes whole groups"
        )
