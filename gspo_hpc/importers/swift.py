"""Megatron-SWIFT: ``megatron rlhf --rlhf_type grpo …``, argument by argument.

Its batch sizes count completions as ours do, and steps_per_generation counts optimizer steps. Defaults are
those of ms-swift 4.
"""

from __future__ import annotations

import math
from fractions import Fraction

from gspo_hpc.importers import adapters, prompt_texts
from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.hf import evaluation
from gspo_hpc.importers.objective import advantages, corrections, groups, loss_types, reward_models, rollouts, teachers
from gspo_hpc.importers.placement import swift as placement
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.versions import swift as versions

_ENGINE = {
    "vllm_gpu_memory_utilization": ("gpu_memory_utilization", float),
    "vllm_enforce_eager": ("enforce_eager", bool),
    "vllm_max_num_seqs": ("max_num_seqs", int),
    "vllm_enable_prefix_caching": ("enable_prefix_caching", bool),
    "vllm_disable_cascade_attn": ("disable_cascade_attn", bool),
}


def convert(draft: Draft, commands: list[Command], gpus: int | None, rows: int | None) -> None:
    """Put what a Megatron-SWIFT run amounts to."""
    check(draft)
    nodes, each = placement.machines(draft, gpus)
    placement.hosting(draft, nodes, each, commands)
    _layout(draft)
    update = _batch(draft)
    parts.model(draft, "model")
    parts.revision(draft, "model")
    for name in ("mcore_model", "load"):
        if draft.given("model") and draft.given(name):
            draft.assumed.append(
                f"{draft.label(name)}: weights are read from there in the original, and from model.path here"
            )
    prompt_texts.images(draft)
    kind = adapters.kind_of_tuner(draft, "full")
    adapters.of_swift(draft, kind, "lr", 1e-4)
    generation(draft)
    objective(draft)
    rollouts.scaled(draft, draft.whole("micro_batch_size", 1) or 1, _ranks(draft, nodes * each))
    _length(draft, update, nodes * each, rows, kind)
    _saving(draft)
    if held_out(draft):
        _evaluation(draft)
    else:
        evaluation.never(draft)


_INSTEAD = {
    "gkd": "; its divergence is over the whole vocabulary. On-policy distillation here is that of --rlhf_type grpo "
    "with --teacher_model and --beta 0: algorithm.teacher, the reverse divergence by sampled tokens"
}


def check(draft: Draft) -> None:
    """Refuse runs of ms-swift that are no GRPO, or follow a teacher or another loss besides."""
    kind = draft.text("rlhf_type")
    if kind != "grpo":
        given = f"--rlhf_type {kind}" if kind else "--rlhf_type is not given (its default is dpo)"
        draft.refuse(f"{given}: only --rlhf_type grpo has a counterpart here{_INSTEAD.get(str(kind), '')}")
    draft.credit("algorithm.name", "rlhf_type")
    for name in ("chord_sft_dataset", "advantage_reweight"):
        if draft.texts(name):
            more = "the loss follows more than rewards then, which has no counterpart here"
            draft.refuse(f"{draft.label(name)}: {more}")
    if draft.number("sdar_loss_coef", 0.0):
        draft.refuse(f"{draft.label('sdar_loss_coef')}: the loss has a term of distillation then")
    if draft.whole("teacher.gpus", 0, least=0):
        draft.refuse(f"{draft.label('teacher.gpus')}: settings of a teacher are not carried over")


def objective(draft: Draft) -> None:
    """Put the algorithm; refuse another one."""
    loss_types.put(
        draft,
        draft.choice("importance_sampling_level", ("token", "sequence", "sequence_token"), "token"),
        draft.text("loss_type") or versions.loss(draft),
        draft.number("epsilon_high"),
        draft.number("epsilon", 0.2) or 0.0,
        draft.number("beta", 0.04) or 0.0,
    )
    corrections.of_swift(draft, draft.text("importance_sampling_level") or "token")
    if advantages.in_reward(draft) and draft.settings["algorithm.kl_beta"][0]:
        text = "from the log-probs of the engine here, and of the trainer there"
        draft.put("algorithm.kl_placement", "reward", "kl_in_reward", text)
        draft.put("algorithm.kl_estimator", "k1", "kl_in_reward")
    draft.credit("algorithm.kl_beta", "kl_in_reward")
    groups.of_swift(draft)
    loss_types.kept_out(draft)
    adapters.reference(draft)
    teachers.of_swift(draft)


