"""Rules of the libraries below: what Megatron-Core, Transformer Engine, mcore-bridge and DeepEP need.

They would refuse a config only when they run, minutes into a job and after the queue. The rules follow the sources of
Megatron-Core 0.16.1 and DeepEP 1.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto

from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule

# Groups of ranks for which DeepEP has kernels, and how many of them it takes for those of one node.
_DEEPEP_RANKS = (2, 4, 8, 16, 32, 64, 128, 144, 160)
_DEEPEP_NODE = 8
_DEEPEP_TOP_K = 32  # places that a token may go to: its experts, on each rank that has a part of them
_FLEX = "moe.token_dispatcher: flex"
_BRIDGE = "model.provider: mcore_bridge"


class PlatformRule(RuleId):
    """Names of the rules in this file."""

    BFLOAT16_NEEDS_AMPERE = auto()
    FLOAT16_EXPERT_PARALLEL = auto()
    TRANSFORMER_ENGINE_NEEDS_GPUS = auto()
    TRANSFORMER_ENGINE_NEEDS_AMPERE = auto()
    FP8_NEEDS_TRANSFORMER_ENGINE = auto()
    ATTENTION_BACKEND_NEEDS_TE = auto()
    ROUNDED_NORMS_NEED_TORCH = auto()
    MCORE_BRIDGE_NEEDS_TRANSFORMER_ENGINE = auto()
    MCORE_BRIDGE_CONTEXT_PARALLEL = auto()
    MCORE_BRIDGE_SHARE_PROMPTS = auto()
    MCORE_BRIDGE_ROUTER_REPLAY = auto()
    ROUTER_REPLAY_NEEDS_GPUS = auto()
    FLEX_NEEDS_GPUS = auto()
    FLEX_NEEDS_BFLOAT16 = auto()
    FLEX_ROUTER_DTYPE = auto()
    FLEX_EXPERT_RANKS = auto()
    FLEX_RANKS_PER_NODE = auto()
    FLEX_DESTINATIONS = auto()


def _before_ampere(plan: PlanBuilder) -> str | None:
    """Return which GPUs there are, and their compute capability, if they are known and older than Ampere."""
    if plan.config.cluster.gpu is None:
        return None
    from gspo_hpc.planning.estimates import devices  # only here: most plans name newer GPUs, or none

    found = devices.before_ampere(plan.config.cluster)
    return None if found is None else f"{found[0]} has {found[1][0]}.{found[1][1]}"


@rule(PlatformRule.BFLOAT16_NEEDS_AMPERE, "bfloat16 needs GPUs from Ampere on (compute capability 8.0)")
def _bfloat16(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    given = {"model.dtype": config.model.dtype, "rollout.dtype": config.rollout.dtype}
    keys = [key for key, dtype in given.items() if dtype == "bfloat16"]
    if keys and (which := _before_ampere(plan)) is not None:
        yield (
            f"{' and '.join(keys)}: bfloat16 needs GPUs of compute capability 8.0 or newer, and {which}: give float16 "
            "or float32"
        )


@rule(PlatformRule.FLOAT16_EXPERT_PARALLEL, "`model.dtype: float16` needs EP 1")
def _float16(plan: PlanBuilder) -> Iterator[str]:
    if plan.config.model.dtype == "float16" and plan.config.parallel.expert_model_parallel_size != 1:
        yield (
            "model.dtype: float16 cannot be combined with expert_model_parallel_size above 1: each rank would scale "
            "the loss of its experts by a factor of its own; use bfloat16"
        )


@rule(PlatformRule.TRANSFORMER_ENGINE_NEEDS_GPUS, "`model.layers: transformer_engine` needs GPUs")
def _transformer_engine(plan: PlanBuilder) -> Iterator[str]:
    if plan.config.model.layers == "transformer_engine" and plan.config.cluster.platform != "cuda":
        yield "model.layers: transformer_engine needs GPUs (cluster.platform: cuda); model.layers=torch runs everywhere"


@rule(
    PlatformRule.TRANSFORMER_ENGINE_NEEDS_AMPERE,
    "what needs the layers of Transformer Engine needs GPUs from Ampere on (compute capability 8.0)",
)
def _older_gpus(plan: PlanBuilder) -> Iterator[str]:
    """Yield the settings that need Transformer Engine: on packed samples it has FlashAttention and cuDNN's alone.

    Neither is made for older GPUs (get_attention_backend in its dot_product_attention/utils.py).
    """
    model = plan.config.model
    asked = {
        f"model.layers: {model.layers}": (model.layers == "transformer_engine", "model.layers=auto"),
        _BRIDGE: (_bridged(plan), "model.provider=own"),
        f"model.attention_backend: {model.attention_backend}": (
            model.attention_backend != "auto" and _fused(plan),
            "model.attention_backend=auto",
        ),
    }
    for setting, (is_given, instead) in asked.items():
        if is_given and (which := _before_ampere(plan)) is not None:
            yield (
                f"{setting} needs Transformer Engine, whose attention on packed samples needs GPUs of compute "
                f"capability 8.0 or newer, and {which}: give {instead}"
            )


@rule(
    PlatformRule.FP8_NEEDS_TRANSFORMER_ENGINE, "`model.fp8` needs GPUs, bfloat16 and the layers of Transformer Engine"
)
def _fp8(plan: PlanBuilder) -> Iterator[str]:
    model = plan.config.model
    if model.fp8 and not (_fused(plan) and model.dtype == "bfloat16"):
        yield (
            f"model.fp8: {model.fp8} needs GPUs, model.dtype bfloat16 and the layers of Transformer Engine "
            "(model.layers)"
        )


@rule(
    PlatformRule.ATTENTION_BACKEND_NEEDS_TE,
    "`model.attention_backend` other than auto needs GPUs and the layers of Transformer Engine",
)
def _attention(plan: PlanBuilder) -> Iterator[str]:
    backend = plan.config.model.attention_backend
    if backend != "auto" and not _fused(plan):
        yield (
            f"model.attention_backend: {backend} needs GPUs and the layers of Transformer Engine (model.layers); those "
            "of torch have one attention: give model.attention_backend=auto"
        )


@rule(PlatformRule.ROUNDED_NORMS_NEED_TORCH, "`model.norms_in_fp32: false` needs the layers of torch")
def _norms(plan: PlanBuilder) -> Iterator[str]:
    if not plan.config.model.norms_in_fp32 and _fused(plan):
        yield (
            "model.norms_in_fp32: false needs model.layers=torch: the kernels of Transformer Engine compute norms in "
            "fp32"
        )


def _fused(plan: PlanBuilder) -> bool:
    """Return whether layers can be those of Transformer Engine."""
    return plan.config.cluster.platform == "cuda" and plan.config.model.layers != "torch"


def _bridged(plan: PlanBuilder) -> bool:
    return plan.config.model.provider == "mcore_bridge"


@rule(
    PlatformRule.MCORE_BRIDGE_NEEDS_TRANSFORMER_ENGINE,
    "models of mcore-bridge need GPUs and the layers of Transformer Engine",
)
def _bridge_layers(plan: PlanBuilder) -> Iterator[str]:
    if _bridged(plan) and not _fused(plan):
        yield f"{_BRIDGE} needs GPUs (cluster.platform: cuda) and the layers of Transformer Engine (model.layers)"


@rule(PlatformRule.MCORE_BRIDGE_CONTEXT_PARALLEL, "models of mcore-bridge need CP 1")
def _bridge_context(plan: PlanBuilder) -> Iterator[str]:
    cp = plan.config.parallel.context_parallel_size
    if _bridged(plan) and cp != 1:
        yield f"{_BRIDGE} does not split samples over ranks: context_parallel_size ({cp}) must be 1"


@rule(PlatformRule.MCORE_BRIDGE_SHARE_PROMPTS, "models of mcore-bridge cannot share prompts")
def _bridge_prompts(plan: PlanBuilder) -> Iterator[str]:
    if _bridged(plan) and plan.config.batch.share_prompts:
        yield f"{_BRIDGE} has attention that cannot share prompts: set batch.share_prompts=false"


@rule(PlatformRule.MCORE_BRIDGE_ROUTER_REPLAY, "models of mcore-bridge cannot replay routing")
def _bridge_replay(plan: PlanBuilder) -> Iterator[str]:
    replay = plan.config.moe.router_replay
    if _bridged(plan) and replay != "off":
        yield f"{_BRIDGE} has routers of its own: moe.router_replay ({replay}) must be off"


@rule(PlatformRule.ROUTER_REPLAY_NEEDS_GPUS, "`moe.router_replay: rollout` needs engines on GPUs")
def _replay(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if plan.model_file.experts and config.cluster.platform != "cuda" and config.moe.router_replay == "rollout":
        yield (
            "moe.router_replay: rollout needs GPUs: vLLM's CPU build does not report which experts it chose; "
            "old_logprobs repeats the trainer's own choices"
        )


def _flex(plan: PlanBuilder) -> bool:
    """Return whether the flex dispatcher has work: the model has experts, or that is not known."""
    if plan.config.moe.token_dispatcher != "flex":
        return False
    return (arch := plan.architecture) is None or arch.experts is not None


@rule(PlatformRule.FLEX_NEEDS_GPUS, "`moe.token_dispatcher: flex` needs GPUs")
def _flex_gpus(plan: PlanBuilder) -> Iterator[str]:
    if _flex(plan) and plan.config.cluster.platform != "cuda":
        yield f"{_FLEX} uses DeepEP's kernels, which need GPUs (cluster.platform: cuda); alltoall runs everywhere"


@rule(PlatformRule.FLEX_NEEDS_BFLOAT16, "`moe.token_dispatcher: flex` needs `model.dtype: bfloat16`")
def _flex_dtype(plan: PlanBuilder) -> Iterator[str]:
    dtype = plan.config.model.dtype
    if _flex(plan) and dtype != "bfloat16":
        yield f"{_FLEX}: DeepEP brings tokens back in bfloat16 only, and model.dtype is {dtype}"


@rule(PlatformRule.FLEX_ROUTER_DTYPE, "`moe.token_dispatcher: flex` needs `moe.router_dtype: float32`")
def _flex_router(plan: PlanBuilder) -> Iterator[str]:
    given = plan.config.moe.router_dtype
    if _flex(plan) and given != "float32":
        yield (
            f"{_FLEX}: DeepEP carries the weights of experts in float32, and moe.router_dtype is {given or 'not given'}"
        )


def _expert_ranks(plan: PlanBuilder) -> tuple[int, str]:
    """Return over how many ranks experts are spread, and how that comes about."""
    parallel = plan.config.parallel
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    ranks = etp * parallel.expert_model_parallel_size
    return ranks, f"expert tensor ({etp}) x expert ({parallel.expert_model_parallel_size}) parallel size = {ranks}"


@rule(
    PlatformRule.FLEX_EXPERT_RANKS,
    "`moe.token_dispatcher: flex` needs a number of expert ranks that DeepEP has kernels for",
)
def _flex_ranks(plan: PlanBuilder) -> Iterator[str]:
    if not _flex(plan):
        return
    ranks, made = _expert_ranks(plan)
    if ranks in _DEEPEP_RANKS:
        return
    if ranks == 1:
        yield f"{_FLEX} needs {made} above 1: with one rank there is nowhere to send tokens"
    else:
        known = ", ".join(map(str, _DEEPEP_RANKS))
        yield f"{_FLEX}: {made} must be one of {known}: for others DeepEP has no kernels"


@rule(
    PlatformRule.FLEX_RANKS_PER_NODE, "`moe.token_dispatcher: flex` needs up to 8 ranks of an expert group on each node"
)
def _flex_node(plan: PlanBuilder) -> Iterator[str]:
    if not _flex(plan):
        return
    (ranks, made), gpus = _expert_ranks(plan), plan.config.cluster.gpus_per_node
    unit = min(ranks, _DEEPEP_NODE)
    if ranks in _DEEPEP_RANKS and gpus % unit:
        yield (
            f"{_FLEX}: gpus_per_node ({gpus}) must be divisible by {unit}: DeepEP wants that many of the {made} "
            "ranks of a group on each node"
        )


@rule(PlatformRule.FLEX_DESTINATIONS, "`moe.token_dispatcher: flex` sends a token to at most 32 places")
def _flex_destinations(plan: PlanBuilder) -> Iterator[str]:
    if not _flex(plan):
        return
    parallel, arch = plan.config.parallel, plan.architecture
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    top_k = arch.experts.top_k if arch is not None and arch.experts is not None else 1
    if etp * top_k > _DEEPEP_TOP_K:
        made = f"expert_tensor_parallel_size ({etp}) x the model's experts of a token ({top_k}) = {etp * top_k}"
        yield f"{_FLEX}: {made} must be at most {_DEEPEP_TOP_K}: DeepEP sends a token to no more places"
