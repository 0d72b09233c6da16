"""Rules of nodes that only generate, of generation beside the trainer's work, and of rollouts that end early."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import auto
from fractions import Fraction

from gspo_hpc.config.derived import router_replay
from gspo_hpc.planning.builder import PlanBuilder, show
from gspo_hpc.planning.rules.grid import gpus_of_engine, gpus_of_engine_node
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule


class ApartRule(RuleId):
    """Names of the rules in this file."""

    GENERATION_NODES_NEED_SERVER = auto()
    GENERATION_NODES_LEAVE_SOME_TO_TRAIN = auto()
    GENERATION_NODES_HOLD_ENGINES = auto()
    GENERATION_GPUS_NEED_NODES = auto()
    STALENESS_NEEDS_SERVER = auto()
    STALENESS_WITHOUT_OLD_CHOICES = auto()
    STALENESS_WITHOUT_ENTROPIES = auto()
    UNFINISHED_NEEDS_OVERSAMPLING = auto()
    CONTINUED_GROUPS_FIND_ROOM = auto()
    CONTINUED_WITHOUT_CHOICES = auto()
    CONTINUED_WITHOUT_ENTROPIES = auto()
    IN_FLIGHT_NEEDS_ONE_AHEAD = auto()
    IN_FLIGHT_WITHOUT_CHOICES = auto()


@rule(ApartRule.GENERATION_NODES_NEED_SERVER, "`cluster.generation_nodes` needs `rollout.mode: server`", Topic.ENGINES)
def _server(plan: PlanBuilder) -> Iterator[str]:
    nodes = plan.config.cluster.generation_nodes
    if nodes and not plan.server:
        yield f"cluster.generation_nodes ({nodes}) needs rollout.mode server: with colocate every node trains"


@rule(ApartRule.GENERATION_NODES_LEAVE_SOME_TO_TRAIN, "nodes that only generate leave some to train", Topic.ENGINES)
def _left(plan: PlanBuilder) -> Iterator[str]:
    cluster = plan.config.cluster
    if plan.server and cluster.generation_nodes >= cluster.nodes:
        yield (
            f"cluster.generation_nodes ({cluster.generation_nodes}) leaves none of cluster.nodes ({cluster.nodes}) to "
            "train"
        )


@rule(ApartRule.GENERATION_NODES_HOLD_ENGINES, "engines fit on the nodes that only generate", Topic.ENGINES)
def _engines(plan: PlanBuilder) -> Iterator[str]:
    cluster, gpus, rollout = plan.config.cluster, plan.config.gpus_per_engine_node, plan.config.rollout
    engines, tp, nodes = rollout.engines_per_node, rollout.tensor_parallel_size, cluster.generation_nodes
    if not plan.server or not nodes:
        return
    each = plan.config.gpus_per_engine
    if (engines is not None or tp < each) and (engines or 1) * each > gpus:
        yield (
            f"engines_per_node ({engines or 1}) x {gpus_of_engine(plan)} = {(engines or 1) * each} GPUs are more than "
            f"{gpus_of_engine_node(plan)} of a node that only generates"
        )
    elif tp > gpus and tp % gpus == 0 and nodes % (tp // gpus):
        yield (
            f"cluster.generation_nodes ({nodes}) must be divisible by rollout.tensor_parallel_size ({tp}) / "
            f"{gpus_of_engine_node(plan)} = {tp // gpus}: the nodes of an engine"
        )


@rule(
    ApartRule.GENERATION_GPUS_NEED_NODES,
    "`cluster.generation_gpus_per_node` needs `cluster.generation_nodes`",
    Topic.ENGINES,
)
def _own_gpus(plan: PlanBuilder) -> Iterator[str]:
    cluster = plan.config.cluster
    if cluster.generation_gpus_per_node is not None and not cluster.generation_nodes:
        yield (
            f"cluster.generation_gpus_per_node ({cluster.generation_gpus_per_node}) needs cluster.generation_nodes: "
            "without them every node trains"
        )


@rule(
    ApartRule.STALENESS_WITHOUT_ENTROPIES,
    "`algorithm.top_entropy_quantile` below 1 needs `rollout.max_staleness: 0`",
    Topic.ENGINES,
)
def _entropies(plan: PlanBuilder) -> Iterator[str]:
    staleness, share = plan.config.rollout.max_staleness, plan.config.algorithm.top_entropy_quantile
    if staleness and share < 1:
        yield (
            f"algorithm.top_entropy_quantile ({share:g}) needs entropies under the weights that sampled, which are "
            f"gone with rollout.max_staleness {staleness}: set rollout.max_staleness 0, or top_entropy_quantile 1"
        )


@rule(ApartRule.STALENESS_NEEDS_SERVER, "`rollout.max_staleness` above 0 needs `rollout.mode: server`", Topic.ENGINES)
def _staleness(plan: PlanBuilder) -> Iterator[str]:
    staleness = plan.config.rollout.max_staleness
    if staleness and not plan.server:
        yield (
            f"rollout.max_staleness ({staleness}) needs rollout.mode server: on the same GPUs generation and training "
            "take turns"
        )


@rule(
    ApartRule.STALENESS_WITHOUT_OLD_CHOICES,
    "`moe.router_replay: old_logprobs` needs `rollout.max_staleness: 0`",
    Topic.ENGINES,
)
def _choices(plan: PlanBuilder) -> Iterator[str]:
    staleness = plan.config.rollout.max_staleness
    if staleness and plan.config.moe.router_replay == "old_logprobs":
        yield (
            f"moe.router_replay old_logprobs repeats choices of a pass that rollout.max_staleness ({staleness}) leaves "
            "out, because the weights that sampled are gone: give moe.router_replay=rollout, or off"
        )


@rule(
    ApartRule.UNFINISHED_NEEDS_OVERSAMPLING,
    "`rollout.unfinished` other than wait needs a `rollout.oversampling_factor` with which more prompts are drawn",
    Topic.ENGINES,
)
def _more(plan: PlanBuilder) -> Iterator[str]:
    """A rollout that draws no more than it trains on has to wait for all of it."""
    rollout, prompts = plan.config.rollout, plan.quantities.get("num_rollout_prompts")
    if rollout.unfinished == "wait" or prompts is None or prompts.denominator != 1:
        return
    drawn = math.ceil(prompts * Fraction(str(rollout.oversampling_factor)))
    if drawn <= prompts:
        least = math.ceil(100 * Fraction(int(prompts) + 1, int(prompts)) - 100) / 100
        yield (
            f"rollout.unfinished {rollout.unfinished} ends a rollout with the first {show(prompts)} groups of all that "
            f"it draws, and with rollout.oversampling_factor {rollout.oversampling_factor:g} it draws no more: give "
            f"{max(1.25, 1 + least):g}, or rollout.unfinished=wait"
        )


@rule(
    ApartRule.CONTINUED_GROUPS_FIND_ROOM,
    "with `rollout.unfinished: continue`, `rollout.oversampling_factor` is at most 1 + `rollout.max_continuations`",
    Topic.ENGINES,
)
def _room(plan: PlanBuilder) -> Iterator[str]:
    """Rollouts train on as many groups as they have room for, so more cannot be begun than these have in time."""
    rollout = plan.config.rollout
    if rollout.unfinished == "continue" and rollout.oversampling_factor > 1 + rollout.max_continuations:
        needed = math.ceil(rollout.oversampling_factor) - 1
        yield (
            f"rollout.oversampling_factor {rollout.oversampling_factor:g} has more groups carried on than rollouts can "
            f"train on within rollout.max_continuations ({rollout.max_continuations}): give at most "
            f"{1 + rollout.max_continuations}, or max_continuations={needed}"
        )


@rule(
    ApartRule.CONTINUED_WITHOUT_CHOICES,
    "`rollout.unfinished: continue` needs `moe.router_replay: off` in a mixture",
    Topic.ENGINES,
)
def _continued_choices(plan: PlanBuilder) -> Iterator[str]:
    """Several weights chose a completion's experts, and engines report those of the last alone."""
    config = plan.config
    if config.rollout.unfinished == "continue" and plan.model_file.experts and router_replay(config) != "off":
        yield (
            f"moe.router_replay {config.moe.router_replay} repeats the experts that one pass chose, and with "
            "rollout.unfinished continue several weights choose those of a completion: give moe.router_replay=off, or "
            "rollout.unfinished=drop"
        )


