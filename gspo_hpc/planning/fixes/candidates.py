"""Candidate values of each setting that may fix a refused plan.

They follow from the rules: a batch size must be a multiple of something, a parallel size a divisor of something, and of
such numbers those around the present one and around the bounds are enough. Nothing here takes longer for larger
numbers. Whether a candidate is a fix is checked in search.py.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from gspo_hpc.config.constants import LORA_RANKS, MOST_GPUS_PER_NODE, USUAL_GPUS_PER_NODE
from gspo_hpc.config.derived import samples_part_of_distribution
from gspo_hpc.config.engine_arguments import ENGINE_DEFAULTS
from gspo_hpc.config.schema import Config, highest, keys
from gspo_hpc.data.counting import ANSWER_FIELDS, PROMPT_FIELDS, prompt_field
from gspo_hpc.models import architecture, catalog
from gspo_hpc.models.adapter_table import ALL, EMBEDDING
from gspo_hpc.planning import divisions
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.estimates import devices
from gspo_hpc.planning.rules import adapter
from gspo_hpc.planning.rules.engine_arguments import meant
from gspo_hpc.planning.rules.ids import Topic
from gspo_hpc.planning.rules.model import RECOMPUTED, longest_here
from gspo_hpc.planning.rules.objective import longest_of_teacher
from gspo_hpc.planning.settings import ENGINE, divisors
from gspo_hpc.system.text import nearest

LENGTHS = ("rollout.max_response_length", "rollout.max_prompt_length")
_OF_LENGTHS = (Topic.OTHER, Topic.SEQUENCES, Topic.MEMORY)  # topics in which the longest sequence may have a part
_RACK = re.compile(r"(?i)gb[-_ ]?[23]00")  # names of GPUs that come in racks
_PARTS_OF_JOB = 3  # of which a job that is proposed leaves one for its end
_BUDGETS = ("micro_batch_tokens", "logprob_micro_batch_tokens", "reference_micro_batch_tokens")


def candidates(config: Config, plan: PlanBuilder, topics: frozenset[Topic], rows: int | None) -> dict[str, set[Any]]:
    """Return the values that are worth a try, by setting; the present one may be among them.

    `plan` is that of the config, `topics` those of its broken rules.
    """
    found = _batch_sizes(config, plan, rows) | _layouts(config, plan)
    prompt, response = config.rollout.max_prompt_length, config.rollout.max_response_length
    for name in _BUDGETS:
        if getattr(config.batch, name):
            found.setdefault(f"batch.{name}", set()).update({prompt + response, None})
    for topic, values_for in ((Topic.MEMORY, lighter), (Topic.ENGINE_ARGUMENTS, _engine)):
        for key, values in values_for(config).items() if topic in topics else ():
            found.setdefault(key, set()).update(values)
    if topics.intersection(_OF_LENGTHS):
        found |= _lengths(config, plan)
    if Topic.OTHER in topics:
        found |= _recomputed(config, plan) | _stages(config, plan) | _prompt_keys(config, plan) | _signals(config)
        if config.adapter.type is not None:  # steps that people use, those that vLLM has room for among them
            found["adapter.rank"] = {*LORA_RANKS, *_powers(config.adapter.rank)}
            found["adapter.targets"] = _targets(config)
    possible = {key: {value for value in values if _possible(key, value)} for key, values in found.items()}
    for key, values in _switches(config).items():  # whose values are known to be taken, -1 for all among them
        possible.setdefault(key, set()).update(values)
    return possible


def _targets(config: Config) -> set[Any]:
    """Return the layers that are meant by adapter.targets, and these without the embedding; or all."""
    named = adapter.meant(config.adapter.targets)
    return {one for one in (named, tuple(name for name in named if name != EMBEDDING)) if one} or {(ALL,)}


def finer_utilization() -> set[float]:
    """Return shares of a card in steps of a hundredth, for cards of which every twentieth is too much or too little."""
    return {round(share / 100, 2) for share in range(10, 98)}


def models(config: Config) -> set[str]:
    """Return the known models that are trained, as paths beside the config's own or as names on the Hub.

    Of models that have the sizes of another one, those that have the name of the config's own but for the size.
    """
    path = config.model.path
    if not path or not Path(path).name:
        return set()
    line = (name for name in catalog.variants() if catalog.kinship(path, name) is catalog.Kinship.LINE)
    return {catalog.beside(path, name) for name in (*catalog.names(), *line) if _is_trained(name)}


@cache
def _is_trained(name: str) -> bool:
    return catalog.content(name)["architectures"][0] in architecture.SUPPORTED


def _possible(key: str, value: Any) -> bool:
    """Return whether a config takes a value: small rollouts can lead to sizes of 0, wide grids to huge ones."""
    if isinstance(value, bool) or not isinstance(value, int):
        return True
    return 0 < value and (key.startswith(ENGINE) or value <= highest(key))


def _multiples(unit: int, *around: int | None) -> set[int]:
    """Return multiples of `unit`: those on both sides of each number, and the first two."""
    found = {unit, 2 * unit}
    for number in around:
        if number is not None:
            found |= {unit * (number // unit + step) for step in (-1, 0, 1, 2)}
    return {value for value in found if value > 0}


def _powers(most: int) -> set[int]:
    """Return the powers of two that are not above `most`."""
    return {1 << exponent for exponent in range(most.bit_length())}


def _lengths(config: Config, plan: PlanBuilder) -> dict[str, set[Any]]:
    rollout, cp = config.rollout, config.parallel.context_parallel_size
    prompt, response, unit = rollout.max_prompt_length, rollout.max_response_length, 2 * cp
    # Values that are only a little longer or shorter are for a length that ranks do not divide.
    lengths = _multiples(unit, prompt + response) if (prompt + response) % unit else set[int]()
    limits: set[int] = {getattr(config.batch, name) for name in _BUDGETS if getattr(config.batch, name)}
    limits |= _positions(plan)
    lengths |= limits | {limit // unit * unit for limit in limits}

    def shorter(part: int, other: int) -> set[int]:
        """Return values of one of both, beside the other: for these lengths, and halved again and again."""
        halved = {(other + (part >> times)) // unit * unit for times in range(1, 16)}
        return {length - other for length in lengths | halved if length > other}

    return {
        "rollout.max_response_length": shorter(response, prompt),
        "rollout.max_prompt_length": shorter(prompt, response),
    }


def _positions(plan: PlanBuilder) -> set[int]:
    """Return the longest sequence of the model and of its teacher, as far as they can be known."""
    return {longest.length for longest in (longest_here(plan), longest_of_teacher(plan)) if longest is not None}


def _batch_sizes(config: Config, plan: PlanBuilder, rows: int | None) -> dict[str, set[Any]]:
    batch = config.batch
    found: dict[str, set[Any]] = {}
    gbs, group, mbs = batch.global_batch_size, batch.num_generations, batch.micro_batch_size
    gen, spg = batch.generation_batch_size, batch.steps_per_generation
    world, dp = plan.world or 1, plan.dp or 1
    size, groups, count = mbs or 1, group or 1, spg or 1
    whole = math.lcm(groups * dp * size, groups, size * dp)  # a rollout of this many keeps every rule of divisibility
    step = math.lcm(groups, size * dp)  # and an update where no DP group owns prompts
    if config.rollout.mode != "server" and mbs:
        step = whole
    if not mbs:  # packing deals the completions of an update to the ranks, however many there are
        step = groups
    most = rows * groups if rows is not None else None  # completions that the data has prompts for
    if gbs is not None:
        loose = math.lcm(step, groups * dp // math.gcd(groups * dp, count))
        for unit in {step, loose, size * dp}:
            bounds = (gbs, -(-world // count), -(-groups * dp // count), None if most is None else most // count)
            found.setdefault("batch.global_batch_size", set()).update(_multiples(unit, *bounds))
        if gen is not None:
            found["batch.global_batch_size"].update(divisors(gen))
            if spg:
                found["batch.global_batch_size"].update({gen // spg})
        needed = whole // math.gcd(whole, gbs)
        found["batch.steps_per_generation"] = _multiples(
            needed, spg, -(-world // gbs), None if most is None else most // gbs
        ) | ({1} if gen is None else {1, None})  # null is 1 where nothing else gives the size of a rollout
        if gen is not None:
            found["batch.steps_per_generation"].add(max(1, gen // gbs))
        found["batch.num_generations"] = {n for n in divisors(gbs) if n >= 2}
    if gen is not None:
        unit = math.lcm(whole, gbs or 1)
        found["batch.generation_batch_size"] = _multiples(unit, gen, world, most) | {None}
        if gbs and spg:
            found["batch.generation_batch_size"].add(gbs * spg)
    if mbs is not None:
        found["batch.micro_batch_size"] = {1, *divisors(gbs or mbs), *((None,) if batch.micro_batch_tokens else ())}
    return found


def _layouts(config: Config, plan: PlanBuilder) -> dict[str, set[Any]]:
    cluster, parallel = config.cluster, config.parallel
    gpus = cluster.gpus_per_node
    world = plan.world or cluster.nodes * gpus
    # Powers of two are for other machines, as large as usual ones, where the number of GPUs of a node is wrong, too.
    sizes = {*divisors(world), *_powers(max(world, cluster.nodes * USUAL_GPUS_PER_NODE))}
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    found: dict[str, set[Any]] = {f"parallel.{name}_parallel_size": set(sizes) for name in names}
    found["parallel.expert_tensor_parallel_size"] = {None, *divisors(gpus)}  # experts are not cut over nodes
    if parallel.virtual_pipeline_model_parallel_size is not None:
        found["parallel.virtual_pipeline_model_parallel_size"] = {None, 2, 3, 4}
    # An engine may have the size of a usual node, also where the number of GPUs of a node is wrong, too.
    theirs = config.gpus_per_engine_node
    engine = {*divisors(theirs), *_powers(max(theirs, USUAL_GPUS_PER_NODE))}
    if config.rollout.mode == "server":  # what engines take is left to the ranks that train: any size may suit these
        engine |= {*range(1, min(theirs, USUAL_GPUS_PER_NODE) + 1)}
    found["rollout.tensor_parallel_size"] = engine
    found["rollout.engines_per_node"] = {None, *range(1, theirs + 1)}
    if cluster.generation_gpus_per_node is not None:
        found["cluster.generation_gpus_per_node"] = {None, *range(1, 17)}
    found["rollout.mode"] = {"colocate", "server"}
    # As many nodes, or GPUs on each, as make whole grids, and as many DP groups as prompts can be dealt to.
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    attention = tp * pp * parallel.context_parallel_size
    experts = (parallel.expert_tensor_parallel_size or tp) * parallel.expert_model_parallel_size * pp
    apart = plan.layout.get("gpus_set_apart_per_node", 0)
    each = max(1, gpus - apart)
    grid = math.lcm(attention, experts)
    present = max(1, config.training_nodes)
    nodes = _multiples(grid // math.gcd(grid, each), present)  # that train
    training = _multiples(grid // math.gcd(grid, present), each)  # GPUs of a node
    gbs = config.batch.global_batch_size
    prompts = plan.quantities.get("num_rollout_prompts", 0)
    for number in {gbs or 0, int(prompts)} - {0}:
        worlds = [groups * attention for groups in divisors(number)]
        nodes |= {world // each for world in worlds if world % each == 0}
        training |= {world // present for world in worlds if world % present == 0}
    found["cluster.nodes"] = {cluster.nodes - config.training_nodes + count for count in nodes if count > 0}
    machines = {*range(1, 17), 32, 64, 72} | _multiples(config.rollout.tensor_parallel_size, gpus)
    machines |= {apart + count for count in training if count <= MOST_GPUS_PER_NODE}
    found["cluster.gpus_per_node"] = {count for count in machines if count <= _most_gpus(config)}
    return found


def _most_gpus(config: Config) -> int:
    """Return the GPUs of the largest node that is worth proposing: boards have 8, racks of GB200 and GB300 72.

    Where it is not known which GPUs there are, any number is.
    """
    cluster = config.cluster
    if cluster.platform != "cuda" or cluster.gpu is None or _RACK.search(cluster.gpu):
        return MOST_GPUS_PER_NODE
    return max(8, cluster.gpus_per_node)


def _switches(config: Config) -> dict[str, set[Any]]:
    """Return the other values of settings that have few."""
    parallel = config.parallel
    found: dict[str, set[Any]] = {
        "parallel.sequence_parallel": {not parallel.sequence_parallel},
        "batch.share_prompts": {False},
        "model.dtype": {"bfloat16"},
        "model.layers": {"auto", "torch"},
        "model.provider": {"own"},
        "moe.router_replay": {"off", "old_logprobs"},
        "moe.token_dispatcher": {"alltoall"},
        "moe.router_dtype": {"float32"},
    }
    if config.model.fp8:
        found["model.fp8"] = {None}
    if samples_part_of_distribution(config.rollout):
        found |= {"rollout.temperature": {1.0}, "rollout.top_p": {1.0}, "rollout.top_k": {-1}}
    if config.rollout.dtype:
        found["rollout.dtype"] = {None}
    if parallel.overlap_param_gather:
        found |= {
            "parallel.overlap_param_gather": {False},
            "parallel.overlap_grad_reduce": {True},
            "optimizer.distributed": {True},
        }
    found = {key: values for key, values in found.items() if _is_set(config, key)}
    if devices.before_ampere(config.cluster) is not None:  # for which the default is not made
        found["model.dtype"] = {"float16", "float32"}
    for name, field in type(config.algorithm).model_fields.items():  # back to the default
        if name != "name" and getattr(config.algorithm, name) != field.default:
            found[f"algorithm.{name}"] = {field.default}
    return found


def lighter(config: Config) -> dict[str, set[Any]]:
    """Return values that take less memory of a GPU or of a node."""
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    found: dict[str, set[Any]] = {
        "memory.recompute_granularity": {"full"},
        "memory.offload_optimizer": {True},
        "memory.offload_trainer": {True},
        "optimizer.distributed": {True},
        "optimizer.grad_reduce_in_fp32": {False},
        "rollout.sleep_level": {2},
        "checkpoint.async_save": {False},
    }
    found |= {
        key: {field.default} for key, field in keys().items() if key.startswith("memory.") and _is_set(config, key)
    }
    parts = set(config.memory.offload_parts)
    whole: tuple[str, ...] = keys()["memory.offload_parts"].default
    if not parts.issuperset(whole):  # moving more leaves more, and all of it is what nobody has touched
        more = ({*parts, part} for part in whole if part not in parts)
        found["memory.offload_parts"] = {whole, *(tuple(part for part in whole if part in some) for some in more)}
    if tokens := config.batch.micro_batch_tokens:
        found["batch.micro_batch_tokens"] = {longest, *(max(longest, tokens // part) for part in (2, 4, 8))}
    if config.slurm.mem:
        found["slurm.mem"] = {"0"}  # all of the node; without it Slurm gives what the cluster's default is
    found["cluster.gpu"] = {device.name for device in devices.offered(config.cluster)}
    if config.cluster.gpu_memory_gb is not None:  # which counts before the name
        found["cluster.gpu_memory_gb"] = set(devices.sold_sizes())
    if devices.is_like_none(str(config.cluster.gpu)):  # another GPU than the one that is there is no fix
        found["cluster.gpu"] = {None}
    found[f"{ENGINE}gpu_memory_utilization"] = {round(share / 100, 2) for share in range(10, 100, 5)}
    batched = int(ENGINE_DEFAULTS["max_num_batched_tokens"])
    for name, usual, least in (("max_num_batched_tokens", batched, 1024), ("max_num_seqs", 256, 32)):
        given = config.rollout.engine.get(name)
        most = given if isinstance(given, int) and given > 0 else usual
        halves = {most >> times for times in range(1, 40)}
        found[ENGINE + name] = {usual, *(value for value in halves if value >= least)}
    return found


def _engine(config: Config) -> dict[str, set[Any]]:
    """Return values that vLLM would take: what is meant, its own default, or the bound that two arguments share."""
    given = config.rollout.engine
    found: dict[str, set[Any]] = {f"{ENGINE}{key}": {None, *meant(key, value)} for key, value in given.items()}
    for key, default in ENGINE_DEFAULTS.items():
        if key in given:
            found[ENGINE + key].add(default)
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    tokens, sequences = (given.get(f"max_num_{name}") for name in ("batched_tokens", "seqs"))
    if isinstance(tokens, int) and isinstance(sequences, int):
        found[f"{ENGINE}max_num_seqs"] |= {tokens}
        found[f"{ENGINE}max_num_batched_tokens"] |= {sequences}
    if isinstance(tokens, int) and given.get("enable_chunked_prefill") is False:
        found[f"{ENGINE}max_num_batched_tokens"] |= {longest, max(longest, sequences or 0)}
    return found


def _recomputed(config: Config, plan: PlanBuilder) -> dict[str, set[Any]]:
    """Return modules and numbers of layers that Megatron can compute again."""
    memory, found = config.memory, dict[str, set[Any]]()
    if memory.recompute_modules != ("core_attn",):
        near = [nearest(name, RECOMPUTED, cutoff=0.0) for name in memory.recompute_modules]
        found["memory.recompute_modules"] = {("core_attn",), tuple(dict.fromkeys(near))}
    if memory.recompute_num_layers > 1:
        arch = plan.models.find(config)
        counts = (divisions.layers_per_stage(arch.num_layers, config.parallel) if arch else None) or [1]
        parts = math.gcd(*counts) // (config.parallel.virtual_pipeline_model_parallel_size or 1)
        found["memory.recompute_num_layers"] = {1, *divisors(max(1, parts))}
    return found


def _stages(config: Config, plan: PlanBuilder) -> dict[str, set[Any]]:
    """Return layers of the first and the last pipeline stage that divide a model whose layers are not divided."""
    layers, parallel = plan.model_file.size("num_hidden_layers"), config.parallel
    keys_of = [f"parallel.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    if not layers or divisions.layers_per_stage(layers, parallel) is not None:
        return {}
    both = divisions.end_candidates(layers, parallel)
    return {key: values | {None} for key, values in zip(keys_of, both, strict=True)}


def _prompt_keys(config: Config, plan: PlanBuilder) -> dict[str, set[Any]]:
    """Return the fields of the training data that may be the prompts', where none has the given name."""
    fields = plan.models.fields(config.data.train) if config.data.train is not None else None
    if fields is None or prompt_field(fields, config.data.prompt_key) is not None:
        return {}
    usual = {name for name in fields if name.lower() in PROMPT_FIELDS}
    alike = nearest(config.data.prompt_key, fields)  # a name that is misspelt, in the data or in the config
    others = {name for name in fields if name.lower() not in ANSWER_FIELDS}  # a model must not be asked the answer
    return {"data.prompt_key": usual or ({alike} if alike is not None else others)}


def _signals(config: Config) -> dict[str, set[Any]]:
    """Return lengths of a job, and how long before its end it stops, with which it works for two thirds of its time."""
    slurm = config.slurm
    if slurm.signal_seconds < slurm.time_minutes * 60:
        return {}
    enough = -(-_PARTS_OF_JOB * slurm.signal_seconds // 60)
    return {"slurm.time_minutes": {enough}, "slurm.signal_seconds": {slurm.time_minutes * 60 // _PARTS_OF_JOB}}


def _is_set(config: Config, key: str) -> bool:
    """Return whether a setting differs from its default.

    Settings that nobody has touched are not in the way, but for sequence_parallel and what overlapping needs.
    """
    if key in ("parallel.sequence_parallel", "parallel.overlap_grad_reduce", "optimizer.distributed"):
        return True
    section, name = key.split(".")
    part = getattr(config, section)
    return bool(getattr(part, name) != keys()[key].default) or key == "batch.share_prompts"
