"""Every setting that may differ between two attempts of one run has a reason here for which that is the same run.

Takes a second. It would catch a setting that is let through without one, and a new setting of a section that is open.
"""

from __future__ import annotations

from gspo_hpc.config.changes import MAY_CHANGE, may_change
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import as_dict

# Sections in which no setting reaches what is trained. Of the others each setting is named below.
OPEN = {
    "tracking": "what is recorded, and where",
    "slurm": "how the job is asked for",
    "notify": "who is told",
}
REASONS = {
    "how long the run goes; the learning rate must not depend on it": ("run.max_steps",),
    "where the same directory lies": ("run.dir",),
    "which machines it runs on: the update is the same sum in another order": (
        *("cluster.nodes", "cluster.gpus_per_node", "cluster.generation_gpus_per_node", "cluster.threads_per_rank"),
        *("cluster.gpu", "cluster.gpu_memory_gb", "cluster.network_gb_per_s"),
    ),
    "how the model is cut over ranks: the same sum in another order": (
        *("parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"),
        *("parallel.virtual_pipeline_model_parallel_size", "parallel.context_parallel_size"),
        *("parallel.num_layers_in_first_pipeline_stage", "parallel.num_layers_in_last_pipeline_stage"),
        *("parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"),
        *("parallel.sequence_parallel", "parallel.overlap_grad_reduce", "parallel.overlap_param_gather"),
        *("parallel.teacher_tensor_model_parallel_size", "parallel.teacher_pipeline_model_parallel_size"),
        *("parallel.teacher_context_parallel_size", "parallel.teacher_expert_model_parallel_size"),
        *("moe.token_dispatcher", "optimizer.distributed"),
    ),
    "where values wait, or whether they are computed again: they are the same": (
        *("memory.recompute_granularity", "memory.recompute_modules", "memory.recompute_method"),
        *("memory.recompute_num_layers", "memory.offload_trainer", "memory.offload_parts"),
        *("memory.offload_optimizer",),
    ),
    "how a batch is cut into passes: the same sum in another order": (
        *("batch.micro_batch_size", "batch.micro_batch_tokens"),
        *("batch.logprob_micro_batch_size", "batch.logprob_micro_batch_tokens"),
        *("batch.reference_micro_batch_size", "batch.reference_micro_batch_tokens"),
    ),
    "how many engines there are, and their memory: they sample from the same distribution": (
        *("rollout.tensor_parallel_size", "rollout.engines_per_node", "rollout.kv_cache_gb"),
        *("rollout.sleep_level", "rollout.engine.gpu_memory_utilization"),
    ),
    "prompts that are drawn beyond those that are used": ("rollout.oversampling_factor",),
    "which gap between engine and trainer ends the run": ("rollout.probe_max_gap", "rollout.probe_mean_gap"),
    "how an engine of a reward model is cut, and its memory: the scores are the same": (
        *("reward.models[].tensor_parallel_size", "reward.models[].gpu_memory_utilization"),
        *("reward.models[].kv_cache_gb",),
    ),
    "how many processes grade, and their memory: the rewards are the same": ("reward.workers", "reward.memory_gb"),
    "what judges may use in all: what they said stays, and a run that ended for it goes on": (
        *("judges.max_requests", "judges.max_prompt_tokens", "judges.max_completion_tokens", "judges.max_cost"),
        *("judges.used_up",),
    ),
    "where programs of the model run: what they may use is the same": (
        *("sandbox.kind", "sandbox.image", "sandbox.url", "sandbox.readable"),
    ),
    "how many processes answer for an environment: its answers are the same": ("environment.workers",),
    "when the model is evaluated, which trains nothing": ("eval.interval", "eval.before", "eval.after"),
    "when a checkpoint is written, and how many are kept": (
        *("checkpoint.interval", "checkpoint.keep", "checkpoint.async_save"),
    ),
    "what is waited for, and when the run is given up": (
        *("faults.max_restarts", "faults.bringup_timeout", "faults.heartbeat_timeout", "faults.hang_timeout"),
        *("faults.restart_above_memory", "faults.max_engine_restarts", "faults.engine_timeout"),
        *("faults.max_skipped_steps",),
    ),
}


def test_each_setting_that_may_change_has_a_reason() -> None:
    reasoned = [key for keys in REASONS.values() for key in keys]
    assert len(reasoned) == len(set(reasoned))
    settings = {f"{section}.{key}" for section, values in as_dict(from_dict({})).items() for key in values}
    open_ = {key for key in settings | MAY_CHANGE if may_change(key) and not key.endswith(".*")}
    assert {key for key in open_ if key.split(".")[0] not in OPEN} == set(reasoned)


def test_each_open_section_has_a_reason() -> None:
    sections = {key.removesuffix(".*") for key in MAY_CHANGE if key.endswith(".*")}
    assert sections - {key.split(".")[0] for keys in REASONS.values() for key in keys} == set(OPEN)
