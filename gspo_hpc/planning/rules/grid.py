"""Rules of the grid: parallel sizes cut the GPUs that train into ranks, and engines into GPUs of a node."""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto
from fractions import Fraction

from gspo_hpc.planning.builder import PlanBuilder, show
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule


class GridRule(RuleId):
    """Names of the rules in this file."""

    WORLD_SIZE_DIVIDES = auto()
    EXPERT_WORLD_SIZE_DIVIDES = auto()
    SERVER_ENGINES_GIVEN = auto()
    SERVER_LEAVES_GPUS_TO_TRAIN = auto()
    ENGINES_FIT_NODE = auto()
    ROLLOUT_TENSOR_PARALLEL_DIVIDES_NODE = auto()
    SEQUENCE_PARALLEL_NEEDS_TENSOR_PARALLEL = auto()
    VIRTUAL_PIPELINE_NEEDS_PIPELINE = auto()
    OVERLAP_PARAM_GATHER_NEEDS = auto()


@rule(GridRule.WORLD_SIZE_DIVIDES, "`world_size` is divisible by TP x PP x CP", Topic.GRID)
def _world_size(plan: PlanBuilder) -> Iterator[str]:
    sizes, world = plan.layout, plan.world
    tp, pp = sizes["tensor_model_parallel_size"], sizes["pipeline_model_parallel_size"]
    cp = sizes["context_parallel_size"]
    if world is not None and world % (tp * pp * cp):
        yield (
            f"world_size ({world}) must be divisible by tensor ({tp}) x pipeline ({pp}) x context ({cp}) parallel size "
            f"= {tp * pp * cp}: dp_size would be {show(Fraction(world, tp * pp * cp))}"
        )


@rule(GridRule.EXPERT_WORLD_SIZE_DIVIDES, "`world_size` is divisible by ETP x EP x PP", Topic.GRID)
def _expert_world_size(plan: PlanBuilder) -> Iterator[str]:
    sizes, world = plan.layout, plan.world
    etp, ep = sizes["expert_tensor_parallel_size"], sizes["expert_model_parallel_size"]
    pp = sizes["pipeline_model_parallel_size"]
    if world is not None and world % (etp * ep * pp):
        yield (
            f"world_size ({world}) must be divisible by expert tensor ({etp}) x expert ({ep}) x pipeline ({pp}) "
            f"parallel size = {etp * ep * pp}: expert_dp_size would be {show(Fraction(world, etp * ep * pp))}"
        )