def _layout(draft: Draft) -> None:
    experts = any(draft.given(name) for name in draft.values if name.startswith(("moe_", "expert_")))
    if experts:
        size = draft.whole("expert_tensor_parallel_size", 1)
        draft.put(
            "parallel.expert_tensor_parallel_size",
            size,
            "expert_tensor_parallel_size",
            "it does not follow tensor_model_parallel_size",
        )
    split = draft.switch("sequence_parallel")
    draft.put("parallel.sequence_parallel", split, "sequence_parallel")
    if split and draft.settings.get("parallel.tensor_model_parallel_size", (1, ""))[0] == 1:
        draft.put("parallel.sequence_parallel", False, comment="it needs tensor_model_parallel_size above 1")
        draft.drop("sequence_parallel", "it needs tensor_model_parallel_size above 1")
    grain = draft.choice("recompute_granularity", ("selective", "full", "none"), "selective")
    draft.put("memory.recompute_granularity", None if grain == "none" else grain, "recompute_granularity")
    if grain == "full":
        method = draft.choice("recompute_method", ("uniform", "block"), "uniform")
        draft.put("memory.recompute_method", method, "recompute_method")
        draft.put("memory.recompute_num_layers", draft.whole("recompute_num_layers", 1), "recompute_num_layers")
    elif modules := draft.texts("recompute_modules", known=True):
        draft.put("memory.recompute_modules", modules, of=("recompute_modules",))
    offload(draft)
    _kernels(draft)
    dtypes = {"none": None, "fp32": "float32", "fp64": "float64"}
    if draft.given("moe_router_dtype"):
        draft.put(
            "moe.router_dtype", dtypes[draft.choice("moe_router_dtype", tuple(dtypes), "fp32")], "moe_router_dtype"
        )
    _dispatcher(draft)
    if draft.text("moe_router_load_balancing_type") == "aux_loss":
        draft.drop(
            "moe_router_load_balancing_type", "so experts are balanced here, too, where moe.aux_loss_coeff is given"
        )
    replay = {"disabled": "off", "R2": "old_logprobs", "R3": "rollout"}
    mode = draft.choice("router_replay_mode", tuple(replay), "disabled")
    draft.put("moe.router_replay", replay[mode], "router_replay_mode")
    if draft.given("fp8_format"):
        draft.put("model.fp8", draft.choice("fp8_format", ("e4m3", "hybrid"), "hybrid"), "fp8_format")
        recipes = ("delayed", "tensorwise", "blockwise", "mxfp8")
        draft.put("model.fp8_recipe", draft.choice("fp8_recipe", recipes, "delayed"), "fp8_recipe")
    dtype(draft)


def _kernels(draft: Draft) -> None:
    """Put the kernels of attention, of which flash_3 and others name a version, and the type of gradients."""
    name = "attention_backend"
    if (kind := draft.sure(name, "")).startswith("flash_"):
        draft.put("model.attention_backend", "flash", name, f"{kind}: the version that is installed counts here")
    elif kind == "local":
        draft.drop(name, "layers are PyTorch's or Transformer Engine's here (model.layers)")
    elif kind:
        draft.put("model.attention_backend", kind, name)
    half, names = draft.text("main_grads_dtype") == "bf16", ("main_grads_dtype", "accumulate_allreduce_grads_in_fp32")
    if half:
        draft.put("optimizer.grad_reduce_in_fp32", False, names[0])
        draft.drop(names[1], "main_grads_dtype decides it")
    for given in filter(draft.given, () if half else names):
        draft.drop(given, "gradients are summed in float32 here, as there with bf16 in any case")


def offload(draft: Draft) -> None:
    """Put what of the trainer moves to host memory while engines generate; gradients go with the model."""
    names = {"weights": "offload_model", "gradients": "offload_model", "optimizer": "offload_optimizer"}
    parts.offload(draft, names)


