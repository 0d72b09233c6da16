"""What mends a refused plan: the smallest changes of one setting, then of two, after which every rule holds.

Floor 1. Whether a change mends is asked of the rules themselves, so none that is offered breaks another. Which values
are tried follows from what the rules say of a setting: a batch size must be a multiple of something, a parallel size
a divisor of something, and of such numbers those around the present one and around the bounds are enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from gspo_hpc import model_config
from gspo_hpc.config import Config
from gspo_hpc.plan import MEMORY_RULE, Plan, make_plan
from gspo_hpc.plan_limits import ENGINE_RULE

MAX_OFFERED = 6
_NEAREST = 6  # values of a setting that are tried together with those of another
_LENGTHS = (11, 12)  # the rules that speak of the longest sequence
_ROOM = 1200  # pairs of changes that are looked at: about a quarter of a second

# How much it changes what a run is: the distance of a change is this times the doublings.
_WEIGHTS: dict[str, float] = {
    "optimizer.distributed": 0.4,  # the same numbers, another place
    "memory.recompute_granularity": 0.6,
    "memory.offload_optimizer": 0.8,
    "memory.offload_trainer": 0.8,
    "rollout.sleep_level": 0.5,
    "checkpoint.async_save": 0.8,
    "moe.token_dispatcher": 0.5,
    "optimizer.grad_reduce_in_fp32": 2.5,
    "batch.micro_batch_size": 0.9,  # the same run in other pieces
    "batch.micro_batch_tokens": 0.9,
    "batch.global_batch_size": 1.0,
    "batch.generation_batch_size": 1.0,
    "batch.steps_per_generation": 1.1,
    "batch.num_generations": 1.2,
    "rollout.engines_per_node": 1.3,
    "rollout.tensor_parallel_size": 1.4,
    "rollout.max_prompt_length": 1.6,
    "rollout.max_response_length": 1.5,
    "parallel.sequence_parallel": 0.5,
    "parallel.expert_tensor_parallel_size": 1.7,
    "parallel.expert_model_parallel_size": 1.8,
    "parallel.context_parallel_size": 2.2,
    "parallel.tensor_model_parallel_size": 2.0,
    "parallel.pipeline_model_parallel_size": 2.1,
    "parallel.virtual_pipeline_model_parallel_size": 1.5,
    "cluster.nodes": 3.0,  # what one has is harder to change
}


@dataclass(frozen=True)
class Change:
    """One setting, by its dotted name. `value` None is the default of the setting, written null."""

    key: str
    before: Any
    value: Any

    def __str__(self) -> str:
        shown = "null" if self.value is None else str(self.value).lower()
        return f"{self.key}={shown}"


@dataclass(frozen=True)
class Mend:
    """Changes that belong together."""

    changes: tuple[Change, ...]
    warnings: int = 0  # that the plan has in addition

    def __str__(self) -> str:
        return " ".join(map(str, self.changes))

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values, as `gspo-hpc plan --json` prints them."""
        return [vars(change) for change in self.changes]

    @property
    def distance(self) -> float:
        """0 for no change; every doubling or halving counts by the weight of its setting, and so does a new warning."""
        return sum(_distance(change) for change in self.changes) + 2.0 * self.warnings


def find(config: Config, rows: int | None = None, limit: int = MAX_OFFERED, room: int = _ROOM) -> list[Mend]:
    """Mends of a configuration whose plan is refused, nearest first: of one setting, then of two; none if it is valid.

    `rows` as for make_plan. At most `limit` of each kind; of two changes at most `room` pairs are looked at. Two are
    offered only where neither mends alone.
    """
    plan, missing = make_plan(config, rows), set(config.missing())
    if plan.valid:
        return []
    singles: list[Mend] = []
    firsts: list[tuple[Change, Config, Plan]] = []
    for key, values in _candidates(config, plan, rows).items():
        for number, change in enumerate(_nearest(config, key, values)):
            changed = _with(config, change)
            if not missing.issuperset(changed.missing()):
                continue
            after = make_plan(changed, rows)
            if after.valid:
                singles.append(Mend((change,), _new_warnings(plan, after)))
            elif number < _NEAREST and len(after.broken) <= len(plan.broken):
                firsts.append((change, changed, after))
    singles.sort(key=_order)
    alone = {(mend.changes[0].key, mend.changes[0].value) for mend in singles}
    firsts.sort(key=lambda first: _distance(first[0]))
    pairs: dict[frozenset[tuple[str, Any]], Mend] = {}
    for change, second in itertools.islice(_seconds(firsts, rows, alone), room):
        changed = _with(_with(config, change), second)
        if missing.issuperset(changed.missing()) and (after := make_plan(changed, rows)).valid:
            both = frozenset(((change.key, change.value), (second.key, second.value)))
            pairs.setdefault(both, Mend((change, second), _new_warnings(plan, after)))
    farthest = 2.0 * singles[0].distance if singles else math.inf
    two = [mend for mend in sorted(pairs.values(), key=_order) if mend.distance <= farthest]
    return singles[:limit] + two[:limit]