@rule(
    GridRule.SERVER_ENGINES_GIVEN,
    "`rollout.mode: server` needs `rollout.engines_per_node`, or `cluster.generation_nodes`",
    Topic.ENGINES,
)
def _server_engines(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if plan.server and config.rollout.engines_per_node is None and not config.cluster.generation_nodes:
        yield (
            "rollout.mode server sets GPUs apart for generation: give rollout.engines_per_node, for some of every "
            "node, or cluster.generation_nodes, for whole nodes"
        )


@rule(GridRule.SERVER_LEAVES_GPUS_TO_TRAIN, "GPUs set apart for generation leave some to train", Topic.ENGINES)
def _server_gpus(plan: PlanBuilder) -> Iterator[str]:
    gpus, rollout = plan.config.cluster.gpus_per_node, plan.config.rollout
    engines, each = rollout.engines_per_node, plan.config.gpus_per_engine
    every = plan.config.cluster.generation_nodes > 0  # nodes either train or generate
    if plan.server and not every and engines is not None and engines * each >= gpus:
        yield (
            f"engines_per_node ({engines}) x {gpus_of_engine(plan)} = {engines * each} GPUs set apart for "
            f"generation leave none of gpus_per_node ({gpus}) to train"
        )


def gpus_of_engine_node(plan: PlanBuilder) -> str:
    """Return the GPUs of a node that has engines, with the setting that says so, as a message names them."""
    config = plan.config
    other = config.gpus_per_engine_node != config.cluster.gpus_per_node
    return f"{'generation_' * other}gpus_per_node ({config.gpus_per_engine_node})"


def gpus_of_engine(plan: PlanBuilder) -> str:
    """Return what makes up the GPUs of an engine in server mode, as a message names it."""
    tp, each = plan.config.rollout.tensor_parallel_size, plan.config.gpus_per_engine
    if each == tp:
        return f"rollout.tensor_parallel_size ({tp})"
    return f"(rollout.tensor_parallel_size ({tp}) + {each - tp} of reward.models)"


@rule(
    GridRule.ENGINES_FIT_NODE,
    "the engines of a node fit on it and share its GPUs evenly; engines over nodes share the nodes evenly",
    Topic.ENGINES,
)
def _engines(plan: PlanBuilder) -> Iterator[str]:
    if plan.server:
        return
    gpus, tp = plan.config.cluster.gpus_per_node, plan.config.rollout.tensor_parallel_size
    engines = plan.layout["engines_per_node"]
    if tp > gpus:
        yield from _over_nodes(plan)
    elif gpus % engines or engines * tp > gpus:
        yield (
            f"gpus_per_node ({gpus}) must be divisible by engines_per_node ({engines}), and hold engines_per_node x "
            f"rollout.tensor_parallel_size ({tp}) = {engines * tp} GPUs"
        )


def _over_nodes(plan: PlanBuilder) -> Iterator[str]:
    """Yield what is wrong with engines of more GPUs than a node has."""
    nodes, gpus = plan.config.cluster.nodes, plan.config.cluster.gpus_per_node
    tp, engines = plan.config.rollout.tensor_parallel_size, plan.config.rollout.engines_per_node
    if engines is not None:
        yield (
            f"rollout.engines_per_node ({engines}) must be left out: an engine of rollout.tensor_parallel_size ({tp}) "
            f"GPUs has several nodes of gpus_per_node ({gpus})"
        )
    if tp % gpus == 0 and nodes % (tp // gpus):
        yield (
            f"cluster.nodes ({nodes}) must be divisible by rollout.tensor_parallel_size ({tp}) / gpus_per_node "
            f"({gpus}) = {tp // gpus}: the nodes of an engine"
        )


@rule(
    GridRule.ROLLOUT_TENSOR_PARALLEL_DIVIDES_NODE,
    "`gpus_per_node` is a multiple of `rollout.tensor_parallel_size`, or a divisor: an engine then has whole nodes; in "
    "server mode an engine may have any GPUs of a node",
)
def _rollout_tensor_parallel(plan: PlanBuilder) -> Iterator[str]:
    gpus, tp = plan.config.gpus_per_engine_node, plan.config.rollout.tensor_parallel_size
    if gpus % tp and tp % gpus and not (plan.server and tp < gpus):
        yield f"{gpus_of_engine_node(plan)} must be a multiple or a divisor of rollout.tensor_parallel_size ({tp})"


@rule(GridRule.SEQUENCE_PARALLEL_NEEDS_TENSOR_PARALLEL, "`sequence_parallel` needs TP above 1")
def _sequence_parallel(plan: PlanBuilder) -> Iterator[str]:
    parallel = plan.config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield "sequence_parallel needs tensor_model_parallel_size above 1"


@rule(GridRule.VIRTUAL_PIPELINE_NEEDS_PIPELINE, "a virtual pipeline needs PP above 1")
def _virtual_pipeline(plan: PlanBuilder) -> Iterator[str]:
    pp = plan.config.parallel.pipeline_model_parallel_size
    vpp = plan.config.parallel.virtual_pipeline_model_parallel_size
    if vpp is not None and (vpp <= 0 or pp == 1):
        yield f"virtual_pipeline_model_parallel_size ({vpp}) needs pipeline_model_parallel_size ({pp}) above 1"


@rule(
    GridRule.OVERLAP_PARAM_GATHER_NEEDS,
    "`overlap_param_gather` needs the distributed optimizer and `overlap_grad_reduce`",
)
def _overlap(plan: PlanBuilder) -> Iterator[str]:
    parallel = plan.config.parallel
    if parallel.overlap_param_gather and not (plan.config.optimizer.distributed and parallel.overlap_grad_reduce):
        yield "overlap_param_gather needs optimizer.distributed: true and overlap_grad_reduce: true"