def held_out(draft: Draft) -> bool:
    """Put the share of the data that is trained on; return whether the run evaluates on any rows."""
    share = draft.number("split_dataset_ratio", versions.share_held_out(draft)) or 0.0
    if name := never_evaluated(draft):
        draft.drop("split_dataset_ratio", f"ms-swift does not read it with {name} no")
        return True
    if draft.texts("val_dataset"):
        draft.drop("split_dataset_ratio", "ms-swift does not read it beside a val_dataset")
        return True
    if draft.switch("streaming"):
        draft.drop("split_dataset_ratio", "ms-swift does not read it with streaming")
        return False
    if not share < 1:
        draft.wrong("split_dataset_ratio", "must be below 1: nothing is left to train on")
    elif share:
        text = f"split_dataset_ratio {share:g} of the rows are held out"
        draft.put("data.train_ratio", round(1 - share, 12), comment=text, of=("split_dataset_ratio",))
    else:
        draft.credit("data.train_ratio", "split_dataset_ratio")
    return share > 0


def never_evaluated(draft: Draft) -> str:
    """Return the argument by which a run evaluates nothing, empty if there is none: eval_strategy follows the saves."""
    if draft.given("eval_strategy") or draft.source.project != "ms-swift":
        return "eval_strategy" if draft.text("eval_strategy") == "no" else ""
    return "save_strategy" if draft.text("save_strategy") == "no" else ""


def training_rows(draft: Draft, rows: int | None) -> tuple[int | None, str]:
    """Return how many prompts are trained on, None if that is not known, and how many they are of in words.

    `rows` (--rows) goes before the numbers of the data sets (file.jsonl#1000). Of each data set, ms-swift first takes
    its number of rows, and of these it holds out int(rows x split_dataset_ratio), or 1.
    """
    names = draft.texts("dataset")
    numbers = [text.rpartition("#")[2] for text in names if "#" in text]
    counted = bool(numbers) and len(numbers) == len(names) and all(text.isdecimal() for text in numbers)
    sizes = [rows] if rows is not None else [int(text) for text in numbers] if counted else []
    if not sizes:
        return None, ""
    share = draft.number("split_dataset_ratio", versions.share_held_out(draft)) or 0.0
    if not 0 < share < 1 or never_evaluated(draft) or draft.texts("val_dataset") or draft.switch("streaming"):
        return sum(sizes), f"{sum(sizes)} prompts"
    trained = max(1, sum(size - max(int(size * share), 1) for size in sizes))
    here = math.floor(sum(sizes) * (1 - Fraction(str(share))))
    if here != trained:
        draft.differs.append(f"of {sum(sizes)} prompts, ms-swift trains on {trained}, and data.train_ratio on {here}")
    return trained, f"{trained} prompts, the other {sum(sizes) - trained} of {sum(sizes)} being held out"


def dtype(draft: Draft) -> None:
    """Put the type that the trainer computes in: fp16 follows from torch_dtype float32, too, unless it is given."""
    kind = draft.choice("torch_dtype", ("bfloat16", "float16", "float32"), "bfloat16")
    brain = draft.switch("bf16", kind == "bfloat16")
    half = draft.switch("fp16", kind != "bfloat16" and not (draft.given("bf16") and brain))
    found, text = "float16" if half else "bfloat16" if brain else kind, ""
    if not any(map(draft.given, ("torch_dtype", "fp16", "bf16"))):
        text = "torch_dtype is not given: the type in the model's config.json there, taken for bfloat16"
    if kind == "float32" and half and not draft.given("fp16"):
        text = "ms-swift makes fp16 true where torch_dtype is float32, unless --fp16 false is given"
    if draft.given("bf16") and not brain and found == "bfloat16":
        draft.drop("bf16", "weights in bfloat16 compute in it there all the same")
    if kind == "float32" and found != kind and draft.source.project == "ms-swift" and not draft.given("deepspeed"):
        draft.differs.append(
            f"weights are in float32 there, and products of matrices alone in {found} (autocast): norms, embeddings "
            "and what layers add to have 16 bits here (model.dtype)"
        )
    draft.put("model.dtype", found, comment=text, of=("torch_dtype", "fp16", "bf16"))


