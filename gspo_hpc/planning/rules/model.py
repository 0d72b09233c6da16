"""Rules of the model: what parallel sizes cut of it, its longest sequence, and what is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto

from gspo_hpc.models import positions
from gspo_hpc.models.positions import Positions
from gspo_hpc.planning import divisions
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule
from gspo_hpc.system.text import near_miss

# What Megatron-Core's selective recomputation names, of the parts that models here have.
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")


class ModelRule(RuleId):
    """Names of the rules in this file."""

    CONTEXT_PARALLEL_SEQUENCE = auto()
    RECOMPUTE_MODULES_KNOWN = auto()
    RECOMPUTE_MOE_ACT_NEEDS = auto()
    RECOMPUTE_DELAYED_FP8 = auto()
    RECOMPUTE_NUM_LAYERS = auto()
    MODEL_CONFIG_READABLE = auto()
    TENSOR_PARALLEL_HEADS = auto()
    TENSOR_PARALLEL_KV_HEADS = auto()
    TENSOR_PARALLEL_QKV_ROWS = auto()
    TENSOR_PARALLEL_INTERMEDIATE_SIZE = auto()
    EXPERT_TENSOR_PARALLEL_INTERMEDIATE_SIZE = auto()
    EXPERT_PARALLEL_EXPERTS = auto()
    ROLLOUT_TENSOR_PARALLEL_HEADS = auto()
    ROLLOUT_TENSOR_PARALLEL_KV_HEADS = auto()
    ROLLOUT_TENSOR_PARALLEL_INNER_SIZE = auto()
    EXPERTS_NEED_SEQUENCE_PARALLEL = auto()
    LONGEST_SEQUENCE_FITS_POSITIONS = auto()


@rule(
    ModelRule.CONTEXT_PARALLEL_SEQUENCE,
    "`max_prompt_length` + `max_response_length` is divisible by 2 x CP if CP is above 1",
)
def _context_parallel(plan: PlanBuilder) -> Iterator[str]:
    cp = plan.config.parallel.context_parallel_size
    if cp > 1 and plan.longest_sequence % (2 * cp):
        yield (
            f"{plan.longest_sequence_made} must be divisible by 2 x context_parallel_size ({cp}) = {2 * cp}: each rank "
            "takes two pieces of it"
        )


@rule(ModelRule.RECOMPUTE_MODULES_KNOWN, "`memory.recompute_modules` names parts that can be recomputed")
def _recompute_modules(plan: PlanBuilder) -> Iterator[str]:
    for name in plan.config.memory.recompute_modules:
        if name not in RECOMPUTED:
            hint = near_miss(name, RECOMPUTED)
            text = f"memory.recompute_modules: {name} is no part that can be recomputed{hint}"
            yield f"{text}; known: {', '.join(RECOMPUTED)}"


@rule(
    ModelRule.RECOMPUTE_MOE_ACT_NEEDS,
    "`moe_act` is recomputed only in models with experts, with the layers of Transformer Engine",
)
def _recompute_moe_act(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if config.memory.recompute_granularity != "selective" or "moe_act" not in config.memory.recompute_modules:
        return
    arch, fused = plan.architecture, config.cluster.platform == "cuda" and config.model.layers != "torch"
    if not fused or (arch is not None and arch.experts is None):
        yield "memory.recompute_modules: moe_act needs a model with experts, and layers of Transformer Engine on GPUs"


@rule(
    ModelRule.RECOMPUTE_DELAYED_FP8,
    "`moe_act` and `layernorm` are not recomputed with `model.fp8_recipe: delayed`",
)
def _recompute_fp8(plan: PlanBuilder) -> Iterator[str]:
    memory, model = plan.config.memory, plan.config.model
    if memory.recompute_granularity != "selective" or model.fp8 is None or model.fp8_recipe != "delayed":
        return
    if {"moe_act", "layernorm"}.intersection(memory.recompute_modules):
        yield "model.fp8_recipe: delayed cannot be combined with moe_act or layernorm in memory.recompute_modules"


@rule(ModelRule.RECOMPUTE_NUM_LAYERS, "`memory.recompute_num_layers` is at most the layers of a pipeline stage")
def _recompute_layers(plan: PlanBuilder) -> Iterator[str]:
    arch, wanted, parallel = plan.architecture, plan.config.memory.recompute_num_layers, plan.config.parallel
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    counts = None if arch is None else divisions.layers_per_stage(arch.num_layers, parallel)
    if arch is None or counts is None:
        return
    if wanted > (each := max(counts) // chunks):
        text = f"memory.recompute_num_layers ({wanted}) must be at most {each}: layers of the model ({arch.num_layers})"
        uneven = ", those of the fullest stage" if len(set(counts)) > 1 else ""
        text += f" / pipeline_model_parallel_size ({pp}){uneven}"
        yield text + (f" / virtual_pipeline_model_parallel_size ({chunks})" if chunks > 1 else "")


@rule(ModelRule.MODEL_CONFIG_READABLE, "the model's config.json, if there is one, is a JSON object")
def _readable(plan: PlanBuilder) -> Iterator[str]:
    if plan.model_file.error:
        yield plan.model_file.error


def _divides(name: str, value: int | None, cut: str, parts: int) -> Iterator[str]:
    """Yield a message if a size of the model is known and not divisible by the ranks that cut it."""
    if value is not None and value % parts:
        yield f"{name} ({value}) of the model must be divisible by {cut} ({parts})"


@rule(ModelRule.TENSOR_PARALLEL_HEADS, "attention heads are divisible by TP")
def _heads(plan: PlanBuilder) -> Iterator[str]:
    tp, heads = plan.config.parallel.tensor_model_parallel_size, plan.model_file.size("num_attention_heads")
    yield from _divides("num_attention_heads", heads, "tensor_model_parallel_size", tp)


@rule(ModelRule.TENSOR_PARALLEL_KV_HEADS, "key-value heads are a multiple or a divisor of TP")
def _kv_heads(plan: PlanBuilder) -> Iterator[str]:
    tp = plan.config.parallel.tensor_model_parallel_size
    yield from _shared(plan.model_file.kv_heads, "tensor_model_parallel_size", tp)


def _shared(heads: int | None, cut: str, ranks: int) -> Iterator[str]:
    """Yield a message if neither ranks have equally many key-value heads, nor these equally many ranks."""
    if heads is not None and not divisions.kv_heads_fit(heads, ranks):
        yield f"num_key_value_heads ({heads}) of the model must be a multiple or a divisor of {cut} ({ranks})"


@rule(
    ModelRule.TENSOR_PARALLEL_QKV_ROWS,
    "rows of queries, keys and values, (attention heads + 2 x key-value heads) x head size, are divisible by TP",
)
def _qkv_rows(plan: PlanBuilder) -> Iterator[str]:
    tp, arch = plan.config.parallel.tensor_model_parallel_size, plan.architecture
    if arch is None or arch.num_attention_heads % tp or not divisions.kv_heads_fit(arch.num_key_value_heads, tp):
        return
    if not divisions.trainer_divides_heads(arch, tp):
        heads, groups, size = arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim
        yield (
            f"(num_attention_heads ({heads}) + 2 x num_key_value_heads ({groups})) x head_dim ({size}) of the model = "
            f"{(heads + 2 * groups) * size} rows must be divisible by tensor_model_parallel_size ({tp})"
        )


@rule(ModelRule.TENSOR_PARALLEL_INTERMEDIATE_SIZE, "the MLP's inner size is divisible by TP")
def _intermediate_size(plan: PlanBuilder) -> Iterator[str]:
    tp, inner = plan.config.parallel.tensor_model_parallel_size, plan.model_file.size("intermediate_size")
    yield from _divides("intermediate_size", inner, "tensor_model_parallel_size", tp)


@rule(ModelRule.EXPERT_TENSOR_PARALLEL_INTERMEDIATE_SIZE, "an expert's inner size is divisible by ETP")
def _expert_intermediate_size(plan: PlanBuilder) -> Iterator[str]:
    parallel = plan.config.parallel
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    inner = plan.model_file.size("moe_intermediate_size") if plan.model_file.experts else None
    yield from _divides("moe_intermediate_size", inner, "expert_tensor_parallel_size", etp)


@rule(ModelRule.EXPERT_PARALLEL_EXPERTS, "experts are divisible by EP; a model without experts has EP 1")
def _experts(plan: PlanBuilder) -> Iterator[str]:
    ep = plan.config.parallel.expert_model_parallel_size
    if plan.model_file.content is not None and not plan.model_file.experts and ep > 1:
        yield f"expert_model_parallel_size ({ep}) must be 1: the model has no experts"
    elif plan.model_file.content is not None:
        yield from _divides("num_experts", plan.model_file.experts or 1, "expert_model_parallel_size", ep)


@rule(ModelRule.ROLLOUT_TENSOR_PARALLEL_HEADS, "attention heads are divisible by `rollout.tensor_parallel_size`")
def _rollout_heads(plan: PlanBuilder) -> Iterator[str]:
    tp, heads = plan.config.rollout.tensor_parallel_size, plan.model_file.size("num_attention_heads")
    yield from _divides("num_attention_heads", heads, "rollout.tensor_parallel_size", tp)


@rule(
    ModelRule.ROLLOUT_TENSOR_PARALLEL_KV_HEADS,
    "key-value heads are a multiple or a divisor of `rollout.tensor_parallel_size`",
)
def _rollout_kv_heads(plan: PlanBuilder) -> Iterator[str]:
    tp = plan.config.rollout.tensor_parallel_size
    yield from _shared(plan.model_file.kv_heads, "rollout.tensor_parallel_size", tp)


@rule(
    ModelRule.ROLLOUT_TENSOR_PARALLEL_INNER_SIZE,
    "the inner sizes of MLPs and experts are divisible by `rollout.tensor_parallel_size`",
)
def _rollout_intermediate_size(plan: PlanBuilder) -> Iterator[str]:
    tp, experts = plan.config.rollout.tensor_parallel_size, plan.model_file.experts
    whole = experts and plan.config.rollout.engine.get("enable_expert_parallel")  # each expert on one GPU
    for name in (
        "intermediate_size",
        "shared_expert_intermediate_size",
        *(() if whole else ("moe_intermediate_size",)),
    ):
        size = plan.model_file.size(name) if experts or name == "intermediate_size" else None
        yield from _divides(name, size, "rollout.tensor_parallel_size", tp)


@rule(ModelRule.EXPERTS_NEED_SEQUENCE_PARALLEL, "a model with experts needs `sequence_parallel` if TP is above 1")
def _experts_sequence_parallel(plan: PlanBuilder) -> Iterator[str]:
    tp = plan.config.parallel.tensor_model_parallel_size
    if plan.model_file.experts and tp > 1 and not plan.config.parallel.sequence_parallel:
        yield (
            f"a model with experts needs parallel.sequence_parallel: true if tensor_model_parallel_size ({tp}) is "
            "above 1"
        )


@rule(
    ModelRule.LONGEST_SEQUENCE_FITS_POSITIONS,
    "`max_prompt_length` + `max_response_length` is at most the longest sequence that vLLM takes of the model: "
    "`max_position_embeddings`, times the factor of some kinds of rotary embeddings",
)
def _positions(plan: PlanBuilder) -> Iterator[str]:
    longest = longest_here(plan)
    if longest is not None and plan.longest_sequence > longest.length:
        yield too_long(plan.longest_sequence, longest) + _rescale(plan, longest)


def too_long(sequence: int, longest: Positions) -> str:
    """Return that a sequence is longer than a model's positions."""
    made = longest.made if longest.length == longest.of_file else f"{longest.made} = {longest.length} positions"
    return f"max_prompt_length + max_response_length = {sequence} must fit {made} of the model"


