"""verl: overrides of ``python -m verl.trainer.main_ppo``, or its YAML, key by key.

There ``data.train_batch_size`` and ``ppo_mini_batch_size`` count prompts, and a training step is a whole
rollout with all its updates: step counts, save_freq, test_freq and warm-up are multiplied by the updates of a rollout.
Defaults are those of verl's ppo_trainer and ppo_megatron_trainer.
"""

from __future__ import annotations

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.shell import Command

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_MEGATRON, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"
_ENGINE = {
    f"{_ROLLOUT}.gpu_memory_utilization": ("gpu_memory_utilization", float),
    f"{_ROLLOUT}.enforce_eager": ("enforce_eager", bool),
    f"{_ROLLOUT}.max_num_batched_tokens": ("max_num_batched_tokens", int),
    f"{_ROLLOUT}.max_num_seqs": ("max_num_seqs", int),
    f"{_ROLLOUT}.enable_chunked_prefill": ("enable_chunked_prefill", bool),
    f"{_ROLLOUT}.enable_prefix_caching": ("enable_prefix_caching", bool),
}


def convert(draft: Draft, commands: list[Command], gpus: int | None, rows: int | None) -> None:
    """Put what a verl run amounts to."""
    megatron = _is_megatron(draft)
    nodes = each = None
    if gpus is None:
        nodes, each = draft.whole("trainer.nnodes", 1), draft.whole("trainer.n_gpus_per_node", 8)
    else:
        draft.drop("trainer.nnodes", "--gpus takes precedence over it")
        draft.drop("trainer.n_gpus_per_node", "--gpus takes precedence over it")
    parts.machines(draft, nodes, each, gpus, "trainer.n_gpus_per_node")
    _algorithm(draft)
    sequence = _layout(draft, megatron)
    updates, prompts = _batch(draft)
    _micro_batches(draft, sequence)
    parts.model(draft, "actor_rollout_ref.model.path")
    for name in ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank"):
        if draft.whole(name, 0, least=0):
            parts.adapters(draft, name, f"{_OPTIM}.lr")
    _generation(draft)
    _length(draft, updates, prompts, rows, megatron)
    _saving(draft, updates)


def _is_megatron(draft: Draft) -> bool:
    strategies = ("fsdp", "fsdp2", "megatron", "veomni")
    config = str(draft.variables.get("config_name", ""))
    named = any(name.startswith(f"{_MEGATRON}.") for name in draft.values) or "megatron" in config
    return draft.choice(f"{_ACTOR}.strategy", strategies, "megatron" if named else "fsdp") == "megatron"


def _algorithm(draft: Draft) -> None:
    estimator = draft.text("algorithm.adv_estimator")
    if estimator not in ("grpo", "grpo_vectorized"):
        given = (
            f"algorithm.adv_estimator={estimator}"
            if estimator
            else "algorithm.adv_estimator is not given (its default is gae)"
        )
        draft.refuse(f"{given}: advantages here are those of grpo, which needs no critic")
    mode = draft.text(f"{_ACTOR}.policy_loss.loss_mode") or "vanilla"
    if mode not in ("vanilla", "gspo"):
        text = "is another objective: gspo and vanilla (grpo) have a counterpart here"
        draft.refuse(f"{_ACTOR}.policy_loss.loss_mode={mode} {text}")
    draft.put("algorithm.name", "gspo" if mode == "gspo" else "grpo", f"{_ACTOR}.policy_loss.loss_mode")
    for side in ("low", "high"):
        name = f"{_ACTOR}.clip_ratio_{side}"
        empty = name in draft.values and draft.text(name) is None  # only then is clip_ratio read
        default = draft.number(f"{_ACTOR}.clip_ratio", 0.2) if empty else 0.2
        draft.put(f"algorithm.clip_{side}", draft.number(name, default), name)
    aggregation = draft.text(f"{_ACTOR}.loss_agg_mode") or "token-mean"
    if mode == "vanilla" and aggregation not in ("token-mean", "seq-mean-token-mean"):
        text = "here are the means over tokens (token-mean) and over sequences (seq-mean-token-mean)"
        draft.refuse(f"{_ACTOR}.loss_agg_mode={aggregation} is another objective: {text}")
    elif mode == "vanilla":
        kind = "token" if aggregation == "token-mean" else "sequence"
        draft.put("algorithm.aggregation", kind, f"{_ACTOR}.loss_agg_mode")
        draft.drop(f"{_ACTOR}.clip_ratio_c", "the ratio has no second bound for negative advantages here")
    else:
        if aggregation != "seq-mean-token-mean":
            draft.drop(
                f"{_ACTOR}.loss_agg_mode", "gspo always takes the mean over sequences; verl ignores this argument too"
            )
        draft.drop(f"{_ACTOR}.clip_ratio_c", "gspo does not use it; verl ignores it too")
    if draft.switch(f"{_ACTOR}.use_kl_loss"):
        weight = draft.number(f"{_ACTOR}.kl_loss_coef", 0.001)
        draft.put("algorithm.kl_beta", weight, f"{_ACTOR}.kl_loss_coef")
        if (draft.text(f"{_ACTOR}.kl_loss_type") or "low_var_kl") not in ("low_var_kl", "k3"):
            draft.drop(f"{_ACTOR}.kl_loss_type", "the estimator here is k3 (low_var_kl)")
    if draft.switch("algorithm.use_kl_in_reward"):
        text = "the KL term is part of the loss here (algorithm.kl_beta), never of the reward"
        draft.refuse(f"algorithm.use_kl_in_reward=True: {text}")
    if draft.number(f"{_ACTOR}.entropy_coeff", 0.0, least=-1.0):
        draft.drop(f"{_ACTOR}.entropy_coeff", "the loss has no entropy bonus here")
    if draft.switch("algorithm.filter_groups.enable"):
        draft.drop(
            "algorithm.filter_groups.enable", "groups with equal rewards stay in the batch here, and add no gradient"
        )


