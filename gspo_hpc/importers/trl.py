"""TRL: the YAML of a GRPOConfig, or ``accelerate launch … grpo.py`` and ``trl grpo`` with the same names as options.

There a batch size is what one process takes in one micro-batch, and steps_per_generation counts micro-batches.
An update has per_device_train_batch_size x processes x gradient_accumulation_steps completions. Defaults are those of
TRL 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gspo_hpc.importers import adapters, prompt_texts
from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.hf import evaluation, precision
from gspo_hpc.importers.inputs import yaml_value
from gspo_hpc.importers.objective import bonuses, corrections, loss_types, reward_models, rollouts, teachers, unsloth
from gspo_hpc.importers.placement import servers
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts.uses.hosts import server
from gspo_hpc.importers.versions import trl as versions
from gspo_hpc.importers.versions import trl_effects

_ENGINE = {
    "vllm_gpu_memory_utilization": ("gpu_memory_utilization", float),
    "vllm_enforce_eager": ("enforce_eager", bool),
    "vllm_enable_prefix_caching": ("enable_prefix_caching", bool),
}
# Arguments of open-r1's scripts, which make messages of each prompt.
_MADE_INTO_MESSAGES = ("system_prompt", "dataset_prompt_column")
_STYLES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
# Schedules of transformers without a warm-up, and those that are given no lr_scheduler_kwargs (its get_scheduler).
_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_UNREAD_KWARGS = ("constant", "constant_with_warmup")


def convert(draft: Draft, commands: list[Command], gpus: int | None, rows: int | None) -> None:
    """Put what a TRL run amounts to."""
    for name in ("pass_rate_min", "pass_rate_max"):
        if draft.given(name):
            draft.refuse(
                f"{name} is of open-r1's compute_pass_rate, which samples and filters rows, and trains nothing"
            )
    _refuse_older(draft)
    nodes, each = _processes(draft, gpus)
    unsloth.rewrite(draft, nodes * each)
    hosted = server(commands, "trl", "vllm-serve", r"trl[./]scripts[./]vllm_serve")
    if draft.switch("use_vllm") and _mode(draft, hosted is not None) == "server":
        servers.server(draft, nodes, each, hosted, "trl vllm-serve")
    else:
        tp = draft.whole("vllm_tensor_parallel_size", 1)
        draft.put("rollout.tensor_parallel_size", tp, "vllm_tensor_parallel_size")
        parts.engine(draft, _ENGINE, {"gpu_memory_utilization": 0.3} if draft.switch("use_vllm") else {})
    if draft.given("use_vllm") and not draft.switch("use_vllm"):
        draft.drop("use_vllm", "vLLM generates here in any case")
    draft.credit("rollout.tensor_parallel_size", "use_vllm", "vllm_mode")
    size = draft.whole("per_device_train_batch_size", 8) or 8
    accumulated = draft.whole("gradient_accumulation_steps", 1) or 1
    update = batch(draft, nodes * each, size, accumulated, "TRL")
    parts.model(draft, "model_name_or_path")
    parts.revision(draft, "model_name_or_path")
    adapters.of_trl(draft)
    precision.sharding(draft)
    draft.credit("memory.recompute_granularity", "gradient_checkpointing")
    if draft.switch("gradient_checkpointing", True):
        draft.put("memory.recompute_granularity", "full", "gradient_checkpointing", "whole layers, as in TRL")
    precision.put(draft)
    precision.gradients(draft)
    _generation(draft)
    loss_types.put(
        draft,
        draft.choice("importance_sampling_level", ("token", "sequence", "sequence_token"), "token"),
        draft.text("loss_type") or "dapo",
        draft.number("epsilon_high"),
        draft.number("epsilon", 0.2) or 0.0,
        draft.number("beta", 0.0) or 0.0,
    )
    level = draft.text("importance_sampling_level") or "token"
    rollouts.shared(draft, size * nodes * each, accumulated)
    bonuses.unbiased(draft, level)
    corrections.of_trl(draft, level)
    kinds = ("sum_then_normalize", "normalize_then_sum")
    if draft.choice("multi_objective_aggregation", kinds, kinds[0]) == kinds[1]:
        draft.put("algorithm.advantage", "gdpo", "multi_objective_aggregation")
        draft.put("algorithm.normalize_advantage", False, "multi_objective_aggregation")
    draft.credit("algorithm.advantage", "multi_objective_aggregation")
    bonuses.put(draft)
    loss_types.kept_out(draft)
    length(draft, update, rows, "linear", 1e-6)
    saving(draft, ("run_name", "output_dir"))
    versions.tell(draft)
    trl_effects.tell(draft)


# The number of machines, as accelerate, torchrun and deepspeed call it.
_MACHINES = ("num_machines", "nnodes", "num_nodes")


def _refuse_older(draft: Draft) -> None:
    """Refuse what arguments that end with transformers 4 train, where that is no run of those that remain."""
    if draft.switch("adafactor"):
        draft.refuse("adafactor: there is only AdamW here")
    older, present = "per_gpu_train_batch_size", "per_device_train_batch_size"
    if (size := draft.whole(older)) is None:
        return
    if size == (draft.whole(present, 8) or 8):
        draft.drop(older, f"{present} is the same")
    else:
        draft.wrong(
            older, f"transformers 4 takes it for {present}, and TRL sizes rollouts by the latter: give that alone"
        )


def _mode(draft: Draft, hosted: bool) -> str:
    """Return where vLLM runs. `hosted`: the script starts a server itself, which earlier versions use by default."""
    addressed = [name for name in draft.values if name.startswith("vllm_server_")]
    if "vllm_mode" in draft.values or not hosted or not addressed:
        return draft.choice("vllm_mode", ("colocate", "server"), "colocate")
    draft.assumed.append(
        f"vllm_mode is not given: server, since trl vllm-serve is started, and {addressed[0]} names it; TRL 1.9 needs "
        "vllm_mode=server for that"
    )
    return "server"


def _processes(draft: Draft, gpus: int | None) -> tuple[int, int]:
    """Put the machines: from the launcher, accelerate's YAML or --gpus; else one process is assumed."""
    env = draft.variables
    nodes = parts.positive(draft, "num_machines", next(filter(None, map(env.get, _MACHINES)), None))
    total = parts.positive(draft, "num_processes", env.get("num_processes"))
    each = parts.positive(draft, "nproc_per_node", env.get("nproc_per_node") or env.get("num_gpus"))
    if total is not None:
        if total % (nodes or 1):
            draft.refuse(f"num_processes {total} must be divisible by num_machines ({nodes})")
        nodes, each = (nodes, total // nodes) if nodes else parts.split_nodes(total)
    draft.credit("cluster.nodes", "num_machines")
    draft.credit("cluster.gpus_per_node", "num_processes")
    each = each or parts.visible(draft, env)
    unknown = "how many processes there are is not given in what is read, and a GRPOConfig does not say it"
    return parts.machines(draft, nodes, each, gpus, unknown)


def batch(draft: Draft, processes: int, size: int, accumulated: int, project: str) -> int:
    """Put the batch sizes; return completions per optimizer step.

    `size`: of a micro-batch of one process, of which `accumulated` make an update.
    """
    group = draft.whole("num_generations", 8, least=teachers.least_group(draft)) or 8
    passes = draft.whole("num_iterations", 1) or 1
    count, rollout = draft.whole("steps_per_generation"), draft.whole("generation_batch_size")
    micro = size * processes
    update = micro * accumulated
    both = count is not None and rollout is not None
    if both and project != "ms-swift":
        draft.refuse("generation_batch_size and steps_per_generation exclude each other: give one")
    elif both and rollout != (count or 1) * micro:
        text = f"must be steps_per_generation ({count}) x {micro}, the completions of a micro-batch of all processes"
        draft.wrong("generation_batch_size", text)
    if rollout is not None and count is None:
        if rollout % micro:
            text = f"must be divisible by per_device_train_batch_size ({size}) x processes ({processes}) = {micro}"
            draft.wrong("generation_batch_size", text)
    count = rollouts.micro_batches(draft, micro, accumulated)
    draft.variables[rollouts.SIZE] = str(count * micro)
    draft.put("batch.micro_batch_size", size, "per_device_train_batch_size")
    text = f"{size} per device x {processes} processes x {accumulated} accumulated"
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    draft.put("batch.global_batch_size", update, comment=text, of=sizes)
    sources = (*sizes, "steps_per_generation", "generation_batch_size")
    draft.put("batch.num_generations", group, "num_generations")
    draft.put("batch.num_iterations", passes, "num_iterations")
    if count % accumulated == 0:
        parts.rollout_size(
            draft,
            update,
            count * micro,
            f"{count} micro-batches in {project}, {accumulated} of them an update",
            sources,
        )
    elif accumulated % count == 0 and passes == 1 and count * micro % group:
        name = "steps_per_generation" if draft.given("steps_per_generation") else "generation_batch_size"
        draft.wrong(
            name, f"a rollout has {count * micro} completions then: no whole groups of num_generations ({group})"
        )
    elif accumulated % count == 0 and passes == 1:
        text = f"{accumulated // count} rollouts of one update in {project}"
        draft.put("batch.steps_per_generation", 1, comment=text, of=sources)
        text = f"an update is made of {accumulated // count} rollouts in {project}, all sampled by the same weights"
        draft.differs.append(f"{text}; here it is made of one")
    else:
        name = "steps_per_generation" if draft.given("steps_per_generation") else "generation_batch_size"
        low = max(1, count // accumulated) * accumulated
        text = f"{count} micro-batches are no whole updates of gradient_accumulation_steps ({accumulated}) each"
        draft.wrong(
            name, f"{text}; nearest: {low} or {low + accumulated}" if low < count else f"{text}; nearest: {low}"
        )
    draft.differs += [
        f"per_device_train_batch_size {size} is the batch of one process: an update has {update} completions "
        f"(x {processes} processes x gradient_accumulation_steps {accumulated})",
        f"steps_per_generation counts micro-batches in {project}, and optimizer steps here",
    ]
    return update


def _generation(draft: Draft) -> None:
    response = draft.whole("max_completion_length", 256) or 256
    window = "vllm_max_model_length" if draft.given("vllm_max_model_length") else "vllm_max_model_len"
    parts.prompt_length(draft, "max_prompt_length", window, response, "")
    draft.put("rollout.max_response_length", response, "max_completion_length")
    servers.window(draft, "trl vllm-serve")
    draft.put("rollout.top_k", draft.whole("top_k", 0, least=-1) or -1, "top_k")
    for name in ("tools", "environment_factory", "rollout_func"):
        if draft.values.get(name) not in (None, [], "None", "null"):
            parts.turns(draft, name)
    parts.data(draft, "dataset_name", "data.train")
    prompt_texts.template_variables(draft, "chat_template_kwargs")
    prompt_texts.messages_alone(draft, _MADE_INTO_MESSAGES)
    if draft.given("max_prompt_length") or is_unset(draft.values.get("max_prompt_length")):
        trl_effects.truncated(draft)
    reward_models.of_trl(draft)


def length(draft: Draft, update: int, rows: int | None, style: str, rate: float, told: str = "") -> None:
    """Put the length of the run and the schedule; `style` and `rate` are those where none is given.

    `told`: what `rows` are in words.
    """
    steps, (epochs, name) = draft.whole("max_steps", -1, least=-1), _epochs(draft)
    whole = steps if steps and steps > 0 else None
    if whole is None and not epochs:
        draft.wrong("num_train_epochs", "must be above 0: nothing is trained")
    epochs = epochs or 1.0
    if whole is not None:
        draft.put("run.max_steps", whole, "max_steps")
        if rows is None or whole > rollouts.updates(draft, update, rows, 1):
            rollouts.dropped(draft)
        draft.drop("num_train_epochs", "max_steps takes precedence over it")
        if name == "max_epochs":
            text = f"the original also ends after {epochs:g} passes over the data, and this one after max_steps alone"
            draft.drop(name, text)
            draft.assumed.append(f"{draft.label(name)}: {text}")
    elif rows is not None:
        whole = rollouts.updates(draft, update, rows, epochs)
        text = f"{name} {epochs:g} of {told or f'{rows} prompts'}"
        draft.put("run.max_steps", whole, comment=text, of=(name,))
    else:
        parts.epochs(draft, name, epochs)
        if epochs > 1 or draft.settings.get("batch.steps_per_generation", (1,))[0] > 1:
            rollouts.dropped(draft)
        if draft.given("max_steps"):
            draft.drop("max_steps", f"{name} decides where it is 0 or -1")
    rate = draft.number("learning_rate", rate) or 0.0
    draft.put("optimizer.lr", rate, "learning_rate")
    name = "lr_scheduler_type"
    style = draft.sure(name, style)
    if style in _STYLES:
        draft.put("optimizer.lr_decay_style", _STYLES[style], name)
    else:
        draft.drop("lr_scheduler_type", "only constant, linear and cosine exist here; constant is set")
    _least_rate(draft, rate, style)
    warm = draft.number("warmup_steps")
    if style in _WITHOUT_WARMUP:
        for name in ("warmup_steps", "warmup_ratio"):
            draft.drop(name, f"lr_scheduler_type {style} has no warm-up in transformers")
    elif warm and warm >= 1:
        draft.put("optimizer.lr_warmup_steps", math.floor(warm), "warmup_steps")
        draft.drop("warmup_ratio", "warmup_steps takes precedence over it")
    else:
        name = "warmup_steps" if warm else "warmup_ratio"
        parts.warmup(draft, warm or draft.number("warmup_ratio"), name, whole, up=True)
    if (kind := draft.sure("optim", "adamw_torch").removeprefix("paged_")).split("_")[0] != "adamw":
        draft.refuse(f"optim {kind}: there is only AdamW here")
    if draft.given("optim"):
        draft.drop("optim", "it is AdamW here in any case")


def _epochs(draft: Draft) -> tuple[float | None, str]:
    """Return the passes over the data, and the argument that decides them: max_epochs of ms-swift ends a run early."""
    name, ends = "num_train_epochs", "max_epochs"
    epochs = draft.number(name, 3.0)
    if ends not in draft.source.table.known or (most := draft.whole(ends)) is None:
        return epochs, name
    if epochs is not None and epochs <= most:
        draft.drop(ends, f"{name} ({epochs:g}) ends the run, and not later")
        return epochs, name
    draft.drop(name, f"{ends} ({most}) ends the run before, and only the rate is stretched over it there")
    return float(most), ends


def _least_rate(draft: Draft, rate: float, style: str) -> None:
    """Put the least rate, which transformers has for cosine_with_min_lr alone; say what else is in the arguments."""
    name = "lr_scheduler_kwargs"
    raw = draft.values.get(name)
    given = yaml_value(raw) if isinstance(raw, str) else raw
    if not isinstance(given, Mapping) or not given:
        return
    if style in _UNREAD_KWARGS:
        draft.drop(name, f"transformers does not read it for lr_scheduler_type {style}")
        return
    left = {key: value for key, value in given.items() if value is not None}
    if style == "cosine_with_min_lr":
        share, least = left.pop("min_lr_rate", None), left.pop("min_lr", None)
        try:
            if share is not None:
                text = f"min_lr_rate {float(share):g} of the learning rate"
                draft.put("optimizer.min_lr", parts.rounded(float(share) * rate), comment=text, of=(name,))
            elif least is not None:
                draft.put("optimizer.min_lr", float(least), name)
        except (ValueError, TypeError):
            draft.wrong(name, "min_lr_rate and min_lr must be numbers")
    if style.startswith("cosine") and left.get("num_cycles") == 0.5:  # half a wave, as here
        draft.credit("optimizer.lr_decay_style", name)
        del left["num_cycles"]
    if left:
        draft.drop(name, f"{', '.join(map(str, left))} of lr_scheduler_type {style}: no counterpart here")


def saving(draft: Draft, names: tuple[str, ...], evaluated: str = "no") -> None:
    """Put when is saved and evaluated, what tracks the run, and its name: of the first argument that gives one.

    `evaluated`: the default of eval_strategy, or never. Where it is steps, that is as often as the run is saved.
    """
    by_steps = (saved := draft.choice("save_strategy", ("steps", "epoch", "no", "best"), "steps")) == "steps"
    every = evaluation.interval(draft, draft.number("save_steps", 500.0) or 0.0)
    if by_steps and every >= 1:
        draft.put("checkpoint.interval", int(every), "save_steps")
        draft.credit("checkpoint.interval", "save_strategy")
    else:
        name = "save_strategy" if not by_steps else "save_steps"
        draft.drop(name, "set checkpoint.interval: optimizer steps between two checkpoints; the last is always saved")
    if evaluated == "never":
        evaluation.never(draft)
    else:
        strategy = draft.choice("eval_strategy", ("no", "steps", "epoch"), evaluated)
        evaluation.put(draft, strategy, int(every) if evaluated == "steps" and by_steps and every >= 1 else None)
    parts.kept(draft, "save_total_limit", saved=saved != "no")
    parts.run_name(draft, names)
    parts.output(draft, "output_dir")
    if draft.given("report_to"):
        parts.trackers(draft, "report_to", ())
    for name, key in (("wandb_project", "tracking.wandb_project"), ("project", "tracking.project")):
        if (project := draft.text(name)) and not is_unset(project):
            draft.put(key, project, name)
