"""The sections of a run: every key, its type, its default and what it means.

Floor 1: plain Python. Loading from YAML and the command line is :mod:`gspo_hpc.config_file`; the arithmetic between
keys is :mod:`gspo_hpc.plan`. Batch sizes count completions. Everything is frozen: a run never changes its own settings.
A ``None`` default means "not given": ``plan`` works with what is there, :meth:`Config.missing` names what a run needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Platform = Literal["cuda", "cpu"]
Aggregation = Literal["sequence", "token"]


@dataclass(frozen=True)
class Run:
    """Who this run is and how long it goes."""

    name: str = "run"
    dir: str | None = None  # the run directory itself; default runs/NAME
    seed: int = 42
    max_steps: int | None = None  # optimizer steps


@dataclass(frozen=True)
class Cluster:
    """The machines: one rank per accelerator (on CPU: one rank per `gpus_per_node`)."""

    nodes: int = 1
    gpus_per_node: int = 1
    platform: Platform = "cuda"
    threads_per_rank: int | None = None  # CPU threads of one training rank; default: cores / ranks on the node
    # What `plan` estimates memory and time for; without effect on a run.
    gpu: str | None = None  # such as H100-80GB: a name in devices.py
    network_gb_per_s: float | None = None  # of one GPU to other nodes, one way; default: what such GPUs usually have


@dataclass(frozen=True)
class Model:
    """The model that is trained: a Hugging Face folder (config.json, safetensors, tokenizer)."""

    path: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    # What layers are made of. torch: needs nothing else; auto: Transformer Engine where it is installed and GPUs are
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    # Who makes it. own: for the families that this package knows; mcore_bridge: for others, on GPUs
    provider: Literal["own", "mcore_bridge"] = "own"
    fp8: Literal["e4m3", "hybrid"] | None = None  # products in 8 bit, by Transformer Engine; e5m2 for gradients: hybrid
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"  # how values are scaled for it


@dataclass(frozen=True)
class Parallel:
    """Megatron-Core's parallel sizes, under Megatron's own names."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None  # parts of the model on each pipeline rank (interleaved)
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None  # default: tensor_model_parallel_size
    sequence_parallel: bool = False
    overlap_grad_reduce: bool = False  # gradients are summed over data-parallel ranks while others are computed
    overlap_param_gather: bool = False  # with optimizer.distributed: weights are gathered while the first are used


@dataclass(frozen=True)
class Memory:
    """What is computed again instead of being kept for the backward pass, under Megatron's names; and what waits in
    host memory until it is needed."""

    recompute_granularity: Literal["selective", "full"] | None = None  # parts of a layer, or whole layers
    recompute_modules: tuple[str, ...] = ("core_attn",)  # selective: core_attn, mlp, moe, shared_experts, layernorm ...
    recompute_method: Literal["uniform", "block"] = "uniform"  # full: all layers by groups, or the first of each stage
    recompute_num_layers: int = 1  # full: layers of a group, or how many
    offload_trainer: bool | None = None  # to host memory while engines generate; default: on GPUs that both share
    offload_optimizer: bool = False  # its state stays in host memory, but for the moment in which it steps


@dataclass(frozen=True)
class Moe:
    """Mixtures of experts; without effect on models that have none."""

    router_dtype: Literal["float32", "float64"] | None = "float32"  # of scores and routing; none: the model's
    aux_loss_coeff: float = 0.0  # weight of the load-balancing loss (Switch Transformer), per micro-batch
    z_loss_coeff: float = 0.0  # weight of the loss that keeps the router's logits small (ST-MoE)
    # What brings tokens to their experts and back, Megatron's moe_token_dispatcher_type. flex: DeepEP's fused kernels,
    # on GPUs, for experts on several ranks
    token_dispatcher: Literal["alltoall", "flex"] = "alltoall"
    # Tokens go to the experts that they had before: in the engine, or in the pass for old log-probs. auto: the engine's
    # where vLLM tells them, which its CPU build does not.
    router_replay: Literal["off", "auto", "rollout", "old_logprobs"] = "off"


@dataclass(frozen=True)
class Batch:
    """Batch sizes, in completions (docs: the batch arithmetic; rules in plan.py)."""

    micro_batch_size: int | None = None  # completions per micro-batch and DP rank ...
    micro_batch_tokens: int | None = None  # ... or a budget of tokens per micro-batch, filled by packing
    global_batch_size: int | None = None  # completions per optimizer step
    steps_per_generation: int | None = None  # optimizer steps per rollout (default 1) ...
    generation_batch_size: int | None = None  # ... or completions per rollout
    num_generations: int | None = None  # completions per prompt: the group
    num_iterations: int = 1  # passes over one rollout
    logprob_micro_batch_size: int | None = None  # old log-prob pass: its own size or budget; default: the update's
    logprob_micro_batch_tokens: int | None = None
    reference_micro_batch_size: int | None = None  # reference pass: its own size or budget; default: the update's
    reference_micro_batch_tokens: int | None = None
    share_prompts: bool = True  # completions of one group share their prompt's computation