@rule(
    ApartRule.CONTINUED_WITHOUT_ENTROPIES,
    "`algorithm.top_entropy_quantile` below 1 needs another `rollout.unfinished` than continue",
    Topic.ENGINES,
)
def _continued_entropies(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if config.rollout.unfinished == "continue" and config.algorithm.top_entropy_quantile < 1:
        yield (
            f"algorithm.top_entropy_quantile ({config.algorithm.top_entropy_quantile:g}) needs entropies under the "
            "weights that sampled, which are gone with rollout.unfinished continue: set rollout.unfinished=drop, or "
            "top_entropy_quantile 1"
        )


@rule(
    ApartRule.IN_FLIGHT_NEEDS_ONE_AHEAD,
    "`rollout.in_flight_updates` needs `rollout.mode: server` and `rollout.max_staleness: 1`",
    Topic.ENGINES,
)
def _in_flight(plan: PlanBuilder) -> Iterator[str]:
    """Engines that are not ahead sample nothing while others train, and further ahead nothing gets faster."""
    rollout = plan.config.rollout
    if rollout.in_flight_updates and not (plan.server and rollout.max_staleness == 1):
        yield (
            "rollout.in_flight_updates brings newer weights to engines that generate while others train: it needs "
            f"rollout.mode server and rollout.max_staleness 1, not {rollout.mode} and {rollout.max_staleness}"
        )


@rule(
    ApartRule.IN_FLIGHT_WITHOUT_CHOICES,
    "`rollout.in_flight_updates` needs `moe.router_replay: off` in a mixture",
    Topic.ENGINES,
)
def _in_flight_choices(plan: PlanBuilder) -> Iterator[str]:
    """Several weights chose a completion's experts, and engines report those of the last alone."""
    config = plan.config
    if config.rollout.in_flight_updates and plan.model_file.experts and router_replay(config) != "off":
        yield (
            f"moe.router_replay {config.moe.router_replay} repeats the experts that one pass chose, and with "
            "rollout.in_flight_updates several weights choose those of a completion: give moe.router_replay=off, or "
            "rollout.in_flight_updates=false"
        )
