"""The layout of a verl run: what it does with FSDP or Megatron, and the reference model that shares it here."""

from __future__ import annotations

import re

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.scripts.scope import is_unset

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
OPTIM = f"{ACTOR}.optim"
_MEGATRON, _VEOMNI, _FSDP = f"{ACTOR}.megatron", f"{ACTOR}.veomni", f"{ACTOR}.fsdp_config"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"
_CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
_OFFLOADED = {"weights": "param", "gradients": "grad", "optimizer": "optimizer"}  # our name of a part -> verl's
_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"  # of transformers, read with FSDP
_KERNELS = {"flash_attention_2": "flash", "flash_attention_3": "flash", "eager": "unfused"}
# Models whose bridges to Megatron have it move the bias of routers.
_BALANCED_BY_BIAS = re.compile(r"(?i)deepseek[-_]?(?:v3|r1(?!.*distill))|dsv3|dspk|671b|moonlight|nemotron|kimi-k2")
_PLAIN = ("model_engine",)  # without a dot, and no choice of a file of settings
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_GROUP = re.compile(r"(?:(actor|ref|critic)@[\w.]+)=(\w+)_\1")  # choices of Hydra that verl's own files answer
_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "half": "float16"}
_DTYPES |= {"float32": "float32", "fp32": "float32", "float": "float32"}


