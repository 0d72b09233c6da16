"""verl: overrides of ``python -m verl.trainer.main_ppo``, or its YAML, key by key.

There ``data.train_batch_size`` and ``ppo_mini_batch_size`` count prompts, and a training step is a whole
rollout with all its updates: step counts, save_freq, test_freq and warm-up are multiplied by the updates of a rollout.
Defaults are those of verl's ppo_trainer and ppo_megatron_trainer.
"""

from __future__ import annotations

import math

from gspo_hpc.importers import adapters, prompt_texts, report, tables
from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null
from gspo_hpc.importers.objective import groups, teachers
from gspo_hpc.importers.objective import verl as objective
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.verl_layout import ACTOR, OPTIM, REF, ROLLOUT, engine, put_layout
from gspo_hpc.importers.versions import verl as versions

_ENGINE = {
    f"{ROLLOUT}.gpu_memory_utilization": ("gpu_memory_utilization", float),
    f"{ROLLOUT}.enforce_eager": ("enforce_eager", bool),
    f"{ROLLOUT}.max_num_batched_tokens": ("max_num_batched_tokens", int),
    f"{ROLLOUT}.max_num_seqs": ("max_num_seqs", int),
    f"{ROLLOUT}.enable_chunked_prefill": ("enable_chunked_prefill", bool),
    f"{ROLLOUT}.enable_prefix_caching": ("enable_prefix_caching", bool),
}
_MODEL = "actor_rollout_ref.model"
_ADAPTERS = f"{_MODEL}.lora_adapter_path"
_LORA = adapters.Lora(
    f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora_alpha",
    f"{_MODEL}.target_modules",
    alpha_default=16.0,
    others=(f"{_MODEL}.exclude_modules",),
)
_MEGATRON_LORA = adapters.Lora(
    f"{_MODEL}.lora.rank",
    f"{_MODEL}.lora.alpha",
    f"{_MODEL}.lora.target_modules",
    f"{_MODEL}.lora.dropout",
    targets_default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    targets_told=f"linear_qkv and linear_fc1: {adapters.ONE_FIRST}",
    others=(f"{_MODEL}.lora.exclude_modules", f"{_MODEL}.lora.adapter_path"),
)
_STEPS = "trainer.total_training_steps"


def convert(draft: Draft, commands: list[Command], gpus: int | None, rows: int | None) -> None:
    """Put what a verl run amounts to."""
    trainer = engine(draft)
    megatron = trainer == "megatron"
    nodes = each = None
    if gpus is None:
        nodes, each = draft.whole("trainer.nnodes", 1), draft.whole("trainer.n_gpus_per_node", 8)
        draft.credit("cluster.nodes", "trainer.nnodes")
        draft.credit("cluster.gpus_per_node", "trainer.n_gpus_per_node")
    else:
        draft.drop("trainer.nnodes", "--gpus takes precedence over it")
        draft.drop("trainer.n_gpus_per_node", "--gpus takes precedence over it")
    parts.machines(draft, nodes, each, gpus, "trainer.n_gpus_per_node")
    objective.put(draft)
    sequence = put_layout(draft, trainer)
    updates, prompts = _batch(draft)
    _micro_batches(draft, sequence)
    parts.model(draft, "actor_rollout_ref.model.path")
    parts.router(draft, "actor_rollout_ref.model.path", bridged=megatron)
    for lora in (_LORA, _MEGATRON_LORA):
        if not draft.whole(lora.rank, 0, least=0):
            draft.drop(lora.rank, report.OFF)
        elif (lora is _MEGATRON_LORA) is megatron:
            adapters.put(draft, lora.rank, lora)
        else:
            draft.drop(lora.rank, "verl does not read it with this model_engine")
    if not megatron:
        adapters.of_folder(draft, _ADAPTERS, _LORA.rank)
    _generation(draft)
    whole = _length(draft, updates, prompts, rows)
    _optimizer(draft, updates, whole, trainer)
    _saving(draft, updates)
    versions.tell(draft, trainer, updates)