def longest_of_versions(plan: PlanBuilder) -> tuple[Positions, Positions] | None:
    """Return the longest sequence that newer and older versions of vLLM take of the model; None if it has no bound."""
    content = plan.model_file.content or {}
    newer, older = (positions.longest(content, yarn_scales=scales) for scales in (False, True))
    return None if newer is None or older is None else (newer, older)


def longest_here(plan: PlanBuilder) -> Positions | None:
    """Return the longest sequence that the vLLM of this machine takes of the model; None if it has no bound.

    Where versions differ and none is installed here, the longest that any of them takes.
    """
    found = longest_of_versions(plan)
    if found is None or found[0].length == found[1].length:
        return None if found is None else found[0]
    from gspo_hpc.planning import installed  # only here: most models have no such embeddings

    scales = installed.yarn_scales()
    return max(found, key=lambda one: one.length) if scales is None else found[scales]


def _rescale(plan: PlanBuilder, longest: Positions) -> str:
    """Return how the file gives a longer sequence to a vLLM that takes its positions as they are; empty for others."""
    older = positions.longest(plan.model_file.content or {}, yarn_scales=True)
    if older is None or older.length <= longest.length:
        return ""
    return f": this vLLM takes no factor of yarn into account; for longer ones give {older.length} there in config.json"
