"""Warnings and notes of a plan: settings that are allowed but hardly meant, and what you should know besides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from gspo_hpc.algorithms import objective
from gspo_hpc.config.derived import (
    engine_dtype,
    older_weights_sample,
    samples_part_of_distribution,
    trains_adapters,
    updates_per_rollout,
)
from gspo_hpc.config.engine_arguments import VLLM_ARGUMENTS
from gspo_hpc.config.section import written
from gspo_hpc.planning import learnable
from gspo_hpc.planning.builder import PlanBuilder, show
from gspo_hpc.planning.rules.engine_arguments import lacks, of_this_version, slip_of
from gspo_hpc.planning.rules.model import longest_of_versions
from gspo_hpc.system.text import nearest

_RECOMPUTED_BY = {"full": ("recompute_method", "recompute_num_layers"), "selective": ("recompute_modules",)}


def add(plan: PlanBuilder) -> None:
    """Add the warnings and notes that follow from a plan's config and quantities."""
    plan.warnings += _warnings(plan)
    plan.notes += _notes(plan)
    if any(term.function == "judge" for term in plan.config.reward.functions):
        from gspo_hpc.planning import judges  # only here: most runs have none

        plan.notes += judges.notes(plan)


def _warnings(plan: PlanBuilder) -> Iterator[str]:
    cluster, memory, parallel = plan.config.cluster, plan.config.memory, plan.config.parallel
    gpus, tp, pp = cluster.gpus_per_node, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    used = plan.layout.get("engines_per_node", gpus) * plan.config.rollout.tensor_parallel_size
    used //= plan.layout.get("nodes_per_engine", 1)
    if not plan.server and used < gpus and cluster.platform == "cuda":
        yield f"{gpus - used} of {gpus} GPUs of every node are idle during generation"
    if tp > gpus:
        yield f"tensor_model_parallel_size ({tp}) reaches across nodes: keep it within one node"
    if pp > 4 and memory.recompute_granularity is None:
        yield (
            f"pipeline_model_parallel_size ({pp}) is above 4, and the first stage keeps the activations of up to {pp} "
            f"micro-batches: set memory.recompute_granularity=full"
        )
    if (staleness := plan.config.rollout.max_staleness) > 1 and plan.server:
        yield (
            f"rollout.max_staleness ({staleness}) above 1 makes completions older and nothing faster: engines begin a "
            "rollout when the one before has ended"
        )
    rollout = plan.config.rollout
    waits = plan.server and rollout.max_staleness and not rollout.in_flight_updates  # a save, for the rollout ahead
    updates = updates_per_rollout(plan.config.batch) if waits else 0
    if updates and plan.config.checkpoint.interval > updates:
        yield (
            f"checkpoint.interval ({plan.config.checkpoint.interval}) is above the updates of a rollout ({updates}): "
            "with rollout.max_staleness above 0 a run that is stopped goes on from its last checkpoint, because "
            f"nothing can be saved while a rollout is sampled ahead: set checkpoint.interval={updates}"
        )
    yield from _inert_correction(plan)
    yield from _positions_of_versions(plan)
    yield from _inert_sampling(plan)
    yield from _inert_retirement(plan)
    yield from _inert_curriculum(plan)
    for one in plan.sources:
        if one.draws == 0:
            yield f"data.sources: the run draws no prompt of source {one.name}: give it more weight, or leave it out"
    yield from _inert_recomputation(plan)
    yield from learnable.warnings(plan)
    faults = plan.config.faults
    if faults.engine_timeout >= faults.hang_timeout:
        yield (
            f"faults.engine_timeout ({faults.engine_timeout:g} s) is not below faults.hang_timeout "
            f"({faults.hang_timeout:g} s): an engine that hangs ends the attempt before it can be replaced"
        )
    for name in plan.config.rollout.engine:
        if name not in VLLM_ARGUMENTS and slip_of(name) is None and not lacks(name):  # a rule speaks of the others
            near = nearest(name, sorted(VLLM_ARGUMENTS.intersection(of_this_version())))
            hint = f" (nearest: {near})" if near else ""
            yield f"rollout.engine.{name} is no argument of vLLM 0.32{hint}: a version that does not know it refuses it"
    try:
        yield from objective.warnings(plan.config)
    except ValueError:  # a rule says so
        return


