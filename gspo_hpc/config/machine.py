"""The sections about machines and how a model is spread over them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gspo_hpc.config.section import (
    WHOLE,
    Count,
    CountFrom0,
    Listed,
    Matching,
    Number,
    OneLine,
    PerNode,
    Positive,
    Section,
    Share,
    Texts,
    key,
)

Platform = Literal["cuda", "cpu"]


class Cluster(Section):
    """The machines: one rank per accelerator (on CPU: one rank per `gpus_per_node`)."""

    # At most several times the largest machines there are.
    nodes: Annotated[int, Field(ge=1, le=100_000), WHOLE] = key(1, "Nodes of the run.")
    gpus_per_node: PerNode = key(1, "GPUs of each node; on CPUs the ranks of each node.")
    generation_nodes: CountFrom0 = key(
        0, "Nodes, of `nodes`, that only generate while all the others only train; needs rollout.mode server."
    )
    generation_gpus_per_node: PerNode | None = key(
        None,
        "GPUs of each of the `generation_nodes`, which Slurm gives as a component of a heterogeneous job then; the "
        "default is gpus_per_node.",
    )
    platform: Platform = key("cuda", "What ranks compute on: GPUs, or CPUs.")
    threads_per_rank: Count | None = key(
        None, "CPU threads of one training rank; the default divides the cores of a node among its ranks."
    )
    gpu: str | None = key(
        None,
        "The GPU that `plan` estimates memory and time for, such as H100-80GB; it lists the names if it "
        "does not know one. It has no effect on a run.",
    )
    gpu_memory_gb: Positive | None = key(
        None,
        "GB of memory that a GPU has, for `plan`'s estimates: of a card that it does not know by name (memory is "
        "estimated then, time is not), or in place of what the card of `gpu` has.",
    )
    network_gb_per_s: Positive | None = key(
        None,
        "GB/s of one GPU to other nodes, one way, for `plan`'s estimates; the default is what such GPUs usually have.",
    )


class Model(Section):
    """The model that is trained: a Hugging Face folder (config.json, safetensors, tokenizer)."""

    path: str | None = key(
        None, "The Hugging Face folder of the model, or its name on the hub: OWNER/NAME, or OWNER/NAME@REVISION."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = key("bfloat16", "The type of weights and activations.")
    layers: Literal["auto", "torch", "transformer_engine"] = key(
        "auto",
        "The library that computes layers: torch needs no other package; auto takes Transformer Engine if it is "
        "installed and there are GPUs from Ampere on.",
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = key(
        "auto",
        "The kernels of Transformer Engine that compute attention (Megatron's attention_backend): auto lets it choose; "
        "flash is FlashAttention, fused is cuDNN's, unfused is made of matrix products.",
    )
    norms_in_fp32: bool = key(
        True,
        "Norms compute in fp32 and round once; false rounds to `model.dtype` before the weight multiplies, as norms of "
        "vLLM and transformers do, and needs the layers of torch.",
    )
    provider: Literal["own", "mcore_bridge"] = key(
        "own",
        "What builds the model: this package itself (own), for the families that it knows, or mcore-bridge "
        "(mcore_bridge), for other families, on GPUs.",
    )
    fp8: Literal["e4m3", "hybrid"] | None = key(
        None, "The 8-bit format of matrix products in Transformer Engine; hybrid uses e5m2 for gradients."
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = key(
        "delayed", "The recipe that scales values for 8 bits."
    )


class Adapter(Section):
    """LoRA adapters (arXiv 2106.09685): matrices of low rank, which are trained in place of the model's own weights."""

    type: Literal["lora"] | None = key(None, "What is trained: null is the whole model, lora its adapters alone.")
    path: str | None = key(
        None,
        "A folder with adapters in the format of peft that the run begins with; by default the first matrix is random "
        "and the second 0, so that nothing is added yet.",
    )
    rank: Count = key(8, "The rank of each adapter: rows of its first matrix, and columns of its second.")
    alpha: Positive = key(32.0, "An adapter's product is scaled by alpha / rank.")
    targets: Texts = key(
        ("all-linear",),
        "The layers that get an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj, or "
        "all-linear for all of these; and embed_tokens, in models whose head has weights of its own.",
    )
    dropout: Number = key(
        0.0,
        "Must be 0: a mask would have to be the same in every layout and in every pass, or the ratio between two "
        "passes over the same weights would not be 1.",
    )
    engine: Literal["auto", "merged", "adapters"] = key(
        "auto",
        "How engines get adapters: merged into the weights, all of which are sent then (merged), or as vLLM's own "
        "beside weights that stay (adapters). auto is adapters where engines compute in 16 bits, since merging rounds, "
        "and merged in float32, with run.deterministic on GPUs, and where vLLM's own cannot be.",
    )