def _order(mend: Mend) -> tuple[float, str]:
    return mend.distance, str(mend)


def _new_warnings(before: Plan, after: Plan) -> int:
    return max(0, len(after.warnings) - len(before.warnings))


def _seconds(
    firsts: Iterable[tuple[Change, Config, Plan]], rows: int | None, alone: set[tuple[str, Any]]
) -> Iterator[tuple[Change, Change]]:
    for first, changed, plan in firsts:
        for key, values in _candidates(changed, plan, rows).items():
            if key == first.key:
                continue
            for second in itertools.islice(_nearest(changed, key, values), _NEAREST):
                if (second.key, second.value) not in alone:
                    yield first, second


def _with(config: Config, change: Change) -> Config:
    section, name, *inner = change.key.split(".")
    value = change.value
    if inner:  # of a free-form setting, in which None is what is not there
        values = getattr(getattr(config, section), name) | {inner[0]: value}
        value = {key: item for key, item in values.items() if item is not None}
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


def _value(config: Config, key: str) -> Any:
    section, name, *inner = key.split(".")
    value = getattr(getattr(config, section), name)
    return value.get(inner[0]) if inner else value


def _distance(change: Change) -> float:
    weight = _WEIGHTS.get(change.key, 2.0)
    numbers = isinstance(change.value, int) and isinstance(change.before, int)
    if numbers and not isinstance(change.value, bool) and change.before > 0:
        return weight * abs(math.log2(change.value / change.before))
    return weight


def _nearest(config: Config, key: str, values: Iterable[Any]) -> list[Change]:
    before = _value(config, key)
    changes = [Change(key, before, value) for value in set(values) if value != before and _possible(value)]
    return sorted(changes, key=lambda change: (_distance(change), str(change)))