def _dispatcher(draft: Draft) -> None:
    """Put the token dispatcher of the experts; allgather needs equally many tokens from each rank, never so here."""
    fast = draft.switch("moe_enable_deepep")
    kind = draft.choice("moe_token_dispatcher_type", ("allgather", "alltoall", "flex"), "alltoall")
    if kind == "allgather":
        draft.drop(
            "moe_token_dispatcher_type",
            "it needs equally many tokens on every rank; here it is alltoall or flex",
        )
    elif draft.given("moe_token_dispatcher_type") or fast:
        names = ("moe_token_dispatcher_type", "moe_enable_deepep")
        draft.put("moe.token_dispatcher", "flex" if fast else kind, of=names)


def _batch(draft: Draft) -> int:
    """Put the batch sizes; return completions per optimizer step."""
    update = draft.whole("global_batch_size", 16) or 16
    draft.put("batch.global_batch_size", update, "global_batch_size")
    group = draft.whole("num_generations", 8, least=teachers.least_group(draft))
    draft.put("batch.num_generations", group, "num_generations")
    return update


def generation(draft: Draft) -> None:
    """Put how completions are sampled, and the data."""
    response = versions.response(draft)
    versions.prompts(draft, response)
    versions.sampling(draft)
    if draft.texts("multi_turn_scheduler"):
        parts.turns(draft, "multi_turn_scheduler")
    megatron = draft.source.project != "ms-swift"  # whose engines are vLLM's in any case
    parts.engine(draft, _ENGINE, {"gpu_memory_utilization": 0.9} if megatron or draft.switch("use_vllm") else {})
    _sleep(draft)
    if not parts.sources(draft, "dataset", "interleave_prob"):
        parts.data(draft, "dataset", "data.train")
    parts.data(draft, "val_dataset", "data.eval")
    versions.registered(draft)
    prompt_texts.columns(draft)
    prompt_texts.system(draft)
    prompt_texts.thinking(draft)
    prompt_texts.of_base(draft)
    prompt_texts.of_ray(draft, response)
    placement.served(draft)
    reward_models.of_swift(draft)
    graded = ("reward_funcs", "reward_model", "reward_model_plugin", "teacher_model")
    if not any(name in draft.values for name in graded):
        draft.assumed.append(
            "neither reward_funcs nor reward_model is given: ms-swift then needs an environment (use_gym_env) for "
            "rewards, perhaps of several turns; here a reward function grades one completion"
        )


def _sleep(draft: Draft) -> None:
    """Put the sleep level; 0, their default, is none here."""
    level = draft.choice("sleep_level", ("0", "1", "2"), "0")
    if level != "0" and draft.settings.get("rollout.mode", ("",))[0] == "server":
        draft.drop("sleep_level", "engines of a server do not sleep there; here they have GPUs of their own, too")
    elif level != "0":
        draft.put("rollout.sleep_level", int(level), "sleep_level")
    elif draft.given("sleep_level"):
        draft.drop("sleep_level", "engines always sleep here while the trainer works, at level 1 or 2")