@dataclass(frozen=True)
class Data:
    """Prompts: JSONL or parquet rows with a prompt (text or chat messages); other fields go to the rewards."""

    train: str | None = None
    eval: str | None = None
    prompt_key: str = "prompt"
    system_prompt: str | None = None
    chat_template: bool = True  # put text prompts through the tokenizer's chat template, as one user message
    shuffle: bool = True
    overlong: Literal["error", "drop", "truncate_left"] = "error"  # prompts over rollout.max_prompt_length


@dataclass(frozen=True)
class Rollout:
    """Generation. `engine` is handed to vllm.LLM unchanged; null in it is vLLM's own default."""

    mode: Literal["colocate", "server"] = "colocate"
    tensor_parallel_size: int = 1
    engines_per_node: int | None = None  # default: gpus_per_node / tensor_parallel_size
    max_prompt_length: int = 512
    max_response_length: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # default: model.dtype
    kv_cache_gb: float = 1.0  # CPU only; on GPUs: engine.gpu_memory_utilization
    # vLLM's sleep level while the trainer works. 1: weights wait in host memory; 2: they are dropped, and pushed again
    # before anything is generated
    sleep_level: int = 1
    probe_tokens: int = 96  # tokens of the probe that engine and trainer must agree on after each weight sync
    probe_max_gap: float | None = None  # max |difference of log-probs|; default 1e-3 (float32) or 0.5 (16 bit)
    probe_mean_gap: float | None = None  # mean of the same; default 1e-4 (float32) or 0.05 (16 bit)
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm:
    """The objective. `name` is a preset; the other keys override it. See algorithm presets in algorithms.py."""

    name: Literal["gspo", "gspo_token", "grpo"] = "gspo"
    clip_low: float | None = None  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float | None = None
    aggregation: Aggregation | None = None  # mean over sequences, or over all tokens of the batch
    normalize_advantage: bool = True  # divide by the group's standard deviation
    kl_beta: float = 0.0  # weight of the KL term against the reference model; 0: no reference at all


@dataclass(frozen=True)
class RewardFunction:
    """One term of the reward: a registered name or path/to/file.py:function, its weight and its arguments."""

    function: str
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """Graders, run in a process pool while generation goes on."""

    functions: tuple[RewardFunction, ...] = ()
    workers: int = 2
    timeout: float = 10.0  # seconds for one completion and one grader
    on_failure: Literal["exclude", "zero"] = "exclude"  # what a failed grader costs: the sample, or its reward


@dataclass(frozen=True)
class Optimizer:
    """Adam and its schedule, under Megatron's names where it has them."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    initial_loss_scale: float = 65536.0  # float16 only: halved where a gradient overflows, which skips the step ...
    loss_scale_window: int = 1000  # ... and doubled after as many steps without
    grad_reduce_in_fp32: bool = True  # gradients are kept and summed in fp32, whatever the model's dtype
    distributed: bool = False  # every data-parallel rank keeps and updates a part of the state, not a copy of all of it


@dataclass(frozen=True)
class Checkpoint:
    """When to save, and how many to keep."""

    interval: int = 50  # optimizer steps; a last one is always saved
    keep: int = 2
    async_save: bool = True  # written by a thread while training goes on, from a copy in host memory


@dataclass(frozen=True)
class Tracking:
    """metrics.jsonl is always written; these are for everything beside it."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"  # auto: online with a key, offline without
    wandb_project: str = "gspo_hpc"
    wandb_entity: str | None = None
    tensorboard: bool = False
    samples: int = 4  # completions kept per logged rollout, for the report
    profile_steps: tuple[int, ...] = ()  # optimizer steps that are traced by torch's profiler, with a table by phase
    debug: bool = False  # torch.distributed, NCCL, Megatron and vLLM tell what they do, in the ranks' logs


@dataclass(frozen=True)
class Eval:
    """Greedy accuracy on unseen prompts, before, after and in between; `samples` > 1 adds avg@k and pass@k."""

    interval: int | None = None  # optimizer steps
    before: bool = True
    after: bool = True
    max_prompts: int | None = None
    samples: int = 1  # sampled completions per prompt, for avg@k and pass@k
    temperature: float = 1.0  # of those samples
    reward: str | None = None  # name of the reward function that counts as "right"; default: the first