def _layout(draft: Draft, megatron: bool) -> int:
    """Put the layout; return how many GPUs share a sequence, by which a token budget per GPU is multiplied."""
    if not megatron:
        name = f"{_ACTOR}.ulysses_sequence_parallel_size"
        size = draft.whole(name, draft.whole(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 1)) or 1
        if size > 1:
            text = "Ulysses splits heads and this splits the sequence; as many GPUs share one sequence"
            draft.put("parallel.context_parallel_size", size, name, text)
        draft.put("optimizer.distributed", True, comment="FSDP also shards weights and gradients")
        draft.assumed.append(
            "FSDP has no tensor parallelism: if the model does not fit on one GPU, raise "
            "parallel.tensor_model_parallel_size"
        )
        if draft.switch("actor_rollout_ref.model.enable_gradient_checkpointing", True):
            draft.put("memory.recompute_granularity", "full", "actor_rollout_ref.model.enable_gradient_checkpointing")
        return size
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
    distributed = draft.switch(f"{_MEGATRON}.use_distributed_optimizer", True)
    draft.put("optimizer.distributed", distributed, f"{_MEGATRON}.use_distributed_optimizer")
    offload = [draft.switch(f"{_MEGATRON}.{name}_offload") for name in ("param", "grad", "optimizer")]
    if any(draft.given(f"{_MEGATRON}.{name}_offload") for name in ("param", "grad", "optimizer")):
        draft.put(
            "memory.offload_trainer",
            any(offload),
            f"{_MEGATRON}.param_offload",
            "weights, gradients and optimizer together",
        )
    if draft.switch(f"{_OPTIM}.override_optimizer_config.optimizer_cpu_offload"):
        draft.put("memory.offload_optimizer", True)
    draft.skip(f"{_REF}.megatron.*")
    _transformer(draft)
    return cp


def _transformer(draft: Draft) -> None:
    """Put the settings that verl passes to Megatron-Core unchanged."""
    grain = draft.text(f"{_TRANSFORMER}.recompute_granularity")
    if grain:
        grain = draft.choice(f"{_TRANSFORMER}.recompute_granularity", ("selective", "full"), "full")
        draft.put("memory.recompute_granularity", grain)
    if grain == "full":
        method = draft.choice(f"{_TRANSFORMER}.recompute_method", ("uniform", "block"), "uniform")
        draft.put("memory.recompute_method", method)
        draft.put("memory.recompute_num_layers", draft.whole(f"{_TRANSFORMER}.recompute_num_layers", 1))
    elif grain and (modules := draft.texts(f"{_TRANSFORMER}.recompute_modules")):
        draft.put("memory.recompute_modules", modules)
    if draft.given(f"{_TRANSFORMER}.moe_router_dtype"):
        kinds = {"fp32": "float32", "fp64": "float64"}
        kind = draft.choice(f"{_TRANSFORMER}.moe_router_dtype", tuple(kinds), "fp32")
        draft.put("moe.router_dtype", kinds[kind])
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if draft.given(f"{_TRANSFORMER}.{name}"):
            draft.put(name.replace("_", ".", 1), draft.number(f"{_TRANSFORMER}.{name}", 0.0))
    replay = {"disabled": "off", "R2": "old_logprobs", "R3": "rollout"}
    mode = draft.choice(f"{_ACTOR}.router_replay.mode", tuple(replay), "disabled")
    draft.put("moe.router_replay", replay[mode], f"{_ACTOR}.router_replay.mode")


