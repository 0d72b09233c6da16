"""The quantities of a plan: how GPUs are cut into ranks and engines, batch sizes, prompts, and steps.

All counts are completions unless a name says prompts. ``dp_size = world_size / (TP x PP x CP)``; expert layers cut the
same ranks another way, ``expert_dp_size = world_size / (ETP x EP x PP)``. Quantities are exact fractions: where a rule
is broken, half a prompt may be left for a device. What cannot be known from what is given is left out.
"""

from __future__ import annotations

import math
from fractions import Fraction

from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.config.derived import engines_per_node, trained_rows
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.planning.builder import PlanBuilder, SourceShare


def fill_in(plan: PlanBuilder) -> None:
    """Fill in the layout and the quantities of a plan that rules look at, as far as they can be known."""
    _engines(plan)
    _grid(plan)
    _batch(plan)
    _prompts(plan)


def fill_in_steps(plan: PlanBuilder) -> None:
    """Fill in steps, rollouts, epochs and completions of the run."""
    config, q, rows = plan.config, plan.quantities, plan.rows
    gbs, group = config.batch.global_batch_size, config.batch.num_generations
    prompts, spg = q.get("num_rollout_prompts"), q.get("steps_per_generation")
    if rows is not None and group and prompts is not None:
        q["num_rows"] = rows
        if gbs:  # per device x dp_size x gradient accumulation: the global batch, however it is cut
            q["steps_per_epoch"] = max_steps(rows, group, gbs, 1, 1, config.batch.num_iterations)
    steps = config.run.max_steps or epoch_steps(config, rows)
    if steps is None or spg is None or spg.denominator != 1:
        return
    updates = int(spg) * config.batch.num_iterations
    rollouts = -(-steps // updates)
    q |= {"max_steps": steps, "num_rollouts": rollouts}
    if gen := q.get("generation_batch_size"):
        q["num_completions"] = rollouts * gen
    if rows and prompts is not None:
        q["num_epochs"] = Fraction(rollouts * prompts, rows)


def quantity_text(value: float) -> str:
    """Return a quantity as pages show it: whole numbers with separators, others with six digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def fill_in_sources(plan: PlanBuilder) -> None:
    """Fill in what a run has of each source, where their sizes can be known."""
    config, data = plan.config, plan.config.data
    if not data.sources or plan.rows_given is None:
        return
    from gspo_hpc.data.sources.mixing import draws_after, most_of, weights_of  # only here: most configs have no sources
    from gspo_hpc.data.sources.sizes import sizes

    found = sizes(data, config.run.seed, WHOLE_FILE_BYTES)
    if found is None or not all(found.values()) or [*found] != [one.name for one in data.sources]:
        return
    weights = weights_of(data, found)
    prompts, rollouts = plan.quantities.get("num_rollout_prompts"), plan.quantities.get("num_rollouts")
    whole = None if prompts is None or prompts.denominator != 1 else int(prompts)
    draws = None if whole is None or rollouts is None else draws_after(weights, int(rollouts) * whole)
    kept = {name: trained_rows(count, data) for name, count in found.items()}
    plan.sources = tuple(
        SourceShare(
            name,
            count,
            weights[place] / math.fsum(weights),
            None if whole is None else most_of(weights, place, whole),
            None if draws is None else draws[place],
            None if draws is None or not count else draws[place] / count,
        )
        for place, (name, count) in enumerate(kept.items())
    )


def max_steps(
    num_prompts: int,
    num_generations: int,
    per_device_batch_size: int,
    dp_size: int,
    gradient_accumulation_steps: int,
    num_iterations: int = 1,
    train_share: float = 1.0,
) -> int:
    """Return the optimizer steps of one epoch.

    Each rank makes num_prompts x num_generations / (per_device_batch_size x dp_size) x train_share micro-steps, and
    gradient_accumulation_steps of them are a step, num_iterations times over. An incomplete last step does not count.
    """
    micro_steps = Fraction(num_prompts * num_generations, per_device_batch_size * dp_size)
    micro_steps *= Fraction(str(train_share))  # 0.99 is 99/100, not the nearest binary number
    return math.floor(micro_steps / gradient_accumulation_steps * num_iterations)


def epoch_steps(config: Config, rows: int | None) -> int | None:
    """Return the optimizer steps of run.max_epochs over `rows` prompts that are trained on; None if not known.

    An incomplete last step does not count, and a run has at least one.
    """
    batch, epochs = config.batch, config.run.max_epochs
    if epochs is None or rows is None or not batch.global_batch_size or not batch.num_generations:
        return None
    completions = rows * batch.num_generations * batch.num_iterations * Fraction(str(epochs))
    return max(1, math.floor(completions / batch.global_batch_size))


def with_steps(config: Config, rows: int | None) -> Config:
    """Return the config with run.max_steps in place of run.max_epochs, where `rows`, those of data.train, are known."""
    steps = None if rows is None else epoch_steps(config, trained_rows(rows, config.data))
    if steps is None or config.run.max_steps is not None:
        return config
    return replace(config, run=replace(config.run, max_steps=steps, max_epochs=None))


def _engines(plan: PlanBuilder) -> None:
    """Fill in the engines of a node, and the GPUs that server mode sets apart for them."""
    cluster, rollout = plan.config.cluster, plan.config.rollout
    gpus, tp, engines = cluster.gpus_per_node, rollout.tensor_parallel_size, engines_per_node(plan.config)
    of_engines, each = plan.config.gpus_per_engine_node, plan.config.gpus_per_engine
    over = tp // of_engines if tp > of_engines else 1  # nodes that an engine reaches over
    plan.layout |= {"nodes": cluster.nodes, "gpus_per_node": gpus}
    plan.layout |= {"reward_model_gpus_per_engine": each - tp} if each > tp else {}
    if plan.server and cluster.generation_nodes:
        plan.layout["generation_nodes"] = cluster.generation_nodes
        plan.layout |= {"generation_gpus_per_node": of_engines} if of_engines != gpus else {}
        plan.world = plan.config.world_size or None
        plan.layout |= {
            "engines_per_node": engines,
            "num_engines": engines * cluster.generation_nodes // over,
            "rollout_tensor_parallel_size": tp,
        }
        plan.layout |= {"nodes_per_engine": over} if over > 1 else {}
        return
    if plan.server and rollout.engines_per_node is None:
        plan.world = None
        return
    if plan.server:
        left = gpus - engines * each
        plan.world = cluster.nodes * left if left > 0 else None
        plan.layout["gpus_set_apart_per_node"] = engines * each
    plan.layout |= {
        "engines_per_node": engines,
        "num_engines": engines * cluster.nodes // over,
        "rollout_tensor_parallel_size": tp,
    }
    plan.layout |= {"nodes_per_engine": over} if over > 1 else {}


def _grid(plan: PlanBuilder) -> None:
    """Fill in how the training GPUs are cut into ranks."""
    sizes = plan.config.parallel
    tp, pp, cp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size, sizes.context_parallel_size
    ep, etp = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size or tp
    plan.layout |= {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if (layers := getattr(sizes, name)) is not None:
            plan.layout[name] = layers
    if (world := plan.world) is None:
        return
    plan.quantities["world_size"] = world
    if world % (tp * pp * cp) == 0:
        plan.dp = world // (tp * pp * cp)
        plan.quantities["dp_size"] = plan.layout["data_parallel_size"] = plan.dp
    if world % (etp * ep * pp) == 0:
        expert_dp = world // (etp * ep * pp)
        plan.quantities["expert_dp_size"] = plan.layout["expert_data_parallel_size"] = expert_dp


def _batch(plan: PlanBuilder) -> None:
    """Fill in the sizes of an update and of a rollout."""
    batch, q, dp, world = plan.config.batch, plan.quantities, plan.dp, plan.world
    gbs, mbs, gen, spg = (
        batch.global_batch_size,
        batch.micro_batch_size,
        batch.generation_batch_size,
        batch.steps_per_generation,
    )
    steps = spg or (Fraction(gen, gbs) if gen and gbs else 1 if gen is None else None)
    gen = gen or (gbs * (spg or 1) if gbs else None)
    known = {
        "micro_batch_size": mbs,
        "micro_batch_tokens": batch.micro_batch_tokens,
        "global_batch_size": gbs,
        "steps_per_generation": steps,
        "generation_batch_size": gen,
        "num_generations": batch.num_generations,
        "num_iterations": batch.num_iterations,
    }
    q |= {name: value for name, value in known.items() if value is not None}
    if gbs and mbs and dp:
        q["gradient_accumulation_steps"] = Fraction(gbs, mbs * dp)
    if gen and world:
        q["per_device_generation_batch_size"] = Fraction(gen, world)


def _prompts(plan: PlanBuilder) -> None:
    """Fill in prompts per rollout, per update and per DP group."""
    batch, q, dp = plan.config.batch, plan.quantities, plan.dp
    gbs, mbs, group = batch.global_batch_size, batch.micro_batch_size, batch.num_generations
    gen = q.get("generation_batch_size")
    if not group or not gen:
        return
    prompts = q["num_rollout_prompts"] = Fraction(gen, group)
    if gbs:
        q["num_train_prompts"] = Fraction(gbs, group)
    if plan.server or dp is None:  # prompts belong to no DP group
        return
    per_group = q["num_rollout_prompts_per_dp_group"] = prompts / dp
    if mbs:
        q["num_iters_per_step"] = per_group / mbs
    if gbs:
        q["num_prompts_per_dp_group"] = Fraction(gbs, group * dp)