@dataclass(frozen=True)
class Container:
    """The container that ranks run in. The image has the package's dependencies, the code comes from the job folder."""

    kind: Literal["pyxis", "apptainer"]
    image: str
    mounts: tuple[str, ...] = ()  # SOURCE:TARGET; the run directory is always mounted
    python: str = "python3"
    args: tuple[str, ...] = ()  # more arguments of srun (pyxis) or of apptainer exec


@dataclass(frozen=True)
class Slurm:
    """How `submit` asks for nodes: what sbatch and srun are told. A profile is a config with such a section, for all
    runs on one cluster; what the run's own config says goes before it."""

    profile: str | None = None  # a file, or a name in slurm/profiles
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_minutes: int = 60  # of one job; a longer run is requeued until its last step is done
    signal_seconds: int = 120  # before the time limit the ranks are told to stop
    requeue: bool = True
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    exclusive: bool = False
    cpus_per_task: int | None = None
    mem: str | None = None
    gres: str | None = None  # instead of --gpus-per-node
    gpu_bind: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    comment: str | None = None
    sbatch: dict[str, Any] = field(default_factory=dict)  # more options of sbatch: name without dashes -> value
    srun: tuple[str, ...] = ()  # more arguments of srun
    modules: tuple[str, ...] = ()  # module load ...
    setup: tuple[str, ...] = ()  # lines of shell before anything of ours
    environment: dict[str, str] = field(default_factory=dict)  # of the ranks
    python: str | None = None  # that runs the job; default: the one that submits
    container: Container | None = None


@dataclass(frozen=True)
class Faults:
    """What is tolerated, and how often."""

    max_restarts: int = 3  # failures in a row at the same step; a preemption or a time limit is none
    bringup_timeout: float = 60.0  # seconds until every rank has said that it runs
    heartbeat_timeout: float = 30.0  # seconds without a sign of life from a rank
    hang_timeout: float = 900.0  # seconds in which a rank that lives must get on

    max_engine_restarts: int = 3  # per run attempt
    engine_timeout: float = 300.0  # seconds without any token from an engine with work, before it counts as hung
    max_skipped_steps: int = 5  # steps in a row with a non-finite gradient


@dataclass(frozen=True)
class Config:
    """A whole run."""

    run: Run = field(default_factory=Run)
    cluster: Cluster = field(default_factory=Cluster)
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    memory: Memory = field(default_factory=Memory)
    moe: Moe = field(default_factory=Moe)
    batch: Batch = field(default_factory=Batch)
    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    algorithm: Algorithm = field(default_factory=Algorithm)
    reward: Reward = field(default_factory=Reward)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    tracking: Tracking = field(default_factory=Tracking)
    eval: Eval = field(default_factory=Eval)
    slurm: Slurm = field(default_factory=Slurm)
    faults: Faults = field(default_factory=Faults)

    @property
    def training_gpus_per_node(self) -> int:
        """All GPUs of a node, but for those that server mode sets apart for its engines; 0: these leave none."""
        rollout, gpus = self.rollout, self.cluster.gpus_per_node
        apart = (rollout.engines_per_node or 0) * rollout.tensor_parallel_size if rollout.mode == "server" else 0
        return max(0, gpus - apart)

    @property
    def world_size(self) -> int:
        """Training ranks: one per accelerator that trains."""
        return self.cluster.nodes * self.training_gpus_per_node

    @property
    def layout(self) -> dict[str, int]:
        """How many ranks there are, and how they share the model. Another one sums in another order."""
        at = self.parallel
        sizes = {
            "ranks": self.world_size,
            "TP": at.tensor_model_parallel_size,
            "PP": at.pipeline_model_parallel_size,
            "CP": at.context_parallel_size,
            "EP": at.expert_model_parallel_size,
        }
        if at.virtual_pipeline_model_parallel_size is not None:
            sizes["VPP"] = at.virtual_pipeline_model_parallel_size
        if at.expert_tensor_parallel_size not in (None, at.tensor_model_parallel_size):
            sizes["ETP"] = at.expert_tensor_parallel_size
        return sizes

    @property
    def run_dir(self) -> str:
        """The run directory, as given or runs/NAME."""
        return self.run.dir or f"runs/{self.run.name}"

    def missing(self) -> list[str]:
        """Keys that a run (not a plan) needs and that are not given."""
        needed = {
            "run.max_steps": self.run.max_steps,
            "model.path": self.model.path,
            "batch.global_batch_size": self.batch.global_batch_size,
            "batch.num_generations": self.batch.num_generations,
            "batch.micro_batch_size or batch.micro_batch_tokens": (
                self.batch.micro_batch_size or self.batch.micro_batch_tokens
            ),
            "data.train": self.data.train,
            "reward.functions": self.reward.functions or None,
        }
        return [key for key, value in needed.items() if value is None]