class Parallel(Section):
    """Megatron-Core's parallel sizes, under Megatron's own names."""

    tensor_model_parallel_size: Count = key(1, "Ranks that share each layer.")
    pipeline_model_parallel_size: Count = key(1, "Pipeline stages that the layers are divided into.")
    virtual_pipeline_model_parallel_size: Count | None = key(
        None, "Chunks of layers on each pipeline rank, for the interleaved schedule."
    )
    num_layers_in_first_pipeline_stage: Count | None = key(
        None, "Layers of the first pipeline stage; by default all stages have equally many."
    )
    num_layers_in_last_pipeline_stage: Count | None = key(
        None, "Layers of the last pipeline stage, which also computes the head."
    )
    context_parallel_size: Count = key(1, "Ranks that share each sequence.")
    expert_model_parallel_size: Count = key(1, "Ranks that share the experts of a layer.")
    expert_tensor_parallel_size: Count | None = key(
        None, "Ranks that share each expert; the default is tensor_model_parallel_size."
    )
    sequence_parallel: bool = key(False, "Divide activations along the sequence where tensor parallelism does not.")
    teacher_tensor_model_parallel_size: Count | None = key(
        None,
        "Ranks that share each layer of algorithm.teacher; the default is that of the trainer, as for the next keys.",
    )
    teacher_pipeline_model_parallel_size: Count | None = key(
        None, "Pipeline stages that the layers of algorithm.teacher are divided into."
    )
    teacher_context_parallel_size: Count | None = key(None, "Ranks that share each sequence in algorithm.teacher.")
    teacher_expert_model_parallel_size: Count | None = key(
        None, "Ranks that share the experts of a layer of algorithm.teacher."
    )
    overlap_grad_reduce: bool = key(
        False, "Sum gradients over data-parallel ranks while further gradients are still being computed."
    )
    overlap_param_gather: bool = key(
        False, "With optimizer.distributed, gather weights while those that have arrived are already being used."
    )

    @property
    def teacher_sizes(self) -> dict[str, int]:
        """The sizes that are given for the teacher alone, by the trainer's names for them."""
        kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
        names = [f"{kind}_parallel_size" for kind in kinds]
        return {name: size for name in names if (size := getattr(self, f"teacher_{name}")) is not None}

    def of_teacher(self) -> Parallel:
        """Return the teacher's layout: this one, unless it has sizes of its own.

        With these, its stages have equally many layers, in one chunk each, and tensor parallelism comes with sequence
        parallelism, without which mixtures refuse it.
        """
        own: dict[str, int | None] = {**self.teacher_sizes}
        if all(getattr(self, name) == size for name, size in own.items()):
            return self
        own["virtual_pipeline_model_parallel_size"] = None
        own |= {f"num_layers_in_{end}_pipeline_stage": None for end in ("first", "last")}
        tp = own.get("tensor_model_parallel_size") or self.tensor_model_parallel_size
        return self.model_copy(update={**own, "sequence_parallel": tp > 1})


class Memory(Section):
    """Recomputation for the backward pass, under Megatron's names, and offloading to host memory."""

    recompute_granularity: Literal["selective", "full"] | None = key(
        None, "What is computed again for the backward pass: parts of each layer (selective), or whole layers (full)."
    )
    recompute_modules: Texts = key(
        ("core_attn",), "Parts for selective recomputation: core_attn, mlp, moe, shared_experts, layernorm and so on."
    )
    recompute_method: Literal["uniform", "block"] = key(
        "uniform",
        "With full recomputation: recompute all layers, in groups (uniform), or only the first layers of each stage "
        "(block).",
    )
    recompute_num_layers: Count = key(
        1, "With full recomputation: the layers of a group (uniform), or the layers that are computed again (block)."
    )
    offload_trainer: bool | None = key(
        None,
        "Move the trainer to host memory while engines generate; by default this is done on GPUs that both share.",
    )
    offload_parts: Annotated[tuple[Literal["weights", "gradients", "optimizer"], ...], Listed] = key(
        ("weights", "gradients", "optimizer"),
        "What offload_trainer moves, and what therefore comes back before an update; gradients are dropped.",
    )
    offload_optimizer: bool = key(
        False, "Keep the optimizer's state in host memory except for the moment in which it steps."
    )