def _batch(draft: Draft) -> tuple[int, int]:
    """Put the batch sizes; return (updates of a rollout, prompts of a rollout)."""
    group = draft.whole(f"{ROLLOUT}.n", 1) or 1
    prompts = _prompts(draft)
    mini = draft.whole(f"{ACTOR}.ppo_mini_batch_size", 256) or 256
    epochs = draft.whole(f"{ACTOR}.ppo_epochs", 1) or 1
    if group < 2 and not teachers.is_alone(draft):
        text, name = "must be 2 or more, since one completion has no group to compare with", f"{ROLLOUT}.n"
        value = draft.values.get(name)
        why = f"{draft.why_unset(value)}; it " if isinstance(value, str) and is_unset(value) else ""
        draft.refuse(f"{draft.label(name)}{'' if draft.given(name) or why else ' (its default is 1)'}: {why}{text}")
    if mini > prompts and draft.switch(f"{ACTOR}.use_dynamic_bsz"):
        draft.differs.append(
            f"ppo_mini_batch_size {mini} is above data.train_batch_size {prompts}: with use_dynamic_bsz verl makes one "
            f"update of a rollout all the same, up to 0.7 with its loss times {prompts}/{mini}"
        )
        mini = prompts
    if mini > prompts:
        text = f"must not be above data.train_batch_size ({prompts}): both count prompts"
        draft.wrong(f"{ACTOR}.ppo_mini_batch_size", text)
    draft.put("batch.num_generations", group, f"{ROLLOUT}.n")
    sizes = (f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n")
    text = f"ppo_mini_batch_size {mini} prompts x n {group}"
    draft.put("batch.global_batch_size", mini * group, comment=text, of=sizes)
    text = f"data.train_batch_size {prompts} prompts a rollout, {mini} an update"
    parts.rollout_size(draft, mini * group, prompts * group, text, of=("data.train_batch_size", *sizes))
    draft.put("batch.num_iterations", epochs, f"{ACTOR}.ppo_epochs")
    updates = max(1, -(-prompts // mini)) * epochs
    draft.differs += [
        f"data.train_batch_size {prompts} and ppo_mini_batch_size {mini} count prompts; sizes here count completions: "
        f"{prompts * group} of a rollout, {mini * group} of an update (n {group})",
    ]
    if updates > 1:
        draft.differs.append(
            f"a step of verl is a rollout with its {updates} updates, and a step here is one update: "
            f"total_training_steps, save_freq, test_freq and warm-up are multiplied by {updates}"
        )
    return updates, prompts


def _prompts(draft: Draft) -> int:
    """Return the prompts of a rollout. Where no groups are filtered out, the DAPO recipe trains on all it generates."""
    prompts = draft.whole("data.train_batch_size", 1024) or 1024
    more = draft.whole("data.gen_batch_size", prompts) or prompts
    if groups.of_verl(draft, prompts, more):
        return prompts
    if more != prompts and "dapo" in draft.variables.get("entry", ""):
        draft.credit("batch.steps_per_generation", "data.gen_batch_size")
        text = (
            f"data.gen_batch_size {more}: without filter_groups the recipe trains on all prompts that it generates for"
        )
        draft.differs.append(f"{text}, not on data.train_batch_size ({prompts})")
        draft.drop(
            "data.train_batch_size", f"without filter_groups, data.gen_batch_size ({more}) is what a rollout has"
        )
        return more
    if more != prompts:
        draft.wrong(
            "data.gen_batch_size",
            f"without algorithm.filter_groups it is the size of a rollout in some versions of verl, and "
            f"data.train_batch_size ({prompts}) in others: give one of them",
        )
    elif draft.given("data.gen_batch_size"):
        draft.credit("batch.steps_per_generation", "data.gen_batch_size")
    return prompts


def _micro_batches(draft: Draft, sequence: int) -> None:
    """Put the micro-batch size or token budget of each pass. `sequence`: GPUs that share one sequence."""
    dynamic = draft.switch(f"{ACTOR}.use_dynamic_bsz")
    switches = {
        "": f"{ACTOR}.use_dynamic_bsz",
        "logprob_": f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        "reference_": f"{REF}.log_prob_use_dynamic_bsz",
    }
    passes = (
        ("", f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"),
        ("logprob_", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
        ("reference_", f"{REF}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_max_token_len_per_gpu"),
    )
    by_tokens = {prefix: draft.switch(name, dynamic) for prefix, name in switches.items()}
    budget = (draft.whole(passes[0][2], 16384) if any(by_tokens.values()) else None) or 16384
    for prefix, size, tokens in passes:
        kind = "tokens" if by_tokens[prefix] else "size"
        draft.credit(f"batch.{prefix}micro_batch_{kind}", switches[prefix])
        if by_tokens[prefix]:
            if not prefix or draft.given(tokens):
                most = draft.whole(tokens) or budget
                more = f" x {sequence} GPUs that share a sequence" if sequence > 1 else ""
                text = f"{tokens.rpartition('.')[2]} {most}{more}"
                draft.put(f"batch.{prefix}micro_batch_tokens", most * sequence, tokens, text)
            for given in (size, size.removesuffix("_per_gpu")):
                draft.drop(given, "verl does not read it with use_dynamic_bsz")
            continue
        if (count := draft.whole(size)) is not None:
            draft.put(f"batch.{prefix}micro_batch_size", count, size)
        if draft.given(together := size.removesuffix("_per_gpu")):
            draft.drop(together, "it is the size of all GPUs together: give the size per GPU")
    if not dynamic and not draft.given(passes[0][1]) and not is_unset(draft.values.get(passes[0][1])):
        draft.assumed.append(f"{passes[0][1]} is not given: set batch.micro_batch_size or batch.micro_batch_tokens")


def _generation(draft: Draft) -> None:
    if (kind := draft.text("trainer.v1.trainer_mode") or "sync") != "sync" and draft.switch("trainer.use_v1", True):
        parted = "completions that an update interrupts go on with newer weights, and here they are whole before it"
        draft.refuse(f"trainer.v1.trainer_mode={kind}: {parted if kind == 'colocate_async' else f'it {report.AHEAD}'}")
    mode = draft.text(f"{ROLLOUT}.mode")
    if mode is not None and mode not in ("sync", "async") and not is_unset(mode):
        draft.assumed.append(
            f"{draft.label(f'{ROLLOUT}.mode')}: verl has sync and async, and this may generate otherwise"
        )
    if draft.switch("trainer.val_only"):
        draft.refuse("trainer.val_only=True: nothing is trained, only evaluated")
    draft.put("rollout.top_k", draft.whole(f"{ROLLOUT}.top_k", -1, least=-1) or -1, f"{ROLLOUT}.top_k")
    parts.engine(draft, _ENGINE, {"gpu_memory_utilization": 0.5})
    _lengths(draft)
    if (name := draft.text(f"{ROLLOUT}.name") or "vllm") != "vllm":
        draft.drop(f"{ROLLOUT}.name", f"vLLM generates here; arguments of {name} do not come along")
    draft.credit("rollout.tensor_parallel_size", f"{ROLLOUT}.name")
    if (draft.whole(f"{ROLLOUT}.data_parallel_size", 1) or 1) > 1:
        text = "an engine has only tensor parallelism: raise rollout.tensor_parallel_size if the model does not fit"
        draft.drop(f"{ROLLOUT}.data_parallel_size", text)
        draft.drop(f"{ROLLOUT}.expert_parallel_size", text)
    if (draft.whole(f"{ROLLOUT}.nnodes", 0, least=0) or 0) > 0:
        draft.refuse(
            f"{draft.label(f'{ROLLOUT}.nnodes')}: engines have nodes of their own there, and share the trainer's here"
        )
    if draft.switch(f"{ROLLOUT}.multi_turn.enable"):
        parts.turns(
            draft, f"{ROLLOUT}.multi_turn.enable", "where the rows have an agent_name, which decides it since 0.7"
        )
    prompt_texts.own_rows(draft, "data.custom_cls.path", f"{ROLLOUT}.agent.agent_loop_manager_class")
    parts.data(draft, "data.train_files", "data.train")
    parts.data(draft, "data.val_files", "data.eval")
    cut = draft.choice("data.truncation", ("error", "left", "right", "middle"), "error")
    overlong = (
        "drop" if draft.switch("data.filter_overlong_prompts") else "error" if cut == "error" else "truncate_left"
    )
    draft.put("data.overlong", overlong, "data.filter_overlong_prompts" if overlong == "drop" else "data.truncation")
    draft.credit("data.overlong", "data.filter_overlong_prompts", "data.truncation")
    if overlong == "truncate_left" and cut != "left":
        draft.drop("data.truncation", "prompts are cut from the left here")


def _lengths(draft: Draft) -> None:
    """Put the longest prompt and response: of the engine, whose own two are those of the data where not given."""
    asked = draft.whole("data.max_prompt_length", 512) or 512
    name = f"{ROLLOUT}.prompt_length"
    longest = draft.whole(name, asked) or asked
    if longest < asked:
        draft.put("rollout.max_prompt_length", longest, name)
        draft.drop("data.max_prompt_length", f"prompts of more than {name} ({longest}) are cut to that before")
        draft.assumed.append(
            f"prompts of more than {longest} and at most {asked} tokens are cut from the left in verl "
            f"({draft.label(name)}): here data.overlong says what becomes of them"
        )
    elif longest == asked:
        draft.credit("rollout.max_prompt_length", name)
    else:
        draft.drop(name, f"no prompt has more than data.max_prompt_length ({asked}) tokens")
    told = draft.whole("data.max_response_length", 512) or 512
    name = f"{ROLLOUT}.response_length"
    if (response := draft.whole(name)) is not None:
        draft.put("rollout.max_response_length", response, name)
        if response != told:
            text = f"{name} ({response}) is what the engine generates at most"
            draft.drop("data.max_response_length", text)
    window = draft.whole(f"{ROLLOUT}.max_model_len")
    most = min(longest, asked) + (response or told)
    if window is not None and window < most:
        text = f"an engine of verl stops there, and here at {most} tokens, prompt and response together"
        draft.assumed.append(f"{draft.label(f'{ROLLOUT}.max_model_len')}: {text}")
    prompt_texts.template_variables(draft, "data.apply_chat_template_kwargs")
    if draft.text(name := "actor_rollout_ref.model.custom_chat_template"):
        text = "prompts go through the tokenizer's own chat template here"
        draft.drop(name, text)
        draft.assumed.append(f"{name}: {text}")


def _length(draft: Draft, updates: int, prompts: int, rows: int | None) -> int | None:
    """Put the length of the run; return its steps, None if they are not known."""
    drawn, most = prompts, ""
    if "dapo" in draft.variables.get("entry", "") and draft.switch("algorithm.filter_groups.enable"):
        drawn, most = draft.whole("data.gen_batch_size", prompts) or prompts, "at most "
    steps, epochs = draft.whole(_STEPS), draft.whole("trainer.total_epochs", 30) or 30
    made = f"{updates} updates of a rollout"
    whole: int | None = None
    if steps is not None and rows is not None and rows // drawn * epochs < steps:
        whole = max(1, rows // drawn * epochs * updates)
        text = f"{most}{epochs} epochs of {rows} // {drawn} rollouts x {made}, before total_training_steps {steps}"
        draft.put("run.max_steps", whole, comment=text, of=("trainer.total_epochs", _STEPS))
        text = f"{draft.label(_STEPS)} is what the learning rate decays over there, and run.max_steps here"
        draft.differs.append(f"{text}; the run ends before, after its epochs")
    elif steps is not None:
        whole = steps * updates
        draft.put("run.max_steps", whole, comment=f"total_training_steps {steps} x {made}", of=(_STEPS,))
        ends = f"a run of verl also ends after {epochs} epochs, if these come before total_training_steps"
        draft.drop("trainer.total_epochs", ends if rows is None else f"the steps come before {epochs} epochs")
        if rows is None:
            draft.assumed.append(f"{ends}: give --rows N")
    elif rows is not None:
        whole = max(1, rows // drawn * epochs * updates)
        text = f"{most}{epochs} epochs of {rows} // {drawn} rollouts x {made}"
        draft.put("run.max_steps", whole, comment=text, of=("trainer.total_epochs",))
    elif drawn > prompts:
        count = math.floor(epochs * prompts / drawn * 10**6) / 10**6
        text = f"{epochs} of verl, whose rollouts use up {drawn} prompts each, and train on {prompts}"
        draft.put("run.max_epochs", count, "trainer.total_epochs", text)
    else:
        parts.epochs(draft, "trainer.total_epochs", epochs)
    if rows is None or min(epochs, (steps or math.inf) / max(1, rows // drawn)) > 1:
        text = f"an epoch of verl is {most}rows // {drawn} rollouts, and drops what is left of the rows"
        more = "" if whole is not None else ": --rows N gives run.max_steps as there"
        if whole is not None or epochs > 1:
            draft.differs.append(f"{text}; here that goes into the next epoch{more}")
        elif updates > 1:
            draft.differs.append(f"{text}; here up to {updates - 1} more updates are made of it{more}")
    return whole


def _optimizer(draft: Draft, updates: int, whole: int | None, trainer: str) -> None:
    """Put the optimizer and its schedule. `whole`: steps of the run, if they are known."""
    megatron = trainer == "megatron"
    rate = draft.number(f"{OPTIM}.lr", 1e-6) or 0.0
    draft.put("optimizer.lr", rate, f"{OPTIM}.lr")
    if "adam" not in (kind := draft.sure(f"{OPTIM}.optimizer", "adam")).lower():
        draft.refuse(f"{OPTIM}.optimizer={kind}: there is only AdamW here")
    if draft.given(f"{OPTIM}.optimizer"):
        draft.drop(f"{OPTIM}.optimizer", "it is AdamW here in any case")
    clip = f"{OPTIM}.clip_grad" if megatron or not draft.given(f"{ACTOR}.grad_clip") else f"{ACTOR}.grad_clip"
    draft.put("optimizer.clip_grad", draft.number(clip, 1.0), clip)
    betas = draft.texts(f"{OPTIM}.betas")
    if betas and megatron:
        draft.drop(f"{OPTIM}.betas", "verl does not pass it on to Megatron, which has 0.9 and 0.999")
    elif betas:
        if len(betas) != 2:
            draft.wrong(f"{OPTIM}.betas", "must be two numbers")
        else:
            for key, text in zip(("optimizer.adam_beta1", "optimizer.adam_beta2"), betas, strict=True):
                try:
                    draft.put(key, float(text), f"{OPTIM}.betas")
                except ValueError:
                    draft.wrong(f"{OPTIM}.betas", "must be two numbers")
    for key, beta in (("optimizer.adam_beta1", "adam_beta1"), ("optimizer.adam_beta2", "adam_beta2")) * megatron:
        if draft.given(name := f"{OPTIM}.override_optimizer_config.{beta}"):
            draft.put(key, draft.number(name, 0.9 if beta == "adam_beta1" else 0.999), name)
    eps = f"{OPTIM}.override_optimizer_config.{'adam_eps' if megatron else 'eps'}"
    if draft.given(eps) and trainer != "veomni":  # VeOmni's optimizer takes nothing of this mapping
        draft.put("optimizer.adam_eps", draft.number(eps, 1e-8), eps)
    style = f"{OPTIM}.lr_decay_style" if megatron else f"{OPTIM}.lr_scheduler_type"
    if not megatron and draft.given(older := f"{OPTIM}.warmup_style"):
        draft.drop(style, "warmup_style takes precedence over it")
        style = older
    kind = draft.sure(style, "cosine" if trainer == "veomni" else "constant")
    if kind in ("constant", "linear", "cosine"):
        draft.put("optimizer.lr_decay_style", kind, style)
    else:
        draft.drop(style, "only constant, linear and cosine exist here; constant is set")
    least = f"{OPTIM}.lr_min" if trainer == "veomni" else f"{OPTIM}.min_lr"
    if draft.given(least):
        draft.put("optimizer.min_lr", draft.number(least, 0.0), least)
    elif share := draft.number(f"{OPTIM}.min_lr_ratio", 0.0):
        draft.put("optimizer.min_lr", parts.rounded(share * rate), f"{OPTIM}.min_lr_ratio")
    name = f"{OPTIM}.lr_warmup_steps"
    warm = draft.whole(name, -1, least=-1) or 0
    ratio = f"{OPTIM}.lr_warmup_steps_ratio"
    if trainer == "veomni" and warm > 0:
        draft.drop(name, "verl's VeOmni reads lr_warmup_steps_ratio alone")
        warm = 0
    if warm > 0:
        text = f"lr_warmup_steps {warm} x {updates} updates of a rollout"
        draft.put("optimizer.lr_warmup_steps", warm * updates, name, text)
        draft.drop(ratio, "lr_warmup_steps takes precedence over it")
    else:
        share = draft.number(ratio, 0.0)
        if share and trainer != "veomni":
            draft.drop(name, "verl reads lr_warmup_steps_ratio where it is 0 or less")
        draft.credit("optimizer.lr_warmup_steps", name)
        parts.warmup(draft, share, ratio, whole)


def _saving(draft: Draft, updates: int) -> None:
    for name, key in (("trainer.save_freq", "checkpoint.interval"), ("trainer.test_freq", "eval.interval")):
        count = draft.whole(name, -1, least=-1) or -1
        if count > 0:
            draft.put(key, count * updates, name, f"{name} {count} x {updates} updates of a rollout")
        elif key == "checkpoint.interval" and not is_unset(draft.values.get(name)):
            draft.drop(name, "the last step is saved here too; checkpoint.interval is what a failure costs")
            text = (
                f"verl saves nothing ({name} -1{', its default' if not draft.given(name) else ''}), not even the last"
            )
            if "dapo" in draft.variables.get("entry", ""):
                text = "the DAPO recipe saves the last step alone"
            draft.put(key, tables.default_of(key), comment=text)
        elif key == "eval.interval" and not is_null(draft.values.get("data.val_files")):
            text = f"{name} {count}: verl evaluates neither during training nor after it (up to 0.2, after it)"
            draft.put("eval.after", False, comment=text, of=(name,))
        else:
            draft.credit(key, name)
    saved, val = (draft.whole("trainer.save_freq", -1, least=-1) or -1) > 0, f"{ROLLOUT}.val_kwargs"
    samples, heat = draft.whole(f"{val}.n", 1) or 1, draft.number(f"{val}.temperature", 0.0)
    if samples > 1 and heat:
        draft.put("eval.samples", samples, f"{val}.n")
        draft.put("eval.temperature", heat, f"{val}.temperature")
        draft.put("eval.top_p", draft.number(f"{val}.top_p", 1.0), f"{val}.top_p")
        draft.put("eval.top_k", draft.whole(f"{val}.top_k", -1, least=-1) or -1, f"{val}.top_k")
    elif samples > 1:
        draft.drop(f"{val}.n", "all are greedy at temperature 0, which is verl's default: one is enough")
    limits = ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep")
    limit = next((name for name in limits if draft.given(name)), limits[0])  # of several, the one that is given
    for name in limits:
        parts.kept(draft, name, saved=saved and name == limit)
    parts.run_name(draft, ("trainer.experiment_name",))
    parts.trackers(draft, "trainer.logger", ("wandb",))
