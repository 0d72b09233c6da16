"""ms-swift on Hugging Face's trainer: ``swift rlhf --rlhf_type grpo …``.

There a batch size is what one process takes in one micro-batch, and steps_per_generation counts micro-batches, as in
TRL. An update has per_device_train_batch_size x processes x gradient_accumulation_steps completions. Defaults are those
of ms-swift 4.
"""

from __future__ import annotations

from gspo_hpc.importers import adapters, prompt_texts, swift, swift_ray, trl
from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.hf import precision
from gspo_hpc.importers.objective import rollouts
from gspo_hpc.importers.placement import swift as placement
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.versions import swift as versions


def convert(draft: Draft, commands: list[Command], gpus: int | None, rows: int | None) -> None:
    """Put what a run of ms-swift amounts to."""
    swift.check(draft)
    nodes, each = placement.machines(draft, gpus, swift_ray.machines(draft))
    _devices(draft)
    placement.hosting(draft, nodes, each, commands)
    if draft.given("use_vllm") and not draft.switch("use_vllm"):
        draft.drop("use_vllm", "vLLM generates here in any case")
    draft.credit("rollout.tensor_parallel_size", "use_vllm")
    update = _batch(draft, nodes * each)
    _layout(draft)
    parts.model(draft, "model")
    parts.revision(draft, "model")
    prompt_texts.images(draft)
    parts.router(draft, "model")
    kind = adapters.kind_of_tuner(draft, "lora")
    rate = 1e-4 if kind != "full" else 1e-5
    adapters.of_swift(draft, kind, "learning_rate", rate)
    swift.dtype(draft)
    _masters(draft, kind)
    precision.gradients(draft)
    swift.generation(draft)
    swift.objective(draft)
    rollouts.scaled(draft, draft.whole("per_device_train_batch_size", 1) or 1, nodes * each)
    rows, told = swift.training_rows(draft, rows)
    trl.length(draft, update, rows, "cosine", rate, told)
    strategy = {"no": "no", "epoch": "epoch"}.get(draft.text("save_strategy") or "", "steps")
    evaluated = strategy if swift.held_out(draft) else "never"
    trl.saving(draft, ("swanlab_exp_name", "run_name", "output_dir"), evaluated)
    if not draft.given("report_to"):
        draft.put("tracking.wandb", "disabled", comment="tensorboard is the default of ms-swift")
        draft.put("tracking.tensorboard", True)


def _masters(draft: Draft, kind: str) -> None:
    """Tell that all weights are trained in 16 bits, where nothing keeps them in 32; `kind`: what is trained."""
    dtype = str(draft.settings.get("model.dtype", ("bfloat16",))[0])
    sharded = draft.given("deepspeed") or draft.given("fsdp")
    if kind == "full" and "float32" not in (dtype, draft.text("torch_dtype")) and not sharded:
        draft.differs.append(f"weights are trained in {dtype} there, without DeepSpeed; the optimizer has float32 here")


def _devices(draft: Draft) -> None:
    """Leave out on which GPUs one process puts its model."""
    if draft.given("device_map"):
        draft.drop("device_map", "parallel.* cuts the model")


def _batch(draft: Draft, processes: int) -> int:
    """Put the batch sizes; return completions per optimizer step."""
    size = draft.whole("per_device_train_batch_size", 1) or 1
    accumulated = versions.accumulated(draft, size, processes)
    return trl.batch(draft, processes, size, accumulated, "ms-swift")


def _layout(draft: Draft) -> None:
    name = "sequence_parallel_size"
    if (size := draft.whole(name, 1) or 1) > 1:
        text = "as many GPUs share one sequence; an update has as many completions all the same"
        draft.put("parallel.context_parallel_size", size, name, text)
    draft.credit("parallel.context_parallel_size", name)
    precision.sharding(draft)
    draft.credit("memory.recompute_granularity", "gradient_checkpointing")
    if draft.switch("gradient_checkpointing", True):
        draft.put("memory.recompute_granularity", "full", "gradient_checkpointing", "whole layers, as there")
    swift.offload(draft)