def _notes(plan: PlanBuilder) -> Iterator[str]:
    batch, q = plan.config.batch, plan.quantities
    if batch.micro_batch_tokens and not batch.micro_batch_size:
        yield (
            "Packing fills each micro-batch with up to micro_batch_tokens tokens, so rules on how many prompts make "
            "whole micro-batches do not apply."
        )
    if plan.server and "num_rollout_prompts" in q:
        yield "GPUs set apart generate, and no DP group owns prompts: rules about prompts per DP group do not apply."
    if trains_adapters(plan.config):
        from gspo_hpc.planning import trained  # only here: most plans have no adapters

        yield f"{trained.adapter(plan.config)} is trained; {trained.in_engines(plan.config)}."
        moe = plan.config.moe
        if given := [f"moe.{name}" for name in ("aux_loss_coeff", "z_loss_coeff") if getattr(moe, name)]:
            yield (
                f"With adapters the routers are frozen, and {' and '.join(given)} cannot move them: what is added to "
                "the loss reaches only adapters on layers before a router, through its input."
            )
    if plan.model_file.note:
        yield plan.model_file.note
    if plan.config.algorithm.has_teacher and (note := plan.models.file(plan.config.algorithm.teacher).note):
        yield f"The teacher: {note}"
    for model in plan.config.reward.models:
        if note := plan.models.file(model.path).note:
            yield f"The reward model {model.name}: {note}"
    if (arch := plan.architecture) is not None and arch.about:
        yield f"Not all of this model is counted exactly: {arch.about}."
    if samples_part_of_distribution(plan.config.rollout):
        yield (
            "rollout.top_p and rollout.top_k leave unlikely tokens out of the rollout. Ratios, gaps and entropy are "
            "those of the whole distribution, in engines and trainer alike; the objective does not correct for the cut."
        )
    tp, vocabulary = plan.config.parallel.tensor_model_parallel_size, plan.model_file.size("vocab_size")
    heads = plan.model_file.kv_heads
    if heads is not None and tp > heads and tp % heads == 0:
        yield (
            f"The model has fewer key-value heads ({heads}) than tensor_model_parallel_size ({tp}): {tp // heads} "
            "ranks compute with each, and in every layer all ranks gather queries, keys and values."
        )
    if vocabulary is not None and vocabulary % tp:
        padded = -(-vocabulary // tp) * tp
        yield f"vocab_size ({vocabulary}) is padded to {padded} rows, a multiple of tensor_model_parallel_size ({tp})."
    yield from _other_bytes(plan)
    yield from _older_kernels(plan)
    yield from objective.notes(plan.config)
    yield from _dynamic_sampling(plan)
    yield from _retirement(plan)
    yield from _curriculum(plan)
    yield from _ends(plan)


def _other_bytes(plan: PlanBuilder) -> Iterator[str]:
    """Yield that estimates leave aside what engines keep in other formats than the one in which they compute."""
    engine, dtype = plan.config.rollout.engine, engine_dtype(plan.config)
    cached = engine.get("kv_cache_dtype")
    given = [f"rollout.engine.kv_cache_dtype ({cached})"] if cached not in (None, "auto", dtype) else []
    if (method := engine.get("quantization")) is not None:
        given.append(f"rollout.engine.quantization ({method})")
    if given:
        verb = "are" if len(given) > 1 else "is"
        yield (
            f"{' and '.join(given)} {verb} not counted: memory and time of generation are those of weights and a cache "
            f"in {dtype}, so an engine may hold more tokens than this plan says, and take less time for each."
        )


def _older_kernels(plan: PlanBuilder) -> Iterator[str]:
    """Yield that GPUs before Ampere compute attention by other kernels than those that estimates count with."""
    if plan.config.cluster.gpu is None:
        return
    from gspo_hpc.planning.estimates import devices  # only here: most plans name newer GPUs, or none

    if (found := devices.before_ampere(plan.config.cluster)) is not None:
        name, (major, minor) = found
        others = "this plan does not count how much slower other attention is."
        if (major, minor) >= (7, 5):  # engines run on no older one
            others = (
                "engines take vLLM's attention in Triton (before 0.24 with "
                "rollout.engine.attention_backend=TRITON_ATTN), the trainer torch's, and this plan counts neither as "
                "slower."
            )
        needs = "FlashAttention needs GPUs of compute capability 8.0 or newer"
        yield f"{needs}, and {name} has {major}.{minor}: {others}"
        if plan.config.model.dtype == "float32":
            yield (
                f"The update in float32 is timed as if it were in 16 bits; {name} multiplies eight times as fast in "
                "these."
            )


def _positions_of_versions(plan: PlanBuilder) -> Iterator[str]:
    """Yield that not every version of vLLM takes sequences as long, where it is not known which one will run."""
    found, longest = longest_of_versions(plan), plan.longest_sequence
    if found is None or not min(one.length for one in found) < longest <= max(one.length for one in found):
        return
    from gspo_hpc.planning import installed  # only here: most models have the same bound for every version

    if installed.yarn_scales() is None:
        later, earlier = found
        takes = f"vLLM takes up to {earlier.length} in versions to 0.29, and {later.length} in 0.32 and later ones"
        yield f"max_prompt_length + max_response_length = {longest}: {takes}, which leave the factor of yarn aside"


def _inert_recomputation(plan: PlanBuilder) -> Iterator[str]:
    """Yield the settings of recomputation that are given where nothing, or something else, is recomputed."""
    memory = plan.config.memory
    for granularity, names in _RECOMPUTED_BY.items():
        for name in names if memory.recompute_granularity != granularity else ():
            if (value := getattr(memory, name)) != type(memory).model_fields[name].default:
                shown = written(value)
                yield f"memory.{name} ({shown}) changes nothing without memory.recompute_granularity={granularity}"


def _inert_correction(plan: PlanBuilder) -> Iterator[str]:
    """Yield a correction of a gap that is not measured."""
    config = plan.config
    if config.algorithm.correction not in ("none", "bypass") and older_weights_sample(config):
        yield (
            f"algorithm.correction ({config.algorithm.correction}) changes nothing where older weights sample: the "
            "engine's log-probs are the old ones, so no gap is measured"
        )


def _inert_sampling(plan: PlanBuilder) -> Iterator[str]:
    """Yield the settings of dynamic sampling, and of rollouts that end early, that are given without these."""
    rollout = plan.config.rollout
    waits = rollout.unfinished == "wait"
    needed = {
        "max_num_gen_batches": "" if rollout.dynamic_sampling else "rollout.dynamic_sampling",
        "dynamic_sampling_metric": "" if rollout.dynamic_sampling else "rollout.dynamic_sampling",
        "oversampling_factor": "rollout.dynamic_sampling" if waits and not rollout.dynamic_sampling else "",
        "max_continuations": "" if rollout.unfinished == "continue" else "rollout.unfinished=continue",
    }
    for name, setting in needed.items():
        if setting and (value := getattr(rollout, name)) != type(rollout).model_fields[name].default:
            yield f"rollout.{name} ({value}) changes nothing without {setting}"


def _dynamic_sampling(plan: PlanBuilder) -> Iterator[str]:
    """Yield what dynamic sampling does to numbers that are not known before the run, or that it is part of a recipe."""
    rollout, q, rows = plan.config.rollout, plan.quantities, plan.rows
    if not rollout.dynamic_sampling:
        if plan.config.algorithm.name == "dapo":
            yield (
                "DAPO's recipe also replaces groups without signal, which is off here: rollout.dynamic_sampling=true "
                "turns it on."
            )
        return
    prompts = q.get("num_rollout_prompts")
    if prompts is None or prompts.denominator != 1:
        return
    most = int(prompts) * rollout.max_num_gen_batches
    yield (
        f"With dynamic sampling a rollout draws {int(prompts):,} to {most:,} prompts, as rewards decide: max_epochs "
        "counts steps as if no group were replaced, and epochs, completions, time and cost are the least that may come."
    )
    if rows is not None and prompts <= rows < 2 * most:
        yield (
            f"A rollout may draw {most:,} prompts of {rows:,}: beyond {max(int(prompts), rows // 2):,} of them a "
            "prompt may come again in one rollout, with other seeds."
        )


def _inert_retirement(plan: PlanBuilder) -> Iterator[str]:
    """Yield that prompts are retired in vain where no prompt comes a second time."""
    rate, epochs = plan.config.data.no_resampling_pass_rate, plan.quantities.get("num_epochs")
    if rate is not None and epochs is not None and epochs <= 1 and not plan.config.rollout.dynamic_sampling:
        yield (
            f"data.no_resampling_pass_rate ({rate:g}) changes nothing: the run ends within its first pass over the "
            "data, and prompts are left out of later ones"
        )


def _inert_curriculum(plan: PlanBuilder) -> Iterator[str]:
    """Yield that prompts are weighed in vain where no prompt comes a second time, and no pass rates are known."""
    data, epochs = plan.config.data, plan.quantities.get("num_epochs")
    again = plan.config.rollout.dynamic_sampling or any((one.epochs or 0) > 1 for one in plan.sources)
    if data.curriculum_floor is not None and data.curriculum_key is None and epochs is not None and epochs <= 1:
        if not again:
            yield (
                f"data.curriculum_floor ({data.curriculum_floor:g}) changes nothing: the run ends within its first "
                "pass over the data, and no data.curriculum_key says how hard prompts are before it"
            )


def _curriculum(plan: PlanBuilder) -> Iterator[str]:
    """Yield what a curriculum does to numbers that are not known before the run."""
    floor = plan.config.data.curriculum_floor
    if floor is not None:
        yield (
            f"Prompts of which a pass rate p is known are drawn with the chance 4p(1 - p), at least {floor:g}: passes "
            "over the data become shorter, and max_epochs counts steps as if every prompt came in each."
        )


def _retirement(plan: PlanBuilder) -> Iterator[str]:
    """Yield what retired prompts do to numbers that are not known before the run."""
    rate, group = plan.config.data.no_resampling_pass_rate, plan.config.batch.num_generations
    if rate is None:
        return
    right = "" if group is None else f", {math.ceil(Fraction(str(rate)) * group)} of the {group} completions of a group"
    prompts = plan.quantities.get("num_rollout_prompts")
    fewest = "a rollout needs" if prompts is None else f"the {show(prompts)} of a rollout"
    yield (
        f"Prompts are retired at a pass rate of {rate:g}{right}: epochs become shorter as the run goes on, max_epochs "
        f"counts steps as if none was retired, and the run ends before max_steps if fewer than {fewest} are left."
    )


def _ends(plan: PlanBuilder) -> Iterator[str]:
    """Yield what becomes of rollouts that are cut off by the end of the data or of the run."""
    config, q, rows, spg = plan.config, plan.quantities, plan.rows, plan.quantities.get("steps_per_generation")
    prompts = None if config.rollout.dynamic_sampling or config.data.sources else q.get("num_rollout_prompts")
    if rows is not None and prompts is not None and prompts.denominator == 1 and rows >= prompts:
        if rest := rows % int(prompts):
            yield (
                f"An epoch of {rows} prompts ends inside a rollout of {prompts}: its last {rest} prompts are carried "
                "over into a rollout with the first of the next epoch; none is dropped."
            )
    steps = q.get("max_steps")
    if steps is None or spg is None or spg.denominator != 1:
        return
    updates = int(spg) * config.batch.num_iterations
    if rest := int(steps) % updates:
        yield (
            f"max_steps ({steps}) ends the run after {rest} of the {updates} updates of the last "
            "rollout; its other completions are left unused."
        )