def _ranks(draft: Draft, world: int) -> int:
    """Return how many of `world` GPUs have different completions."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return max(1, world // math.prod(int(draft.settings.get(f"parallel.{name}", (1,))[0]) for name in sizes))


def _length(draft: Draft, update: int, world: int, rows: int | None, kind: str) -> None:
    """Put the length of the run, and the schedule that follows from it; `kind`: of the tuner."""
    steps, epochs, name = draft.whole("train_iters"), draft.number("num_train_epochs"), draft.name("num_train_epochs")
    rows, basis = training_rows(draft, rows)
    if epochs and steps is not None and name == "max_epochs":  # of version 3
        draft.assumed.append(
            f"{draft.label('num_train_epochs')} takes precedence over train_iters: so it is since 3.11; up to 3.10 "
            f"train_iters {steps} is the length, unless these epochs end before"
        )
    if epochs and rows:
        at = {key.split(".")[1]: value for key, (value, _) in draft.settings.items()}
        ranks = _ranks(draft, world)
        whole = rows // (at.get("micro_batch_size", 1) * ranks) * at.get("micro_batch_size", 1) * ranks
        steps = int(whole * at.get("num_generations", 8) * epochs // update)
        before = ", before train_iters" if draft.given("train_iters") else ""
        text = f"{name} {epochs:g} of {basis}{before}"
        draft.put("run.max_steps", max(1, steps), comment=text, of=("num_train_epochs",))
        draft.drop("train_iters", f"{name} takes precedence over it")
    elif epochs:
        parts.epochs(draft, "num_train_epochs", epochs)
        draft.drop("train_iters", f"{name} takes precedence over it")
        steps = None
    elif steps is not None:
        draft.put("run.max_steps", steps, "train_iters")
    else:
        parts.steps_unknown(draft, "neither train_iters nor num_train_epochs")
    draft.put("optimizer.lr", draft.number("lr", 1e-5 if kind == "full" else 1e-4), "lr")
    style = draft.sure("lr_decay_style", "cosine")
    if style in ("constant", "linear", "cosine"):
        draft.put("optimizer.lr_decay_style", style, "lr_decay_style")
    else:
        draft.drop("lr_decay_style", "only constant, linear and cosine exist here; constant is set")
    if (warm := draft.number("lr_warmup_fraction")) is not None:
        draft.drop("lr_warmup_iters", "lr_warmup_fraction takes precedence over it")
        draft.settings.pop("optimizer.lr_warmup_steps", None)
    parts.warmup(draft, warm, "lr_warmup_fraction", draft.whole("lr_decay_iters") or steps, least=1)
    draft.drop("lr_decay_iters", "the rate falls until run.max_steps here")
    if (kind := draft.sure("optimizer", "adam")) != "adam":
        draft.refuse(f"--optimizer {kind}: there is only adam here")
    if draft.given("optimizer"):
        draft.drop("optimizer", "it is Adam here in any case")


def _evaluation(draft: Draft) -> None:
    """Put when Megatron-SWIFT evaluates: at every eval_steps, as often as it saves by default, and at the end."""
    if draft.given("eval_iters") and draft.whole("eval_iters", -1, least=-1) == 0:
        for key in ("eval.before", "eval.after"):
            draft.put(key, False, comment="eval_iters is 0", of=("eval_iters",))
        draft.drop("eval_steps", "with eval_iters 0 nothing is evaluated")
        return
    every = draft.whole("eval_steps", None, least=0)
    if every is None and "eval_steps" not in draft.values:
        if draft.text("save_strategy") == "epoch":
            draft.assumed.append("it is evaluated once in an epoch there; set eval.interval: optimizer steps")
        else:
            draft.put("eval.interval", draft.whole("save_steps", 500), comment="as often as save_steps")
    elif every == 0:
        draft.drop("eval_steps", "it is evaluated at the end alone then, as here without eval.interval")
    elif every is not None:
        draft.put("eval.interval", every, "eval_steps")
    draft.put("eval.before", False, comment="evaluated there only at its own steps, and at the last")
    draft.put("eval.after", True)
    draft.differs.append(
        "evaluations sample as training does there; here they are greedy, unless eval.samples is above 1"
    )


def _saving(draft: Draft) -> None:
    if draft.choice("save_strategy", ("steps", "epoch"), "steps") == "epoch":
        text = "save_strategy epoch saves once in an epoch there; set checkpoint.interval: optimizer steps"
        draft.settings.pop("checkpoint.interval", None)
        for name in ("save_steps", "save_strategy"):
            draft.drop(name, text)
        draft.assumed.append(text)
    draft.credit("checkpoint.interval", "save_strategy")
    parts.kept(draft, "save_total_limit", saved=True)
    parts.run_name(draft, ("wandb_exp_name", "swanlab_exp_name", "output_dir"))
    parts.output(draft, "output_dir")
    parts.trackers(draft, "report_to", ("tensorboard",))