class Moe(Section):
    """Mixtures of experts; these keys have no effect on models without experts."""

    router_dtype: Literal["float32", "float64"] | None = key(
        "float32", "The type in which the router computes; null means the model's own."
    )
    aux_loss_coeff: Number = key(
        0.0, "Weight of the load-balancing loss (Switch Transformer), which is computed per micro-batch."
    )
    z_loss_coeff: Number = key(0.0, "Weight of the loss that keeps the router's logits small (ST-MoE).")
    token_dispatcher: Literal["alltoall", "flex"] = key(
        "alltoall",
        "The dispatcher that takes tokens to their experts and back (Megatron's moe_token_dispatcher_type). flex uses "
        "DeepEP's fused kernels, on GPUs, for experts on several ranks.",
    )
    router_replay: Literal["off", "auto", "rollout", "old_logprobs"] = key(
        "off",
        "Send tokens to the experts that were chosen before: in the engine (rollout), or in the pass for old log-probs "
        "(old_logprobs). auto means rollout where vLLM reports its choices, which its CPU build does not.",
    )


_ADDRESS = Matching(
    r"(env:[A-Za-z_][A-Za-z0-9_]*|file:\S(?:.*\S)?)",
    "must say where an address stands, for it may hold a password: env:NAME, or file:PATH of a file with mode 600",
)
Event = Literal["done", "failed", "preempted", "gap", "no_signal"]


class Notify(Section):
    """Messages to people about a run, through the services that apprise knows (mail, Slack, ntfy, DingTalk, ...)."""

    urls: Annotated[tuple[Annotated[str, _ADDRESS], ...], Listed] = key(
        (),
        "Where apprise's addresses stand: env:NAME is a variable of the shell that starts the run, file:PATH a file of "
        "mode 600 with one a line.",
    )
    events: Annotated[tuple[Event, ...], Listed] = key(
        ("done", "failed", "preempted", "gap", "no_signal"),
        "What is told: the run is done; it failed, and does not go on; it was preempted; engine and trainer disagree; "
        "a whole rollout had nothing to learn from.",
    )
    preempted: Count = key(3, "Preemptions after which the run tells of them, and again after as many more.")
    timeout: Positive = key(5.0, "Seconds that the end of the process waits at most for a message under way.")


_URL = Matching(r"https?://[^\s/@]+(?:/\S*)?", "must be an address such as http://HOST:8080, without a password in it")
_FOLDER = Matching(r"/[^:\0\n]*", "must be the full path of a folder, beginning with /")


class Sandbox(Section):
    """The sandbox in which programs of the model run (reward function `code`, tool `python`), and what they may use."""

    kind: Literal["auto", "bubblewrap", "landlock", "apptainer", "http"] = key(
        "auto",
        "What confines programs; auto takes the first of these that works on the node. Without any, none is run.",
    )
    seconds: Positive = key(10.0, "Seconds that a program may take.")
    cpu_seconds: Positive = key(10.0, "Seconds of processor time that a program may take, all its processes together.")
    memory_gb: Positive = key(1.0, "GB of memory that a program may use, all its processes together.")
    processes: Count = key(16, "Processes and threads that a program may have at once.")
    file_mb: Positive = key(16.0, "MB of the largest file that a program may write.")
    disk_mb: Positive = key(64.0, "MB of all files of a program together.")
    output_kb: Positive = key(256.0, "KB that a program may write to its standard output, and to its standard error.")
    python: OneLine | None = key(
        None, "The Python that runs programs, with its packages; the default is that of the run, or of the image."
    )
    readable: Annotated[tuple[Annotated[str, _FOLDER], ...], Listed] = key(
        (), "Further folders that programs may read, such as those of libraries that their Python needs."
    )
    image: OneLine | None = key(None, "Apptainer's image, with a Python in it.")
    url: Annotated[str, _URL] | None = key(
        None, "The address of a service with the interface of SandboxFusion (/run_code)."
    )


class Faults(Section):
    """Limits on failures, restarts and waiting."""

    max_restarts: CountFrom0 = key(
        3, "Failures in a row at the same step that are allowed; a preemption or a time limit is not a failure."
    )
    bringup_timeout: Positive | None = key(
        None,
        "Seconds within which every rank must report that it runs; the default is 60, and 1800 in a container, whose "
        "image may have to be fetched first.",
    )
    heartbeat_timeout: Positive = key(30.0, "Seconds without a heartbeat after which a rank counts as hung.")
    hang_timeout: Positive = key(
        900.0, "Seconds without progress after which a rank counts as hung although it is alive."
    )
    restart_above_memory: Share | None = key(
        None,
        "Part of a node's memory, or of the job's memory limit, above which the run saves after a step and starts "
        "again in the same allocation; by default it does not.",
    )
    max_engine_restarts: CountFrom0 = key(
        3, "Restarts of engines that are allowed in one attempt; of ranks that generate, too."
    )
    engine_timeout: Positive = key(300.0, "Seconds without a token after which an engine that has work counts as hung.")
    max_skipped_steps: CountFrom0 = key(5, "Steps in a row that are allowed to have a gradient that is not finite.")