def engine(draft: Draft) -> str:
    """Return what trains: fsdp, megatron or veomni; refuse other engines."""
    engines = {"dp": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron", "veomni": "veomni"}
    config = str(draft.variables.get("config_name", ""))
    named = any(name.startswith(f"{_MEGATRON}.") for name in draft.values) or "megatron" in config
    found, usual = "", "megatron" if named else "fsdp"
    foreign = bool({"config_path", "config_dir"} & {*draft.variables})  # files of settings that are not verl's own
    added = draft.variables.get("added", "").split()  # +group=file, or a key that is added
    groups = [name for name, value in draft.values.items()
              if "." not in name.partition("@")[0] and name not in _PLAIN and isinstance(value, str)
              and ("@" in name or foreign or name in added or value.endswith(("_megatron", "_fsdp")))]  # fmt: skip
    for name in ("model_engine", *groups, f"{ACTOR}.strategy"):
        kind = draft.text(name)
        if kind is None:
            continue
        if is_unset(kind) and {engines.get(value) for value in draft.might.get(name, ())} == {found or usual}:
            draft.drop(name, f"where it is given it is {' or '.join(draft.might[name])}, and means the same here")
            continue
        if name in groups:
            match = _GROUP.fullmatch(f"{name}={kind}")
            if match is None or match[2] not in engines:
                draft.refuse(f"{name}={kind}: it chooses a file of settings that is not verl's own, and is not read")
                continue
            draft.credit("parallel.tensor_model_parallel_size", name)
            if match[1] != "actor":
                continue
            kind = match[2]
        if kind not in engines:
            why = draft.why_unset(kind) if "$" in kind else "dp (FSDP), megatron and veomni have a counterpart here"
            draft.refuse(f"{name}={kind}: {why}")
        found = engines.get(kind, "fsdp")
        draft.credit("parallel.tensor_model_parallel_size", name)
    return found or usual


def put_layout(draft: Draft, trainer: str) -> int:
    """Put the layout; return how many GPUs share a sequence, by which a token budget per GPU is multiplied."""
    megatron = trainer == "megatron"
    shared = _megatron(draft) if megatron else _fsdp(draft, trainer)
    _dtype(draft, megatron)
    _reference(draft, megatron)
    return shared


def _fsdp(draft: Draft, trainer: str) -> int:
    names = (
        f"{ACTOR}.ulysses_sequence_parallel_size",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        f"{_VEOMNI}.ulysses_parallel_size",
    )
    name = next((name for name in names if draft.given(name)), names[0])
    size = draft.whole(name, 1) or 1
    draft.credit("parallel.context_parallel_size", name)
    if size > 1:
        text = "Ulysses splits heads and this splits the sequence; as many GPUs share one sequence"
        draft.put("parallel.context_parallel_size", size, name, text)
    if (experts := draft.whole(f"{_VEOMNI}.expert_parallel_size", 1) or 1) > 1:
        draft.put("parallel.expert_model_parallel_size", experts, f"{_VEOMNI}.expert_parallel_size")
    if draft.given(f"{_VEOMNI}.router_replay.mode"):
        _replay(draft, _VEOMNI)
    if draft.given(_ATTENTION) and (kernels := _KERNELS.get(draft.sure(_ATTENTION, ""))):
        draft.put("model.attention_backend", kernels, _ATTENTION)
    else:
        draft.drop(_ATTENTION, "model.attention_backend is auto, flash, fused or unfused here")
    draft.put("optimizer.distributed", True, comment="FSDP also shards weights and gradients")
    if draft.given(name := f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype"):
        kind = _DTYPES[draft.choice(name, tuple(_DTYPES), "float32")]
        draft.put("optimizer.grad_reduce_in_fp32", kind == "float32", name)
    draft.assumed.append(
        "FSDP has no tensor parallelism: if the model does not fit on one GPU, raise "
        "parallel.tensor_model_parallel_size"
    )
    draft.credit("memory.recompute_granularity", _CHECKPOINTING)
    if draft.switch(_CHECKPOINTING, True):
        draft.put("memory.recompute_granularity", "full", _CHECKPOINTING)
    settings, others = (_VEOMNI, _FSDP) if trainer == "veomni" else (_FSDP, _VEOMNI)
    for name in _OFFLOADED.values():
        draft.drop(f"{others}.{name}_offload", "verl does not read it with this engine")
    moved = {part: f"{settings}.{name}_offload" for part, name in _OFFLOADED.items()}
    if any(draft.switch(name) for name in moved.values()):
        moved["gradients"] = moved["weights"]  # FSDP's go with the weights
        parts.offload(draft, moved)
    else:
        for name in moved.values():
            draft.drop(name, "the trainer moves to host memory here by default: see memory.offload_trainer")
    return size


def _megatron(draft: Draft) -> int:
    tp = draft.whole(f"{_MEGATRON}.tensor_model_parallel_size", 1)
    cp = draft.whole(f"{_MEGATRON}.context_parallel_size", 1) or 1
    draft.put("parallel.tensor_model_parallel_size", tp, f"{_MEGATRON}.tensor_model_parallel_size")
    draft.put("parallel.context_parallel_size", cp, f"{_MEGATRON}.context_parallel_size")
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        draft.put(f"parallel.{name}", draft.whole(f"{_MEGATRON}.{name}", 1), f"{_MEGATRON}.{name}")
    for name in ("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"):
        draft.put(f"parallel.{name}", draft.whole(f"{_MEGATRON}.{name}"), f"{_MEGATRON}.{name}")
    wanted = draft.switch(f"{_MEGATRON}.sequence_parallel", True) and (tp or 1) > 1
    draft.put("parallel.sequence_parallel", wanted, f"{_MEGATRON}.sequence_parallel" if wanted else None)
    draft.credit("parallel.sequence_parallel", f"{_MEGATRON}.sequence_parallel")
    distributed = draft.switch(f"{_MEGATRON}.use_distributed_optimizer", True)
    draft.put("optimizer.distributed", distributed, f"{_MEGATRON}.use_distributed_optimizer")
    parts.offload(draft, {part: f"{_MEGATRON}.{name}_offload" for part, name in _OFFLOADED.items()})
    name = f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"
    if draft.switch(name):
        draft.put("memory.offload_optimizer", True, name)
    draft.drop(_CHECKPOINTING, "with Megatron, override_transformer_config.recompute_granularity decides it")
    draft.drop(_ATTENTION, "with Megatron, override_transformer_config.attention_backend decides it")
    _transformer(draft)
    return cp


def _reference(draft: Draft, megatron: bool) -> None:
    """Compare the reference's layout with the actor's: here it has the same, and another one there is told loudly."""
    for size in _SIZES if megatron else ():
        name, own = f"{REF}.megatron.{size}", f"{_MEGATRON}.{size}"
        if not draft.given(name):
            continue
        mine = draft.whole(name)
        theirs = draft.whole(own, None if size.startswith(("virtual", "expert_tensor")) else 1)
        if mine == theirs:
            draft.credit(f"parallel.{size}", name)
        else:
            text = f"the actor has {theirs}, and the reference model shares the trainer's layout here"
            draft.drop(name, text)
            draft.differs.append(
                f"{draft.label(name)}: {text}; different layouts are a frequent cause of failed starts"
            )


def _dtype(draft: Draft, megatron: bool) -> None:
    """Put the type that the trainer computes in; the engines have the same here."""
    names = [f"{_MEGATRON}.dtype", f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"]
    name = next((name for name in names if draft.given(name)), names[0])
    kind = _DTYPES[draft.choice(name, tuple(_DTYPES), "bfloat16")]
    if draft.switch(f"{_TRANSFORMER}.fp16"):
        kind, name = "float16", f"{_TRANSFORMER}.fp16"
    if draft.given(name):
        draft.put("model.dtype", kind, name)
    if kind == "float16" and megatron:
        draft.put("optimizer.initial_loss_scale", 32768.0, comment="default of verl")
        draft.differs.append("an overflow of the loss scale ends a run of verl with Megatron; here it skips the update")
    engines = f"{ROLLOUT}.dtype"
    if draft.given(engines):
        if _DTYPES[draft.choice(engines, tuple(_DTYPES), "bfloat16")] == kind:
            draft.credit("model.dtype", engines)
        else:
            draft.drop(engines, f"engines and trainer share model.dtype here, which is the trainer's {kind}")


def _transformer(draft: Draft) -> None:
    """Put the settings that verl passes to Megatron-Core unchanged."""
    rate = f"{_TRANSFORMER}.moe_router_bias_update_rate"
    names = (draft.text(name) or "" for name in ("actor_rollout_ref.model.path", "trainer.experiment_name"))
    if any(map(_BALANCED_BY_BIAS.search, names)) and draft.number(rate, 0.001):
        draft.differs.append(
            "the bias of this model's routers moves with every update there (moe_router_bias_update_rate 0.001, unless "
            "it is given), and stays as it is here"
        )
    name = f"{_TRANSFORMER}.recompute_granularity"
    grain = draft.text(name)
    if grain:
        grain = draft.choice(name, ("selective", "full"), "full")
        draft.put("memory.recompute_granularity", grain, of=(name,))
    if grain == "full":
        name = f"{_TRANSFORMER}.recompute_method"
        draft.put("memory.recompute_method", draft.choice(name, ("uniform", "block"), "uniform"), of=(name,))
        name = f"{_TRANSFORMER}.recompute_num_layers"
        draft.put("memory.recompute_num_layers", draft.whole(name, 1), of=(name,))
    elif grain and (modules := draft.texts(f"{_TRANSFORMER}.recompute_modules", known=True)):
        draft.put("memory.recompute_modules", modules, of=(f"{_TRANSFORMER}.recompute_modules",))
    for stage in ("first", "last"):
        key = f"num_layers_in_{stage}_pipeline_stage"
        if draft.given(name := f"{_TRANSFORMER}.{key}"):
            draft.put(f"parallel.{key}", draft.whole(name), of=(name,))
    name = f"{_TRANSFORMER}.attention_backend"
    if draft.given(name):
        kernels = draft.choice(name, ("auto", "flash", "fused", "unfused", "local"), "auto")
        if kernels == "local":
            draft.drop(name, "model.attention_backend is auto, flash, fused or unfused here")
        else:
            draft.put("model.attention_backend", kernels, name)
    name = f"{_TRANSFORMER}.moe_router_dtype"
    if draft.given(name):
        kinds = {"fp32": "float32", "fp64": "float64", "float32": "float32"}
        draft.put("moe.router_dtype", kinds[draft.choice(name, tuple(kinds), "fp32")], of=(name,))
    if draft.given(name := f"{_TRANSFORMER}.fp8"):
        draft.put("model.fp8", draft.choice(name, ("e4m3", "hybrid"), "hybrid"), of=(name,))
        recipe = f"{_TRANSFORMER}.fp8_recipe"
        recipes = ("delayed", "tensorwise", "blockwise", "mxfp8")
        draft.put("model.fp8_recipe", draft.choice(recipe, recipes, "delayed"), of=(recipe,))
    if draft.given(name := f"{_MEGATRON}.override_ddp_config.grad_reduce_in_fp32"):
        draft.put("optimizer.grad_reduce_in_fp32", draft.switch(name), of=(name,))
    if draft.given(name := f"{_MEGATRON}.override_ddp_config.overlap_grad_reduce"):
        draft.put("parallel.overlap_grad_reduce", draft.switch(name), of=(name,))
    _balance(draft)
    if draft.given(name := f"{_TRANSFORMER}.moe_z_loss_coeff"):
        draft.put("moe.z_loss_coeff", draft.number(name, 0.0), of=(name,))
    _dispatcher(draft)
    _replay(draft, _MEGATRON)


def _balance(draft: Draft) -> None:
    """Put the weight of the loss that balances experts where verl computes it; its bridges switch it off."""
    weight, kind = f"{_TRANSFORMER}.moe_aux_loss_coeff", f"{_TRANSFORMER}.moe_router_load_balancing_type"
    found = draft.text(kind)
    if found == "aux_loss":
        draft.put("moe.aux_loss_coeff", draft.number(weight, 0.0), of=(weight, kind))
    elif found is None or found == "none":
        draft.drop(kind, "experts are not balanced by a loss there, and moe.aux_loss_coeff is 0 here")
        why = "" if found else ", which verl sets unless it is given (for GLM-4 MoE mbridge does not)"
        draft.drop(weight, f"it has no effect with moe_router_load_balancing_type=none{why}")
    else:
        why = "its value is known only when the script runs" if is_unset(found) else "the loss here is that of aux_loss"
        draft.drop(kind, why)
        draft.drop(weight, f"it belongs to moe_router_load_balancing_type={found}; moe.aux_loss_coeff is 0 here")


def _replay(draft: Draft, engine: str) -> None:
    """Put which pass decides the experts of a token."""
    replay = {"disabled": "off", "R2": "old_logprobs", "R3": "rollout"}
    modes = (f"{ACTOR}.router_replay.mode", f"{engine}.router_replay.mode")
    mode = next((name for name in modes if draft.given(name)), modes[0])
    draft.put("moe.router_replay", replay[draft.choice(mode, tuple(replay), "disabled")], mode)


def _dispatcher(draft: Draft) -> None:
    """Put the token dispatcher of the experts; allgather needs equally many tokens from each rank, never so here."""
    deep, kind = f"{_TRANSFORMER}.moe_enable_deepep", f"{_TRANSFORMER}.moe_token_dispatcher_type"
    fast = draft.switch(deep)
    found = draft.choice(kind, ("allgather", "alltoall", "flex"), "alltoall")
    if found == "allgather":
        draft.drop(kind, "it needs equally many tokens on every rank; here it is alltoall or flex")
    elif draft.given(kind) or fast:
        draft.put("moe.token_dispatcher", "flex" if fast else found, of=(kind, deep))
    draft.credit("moe.token_dispatcher", deep)