def _batch(draft: Draft) -> tuple[int, int]:
    """Put the batch sizes; return (updates of a rollout, prompts of a rollout)."""
    group = draft.whole(f"{_ROLLOUT}.n", 1) or 1
    prompts = draft.whole("data.train_batch_size", 1024) or 1024
    mini = draft.whole(f"{_ACTOR}.ppo_mini_batch_size", 256) or 256
    epochs = draft.whole(f"{_ACTOR}.ppo_epochs", 1) or 1
    if group < 2:
        draft.refuse(f"{_ROLLOUT}.n={group}: must be 2 or more, since one completion has no group to compare with")
    if mini > prompts:
        text = f"must not be above data.train_batch_size ({prompts}): both count prompts"
        draft.wrong(f"{_ACTOR}.ppo_mini_batch_size", text)
    draft.put("batch.num_generations", group, f"{_ROLLOUT}.n")
    draft.put("batch.global_batch_size", mini * group, comment=f"ppo_mini_batch_size {mini} prompts x n {group}")
    text = f"data.train_batch_size {prompts} prompts a rollout, {mini} an update"
    parts.rollout_size(draft, mini * group, prompts * group, text)
    draft.put("batch.num_iterations", epochs, f"{_ACTOR}.ppo_epochs")
    updates = max(1, -(-prompts // mini)) * epochs
    draft.differs += [
        f"data.train_batch_size {prompts} and ppo_mini_batch_size {mini} count prompts; sizes here count completions: "
        f"{prompts * group} of a rollout, {mini * group} of an update (n {group})",
        f"a step of verl is a rollout with its {updates} updates, and a step here is one update: "
        f"total_training_steps, save_freq, test_freq and warm-up are multiplied by {updates}",
    ]
    return updates, prompts


def _micro_batches(draft: Draft, sequence: int) -> None:
    """Put the micro-batch size or token budget of each pass. `sequence`: GPUs that share one sequence."""
    dynamic = draft.switch(f"{_ACTOR}.use_dynamic_bsz")
    passes = (
        ("", f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu", dynamic),
        (
            "logprob_",
            f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
            draft.switch(f"{_ROLLOUT}.log_prob_use_dynamic_bsz", dynamic),
        ),
        (
            "reference_",
            f"{_REF}.log_prob_micro_batch_size_per_gpu",
            f"{_REF}.log_prob_max_token_len_per_gpu",
            draft.switch(f"{_REF}.log_prob_use_dynamic_bsz", dynamic),
        ),
    )
    budget = (draft.whole(passes[0][2], 16384) if any(by_tokens for *_, by_tokens in passes) else None) or 16384
    for prefix, size, tokens, by_tokens in passes:
        if by_tokens and (not prefix or draft.given(tokens)):
            most = draft.whole(tokens, budget) or budget
            text = f"{tokens.rpartition('.')[2]} {most}" + (
                f" x {sequence} GPUs that share a sequence" if sequence > 1 else ""
            )
            draft.put(f"batch.{prefix}micro_batch_tokens", most * sequence, tokens, text)
            if draft.given(size):
                draft.drop(size, "verl does not read it with use_dynamic_bsz")
        elif not by_tokens and draft.given(size):
            draft.put(f"batch.{prefix}micro_batch_size", draft.whole(size), size)
    if not dynamic and not draft.given(passes[0][1]):
        draft.assumed.append(f"{passes[0][1]} is not given: set batch.micro_batch_size or batch.micro_batch_tokens")
    for name in (
        f"{_ACTOR}.ppo_micro_batch_size",
        f"{_ROLLOUT}.log_prob_micro_batch_size",
        f"{_REF}.log_prob_micro_batch_size",
    ):
        draft.drop(name, "it is the size of all GPUs together: give the size per GPU") if draft.given(name) else None


def _generation(draft: Draft) -> None:
    draft.put("rollout.top_k", draft.whole(f"{_ROLLOUT}.top_k", -1, least=-1) or -1, f"{_ROLLOUT}.top_k")
    parts.engine(draft, _ENGINE)
    if (name := draft.text(f"{_ROLLOUT}.name") or "vllm") != "vllm":
        draft.drop(f"{_ROLLOUT}.name", f"vLLM generates here; arguments of {name} do not come along")
    if (draft.whole(f"{_ROLLOUT}.data_parallel_size", 1) or 1) > 1:
        text = "an engine has only tensor parallelism: raise rollout.tensor_parallel_size if the model does not fit"
        draft.drop(f"{_ROLLOUT}.data_parallel_size", text)
        draft.drop(f"{_ROLLOUT}.expert_parallel_size", text)
    parts.data(draft, "data.train_files", "data.train")
    parts.data(draft, "data.val_files", "data.eval")
    cut = draft.choice("data.truncation", ("error", "left", "right", "middle"), "error")
    overlong = (
        "drop" if draft.switch("data.filter_overlong_prompts") else "error" if cut == "error" else "truncate_left"
    )
    draft.put("data.overlong", overlong, "data.filter_overlong_prompts" if overlong == "drop" else "data.truncation")
    if overlong == "truncate_left" and cut != "left":
        draft.drop("data.truncation", "prompts are cut from the left here")


def _length(draft: Draft, updates: int, prompts: int, rows: int | None, megatron: bool) -> None:
    steps, epochs = draft.whole("trainer.total_training_steps"), draft.whole("trainer.total_epochs", 30) or 30
    made = f"{updates} updates of a rollout"
    whole: int | None = None
    if steps is not None:
        whole = steps * updates
        draft.put("run.max_steps", whole, comment=f"total_training_steps {steps} x {made}")
        draft.drop("trainer.total_epochs", "total_training_steps takes precedence over it")
    elif rows is not None:
        whole = max(1, rows // prompts * epochs * updates)
        draft.put("run.max_steps", whole, comment=f"{epochs} epochs of {rows} // {prompts} rollouts x {made}")
    else:
        parts.steps_unknown(draft, f"trainer.total_epochs {epochs}")
    rate = draft.number(f"{_OPTIM}.lr", 1e-6) or 0.0
    draft.put("optimizer.lr", rate, f"{_OPTIM}.lr")
    clip = f"{_OPTIM}.clip_grad" if megatron or not draft.given(f"{_ACTOR}.grad_clip") else f"{_ACTOR}.grad_clip"
    draft.put("optimizer.clip_grad", draft.number(clip, 1.0), clip)
    if betas := draft.texts(f"{_OPTIM}.betas"):
        if len(betas) != 2:
            draft.wrong(f"{_OPTIM}.betas", "must be two numbers")
        else:
            for key, text in zip(("optimizer.adam_beta1", "optimizer.adam_beta2"), betas, strict=True):
                try:
                    draft.put(key, float(text), f"{_OPTIM}.betas")
                except ValueError:
                    draft.wrong(f"{_OPTIM}.betas", "must be two numbers")
    style = f"{_OPTIM}.lr_decay_style" if megatron else f"{_OPTIM}.lr_scheduler_type"
    if not megatron and not draft.given(style) and draft.given(f"{_OPTIM}.warmup_style"):
        style = f"{_OPTIM}.warmup_style"
    kind = draft.text(style) or "constant"
    if kind in ("constant", "linear", "cosine"):
        draft.put("optimizer.lr_decay_style", kind, style)
    else:
        draft.drop(style, "only constant, linear and cosine exist here; constant is set")
    if draft.given(f"{_OPTIM}.min_lr"):
        draft.put("optimizer.min_lr", draft.number(f"{_OPTIM}.min_lr", 0.0), f"{_OPTIM}.min_lr")
    elif share := draft.number(f"{_OPTIM}.min_lr_ratio", 0.0):
        draft.put("optimizer.min_lr", share * rate, f"{_OPTIM}.min_lr_ratio")
    warm = draft.whole(f"{_OPTIM}.lr_warmup_steps", -1, least=-1) or -1
    if warm > 0:
        text = f"lr_warmup_steps {warm} x {made}"
        draft.put("optimizer.lr_warmup_steps", warm * updates, f"{_OPTIM}.lr_warmup_steps", text)
    else:
        ratio = f"{_OPTIM}.lr_warmup_steps_ratio"
        parts.warmup(draft, draft.number(ratio, 0.0), ratio, whole)


def _saving(draft: Draft, updates: int) -> None:
    for name, key in (("trainer.save_freq", "checkpoint.interval"), ("trainer.test_freq", "eval.interval")):
        count = draft.whole(name, -1, least=-1) or -1
        if count > 0:
            draft.put(key, count * updates, name, f"{name} {count} x {updates} updates of a rollout")
        elif key == "checkpoint.interval":
            draft.drop(name, "the last step is saved here too; checkpoint.interval is what a failure costs")
    samples = draft.whole(f"{_ROLLOUT}.val_kwargs.n", 1) or 1
    if samples > 1:
        draft.put("eval.samples", samples, f"{_ROLLOUT}.val_kwargs.n")
        heat = f"{_ROLLOUT}.val_kwargs.temperature"
        draft.put("eval.temperature", draft.number(heat, 1.0) or 1.0, heat)
    parts.run_name(draft, ("trainer.experiment_name",))
    draft.skip("trainer.experiment_name")
    parts.trackers(draft, "trainer.logger", ("wandb",))