def _possible(value: Any) -> bool:
    """No size is 0 or less: a rollout that is smaller than its updates leads there."""
    return isinstance(value, bool) or not isinstance(value, int) or value > 0


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def _multiples(unit: int, *around: int | None) -> set[int]:
    """Of `unit`, on both sides of each number, and the first ones."""
    found = {unit, 2 * unit}
    for number in around:
        if number is not None:
            found |= {unit * (number // unit + step) for step in (-1, 0, 1, 2)}
    return {value for value in found if value > 0}


def _candidates(config: Config, plan: Plan, rows: int | None) -> dict[str, set[Any]]:
    """Values that are worth a try, by setting."""
    found = _batch_sizes(config, plan, rows) | _layouts(config, plan) | _switches(config)
    if any(item.rule == MEMORY_RULE for item in plan.broken):
        found |= _lighter(config)
    if any(item.rule == ENGINE_RULE for item in plan.broken):
        found |= _engine(config)
    rollout, cp = config.rollout, config.parallel.context_parallel_size
    prompt, response = rollout.max_prompt_length, rollout.max_response_length
    budgets = ("micro_batch_tokens", "logprob_micro_batch_tokens", "reference_micro_batch_tokens")
    for name in budgets:
        if getattr(config.batch, name):
            found.setdefault(f"batch.{name}", set()).update({prompt + response, None})
    if not any(item.rule in _LENGTHS for item in plan.broken):
        return found  # nothing is wrong with them
    lengths = _multiples(2 * cp, prompt + response)
    limits: set[int] = {getattr(config.batch, name) for name in budgets if getattr(config.batch, name)}
    limits |= _positions(config)
    lengths |= limits | {limit // (2 * cp) * (2 * cp) for limit in limits}
    found["rollout.max_response_length"] = {length - prompt for length in lengths if length > prompt}
    found["rollout.max_prompt_length"] = {length - response for length in lengths if length > response}
    return found


def _positions(config: Config) -> set[int]:
    """The longest sequence of the model, if that can be known."""
    if config.model.path is None:
        return set()
    try:
        raw, _ = model_config.planned(config.model.path)
        return {int(raw["max_position_embeddings"])} if raw else set()
    except (ValueError, TypeError, KeyError):
        return set()


def _batch_sizes(config: Config, plan: Plan, rows: int | None) -> dict[str, set[Any]]:
    batch = config.batch
    found: dict[str, set[Any]] = {}
    gbs, group, mbs = batch.global_batch_size, batch.num_generations, batch.micro_batch_size
    gen, spg = batch.generation_batch_size, batch.steps_per_generation
    world, dp = int(plan.quantities.get("world_size", 1)), plan.layout.get("data_parallel_size", 1)
    size, groups, count = mbs or 1, group or 1, spg or 1
    whole = math.lcm(groups * dp * size, groups, size * dp)  # a rollout of this many keeps every rule of divisibility
    step = math.lcm(groups, size * dp)  # and an update where no DP group owns prompts
    if config.rollout.mode != "server" and mbs:
        step = whole
    most = rows * groups if rows is not None else None  # completions that the data has prompts for
    if gbs is not None:
        loose = math.lcm(step, groups * dp // math.gcd(groups * dp, count))
        for unit in {step, loose, size * dp}:
            bounds = (gbs, -(-world // count), -(-groups * dp // count), None if most is None else most // count)
            found.setdefault("batch.global_batch_size", set()).update(_multiples(unit, *bounds))
        if gen is not None:
            found["batch.global_batch_size"].update(_divisors(gen))
            if spg:
                found["batch.global_batch_size"].update({gen // spg})
        needed = whole // math.gcd(whole, gbs)
        found["batch.steps_per_generation"] = _multiples(
            needed, spg, -(-world // gbs), None if most is None else most // gbs
        ) | {None, 1}
        if gen is not None:
            found["batch.steps_per_generation"].add(max(1, gen // gbs))
        found["batch.num_generations"] = {n for n in _divisors(math.gcd(gbs, gen or gbs * count)) if n >= 2}
        found["batch.num_generations"] |= {n for n in _divisors(gbs * count) if n >= 2}
    if gen is not None:
        unit = math.lcm(whole, gbs or 1)
        found["batch.generation_batch_size"] = _multiples(unit, gen, world, most) | {None}
        if gbs and spg:
            found["batch.generation_batch_size"].add(gbs * spg)
    if mbs is not None:
        found["batch.micro_batch_size"] = {1, *_divisors(gbs or mbs), *((None,) if batch.micro_batch_tokens else ())}
    return found


def _layouts(config: Config, plan: Plan) -> dict[str, set[Any]]:
    cluster, parallel = config.cluster, config.parallel
    gpus = cluster.gpus_per_node
    world = int(plan.quantities.get("world_size", cluster.nodes * gpus))
    sizes = set(_divisors(world))
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    found: dict[str, set[Any]] = {f"parallel.{name}_parallel_size": set(sizes) for name in names}
    found["parallel.expert_tensor_parallel_size"].add(None)
    if parallel.virtual_pipeline_model_parallel_size is not None:
        found["parallel.virtual_pipeline_model_parallel_size"] = {None, 2, 3, 4}
    found["rollout.tensor_parallel_size"] = set(_divisors(gpus))
    found["rollout.engines_per_node"] = {None, *range(1, gpus + 1)}
    # As many nodes as make whole grids, and as many DP groups as prompts can be dealt to.
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    attention = tp * pp * parallel.context_parallel_size
    experts = (parallel.expert_tensor_parallel_size or tp) * parallel.expert_model_parallel_size * pp
    each = plan.layout.get("gpus_per_node", gpus) - plan.layout.get("gpus_set_apart_per_node", 0)
    each = max(1, each)
    grid = math.lcm(attention, experts)
    unit = grid // math.gcd(grid, each)
    nodes = _multiples(unit, cluster.nodes)
    gbs = config.batch.global_batch_size
    if gbs:
        nodes |= {d * attention // each for d in _divisors(gbs) if d * attention % each == 0}
    found["cluster.nodes"] = {count for count in nodes if count > 0}
    return found


def _switches(config: Config) -> dict[str, set[Any]]:
    """Settings with few values."""
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
    if parallel.overlap_param_gather:
        found |= {
            "parallel.overlap_param_gather": {False},
            "parallel.overlap_grad_reduce": {True},
            "optimizer.distributed": {True},
        }
    found = {key: values for key, values in found.items() if _is_set(config, key)}
    for field in fields(config.algorithm):  # what contradicts the objective goes back to what that wants
        if field.name != "name" and getattr(config.algorithm, field.name) != field.default:
            found[f"algorithm.{field.name}"] = {field.default}
    return found


def _lighter(config: Config) -> dict[str, set[Any]]:
    """What takes less of a GPU, or of a node."""
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
    if tokens := config.batch.micro_batch_tokens:
        found["batch.micro_batch_tokens"] = {longest, *(max(longest, tokens // part) for part in (2, 4, 8))}
    return found


def _engine(config: Config) -> dict[str, set[Any]]:
    """What vLLM would take: its own default, or the bound that two of its arguments have in common."""
    given = config.rollout.engine
    found: dict[str, set[Any]] = {f"rollout.engine.{key}": {None} for key in given}
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    tokens, sequences = (given.get(f"max_num_{name}") for name in ("batched_tokens", "seqs"))
    if isinstance(tokens, int) and isinstance(sequences, int):
        found["rollout.engine.max_num_seqs"] |= {tokens}
        found["rollout.engine.max_num_batched_tokens"] |= {sequences}
    if isinstance(tokens, int) and given.get("enable_chunked_prefill") is False:
        found["rollout.engine.max_num_batched_tokens"] |= {longest, max(longest, sequences or 0)}
    return found


def _is_set(config: Config, key: str) -> bool:
    """Whether the setting is another than the default: what nobody has touched is not in the way, but for
    sequence_parallel and what overlapping needs."""
    if key in ("parallel.sequence_parallel", "parallel.overlap_grad_reduce", "optimizer.distributed"):
        return True
    section, name = key.split(".")
    part = getattr(config, section)
    default = next(field.default for field in fields(part) if field.name == name)
    return bool(getattr(part, name) != default) or key == "batch.share_prompts"
