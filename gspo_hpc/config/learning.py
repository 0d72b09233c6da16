"""The sections about data, generation, rewards and the optimizer, and what is saved, recorded and evaluated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from gspo_hpc.config.section import (
    WHOLE,
    AnyNumber,
    Count,
    CountFrom0,
    Counts,
    Decay,
    FreeForm,
    FromOne,
    Listed,
    Matching,
    Number,
    PerNode,
    Positive,
    Range,
    Section,
    Share,
    Temperature,
    Texts,
    TopK,
    key,
)
from gspo_hpc.config.sections.reward_models import FUNCTION, RewardModel

_SLEEP = "must be 1 (weights wait in host memory) or 2 (they are dropped)"
SleepLevel = Annotated[int, Field(ge=1, le=2, json_schema_extra={"errorMessage": _SLEEP}), WHOLE]


class Batch(Section):
    """Batch sizes, in completions (docs/batch-arithmetic.md; the rules are in planning/rules/batch.py)."""

    micro_batch_size: Count | None = key(None, "Completions per micro-batch and data-parallel rank.")
    micro_batch_tokens: Count | None = key(
        None, "Tokens per micro-batch, which packing fills; give this instead of micro_batch_size."
    )
    global_batch_size: Count | None = key(None, "Completions per optimizer step.")
    steps_per_generation: Count | None = key(None, "Optimizer steps per rollout; the default is 1.")
    generation_batch_size: Count | None = key(
        None, "Completions per rollout; give this instead of steps_per_generation."
    )
    num_generations: Count | None = key(None, "Completions per prompt, which form a group.")
    num_iterations: Count = key(1, "Number of times that each rollout is trained on.")
    logprob_micro_batch_size: Count | None = key(
        None, "Completions per micro-batch of the pass for old log-probs; the default is that of the update."
    )
    logprob_micro_batch_tokens: Count | None = key(
        None, "Tokens per micro-batch of the pass for old log-probs; the default is that of the update."
    )
    reference_micro_batch_size: Count | None = key(
        None, "Completions per micro-batch of the pass of the reference model; the default is that of the update."
    )
    reference_micro_batch_tokens: Count | None = key(
        None, "Tokens per micro-batch of the pass of the reference model; the default is that of the update."
    )
    share_prompts: bool = key(True, "Compute the prompt of a group once for all of its completions.")


class Rollout(Section):
    """Generation with vLLM. `engine` is handed to vllm.LLM unchanged; a null in it means vLLM's own default."""

    mode: Literal["colocate", "server"] = key(
        "colocate", "Whether engines share the GPUs that train (colocate) or have GPUs of their own (server)."
    )
    max_staleness: CountFrom0 = key(
        0,
        "Rollouts by which the weights that generate may be behind those that are trained; above 0 generation and "
        "training go on side by side, which needs mode server.",
    )
    tensor_parallel_size: PerNode = key(
        1, "GPUs of one engine. An engine over several nodes can be planned, but not run yet."
    )
    engines_per_node: PerNode | None = key(
        None, "Engines on each node; the default is gpus_per_node / tensor_parallel_size."
    )
    max_prompt_length: Count = key(512, "Tokens of the longest prompt.")
    max_response_length: Count = key(1024, "Tokens of the longest response.")
    truncated: Literal["train", "mask", "exclude"] = key(
        "train",
        "What becomes of completions that were cut off at max_response_length: they count as all others do (train), in "
        "the statistics of their group but not in the loss (mask), or in neither (exclude).",
    )
    dynamic_sampling: bool = key(
        False,
        "Replace groups without signal, whose completions all have the same reward, by groups of further prompts "
        "(DAPO), until the rollout is full.",
    )
    max_num_gen_batches: Count = key(
        10,
        "With dynamic_sampling: the prompts that a rollout may draw at most, counted in rollouts. Where they do not "
        "have enough groups with signal, others fill it up, and where they have none the run ends.",
    )
    dynamic_sampling_metric: str | None = key(
        None,
        "With dynamic_sampling: the reward function whose values must differ in a group, as it is named in "
        "reward.functions; by default a group has signal if it has an advantage.",
    )
    oversampling_factor: FromOne = key(
        1.0,
        "With dynamic_sampling or unfinished: the prompts that a rollout draws at once at first, as a multiple of "
        "those that it trains on. With unfinished wait it changes how fast a rollout is, and not what is trained on.",
    )
    unfinished: Literal["wait", "drop", "continue"] = key(
        "wait",
        "What becomes of completions that are unfinished when a rollout has as many finished groups as it trains on: "
        "it waits for them, drops their groups, or continues them in the next rollout with newer weights (partial "
        "rollouts).",
    )
    max_continuations: Count = key(
        1,
        "With unfinished continue: the rollouts into which a group may be carried; the last of them waits for it.",
    )
    in_flight_updates: bool = key(
        False,
        "With max_staleness 1: engines take newer weights in the middle of a rollout, as soon as they are trained, and "
        "continue its completions with them.",
    )
    temperature: Temperature = key(1.0, "The sampling temperature.")
    top_p: Share = key(1.0, "Sample from the most likely tokens whose probabilities add up to this.")
    top_k: TopK = key(-1, "Sample from this many of the most likely tokens; -1 samples from all.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "The type of weights and activations in engines; the default is model.dtype."
    )
    kv_cache_gb: Positive = key(
        1.0, "GB of KV cache of each engine on CPUs; on GPUs engine.gpu_memory_utilization determines it."
    )
    sleep_level: SleepLevel = key(
        2,
        "vLLM's sleep level while the trainer works. At 2, weights are dropped, and sent again before anything is "
        "generated; at 1, they wait in host memory.",
    )
    probe_tokens: Count = key(96, "Tokens of the probe on which engine and trainer must agree after each weight sync.")
    probe_max_gap: Number | None = key(
        None,
        "Largest difference of log-probs that the probe allows; the default is 1e-3 (float32) or 0.25 (16 bits, where "
        "each token's difference is multiplied by its probability; more where rounding alone moves the probe more).",
    )
    probe_mean_gap: Number | None = key(
        None,
        "Mean difference of log-probs that is allowed, on the probe and on the tokens of each update; the default is "
        "1e-4 (float32) or 0.05 (16 bits, where tokens of the probe are weighted with their probability; more where "
        "rounding alone moves the probe more).",
    )
    engine: FreeForm = key({}, "Arguments of vllm.LLM.")

    @field_validator("engine", mode="after")
    @classmethod
    def _without_nulls(cls, engine: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments without null, which is vLLM's own default."""
        return {name: value for name, value in engine.items() if value is not None}


class RewardFunction(Section):
    """One term of the reward: a reward function, its weight and its arguments."""

    function: Annotated[str, Matching(r"\S(?:[\s\S]*\S)?", "must name a function")] = key(
        ..., "A registered name, or path/to/file.py:function."
    )
    weight: AnyNumber = key(1.0, "Weight of this term in the sum.")
    clip_range: Range | None = key(
        None, "Lowest and highest value of this term, [low, high], to which others are clipped before their weight."
    )
    args: FreeForm = key({}, "Arguments of the function.")
    only_named: bool = key(
        False,
        "Grade the prompts of sources and evaluation sets whose `rewards` name this function, and no others.",
    )
    timeout: Positive | None = key(None, "Seconds that a call of this function may take; by default reward.timeout.")
    retries: CountFrom0 = key(
        0,
        "Times that a call which failed or took too long is repeated, 1 s, 2 s, 4 s ... later, at most 60 s; not after "
        "errors of the code, such as TypeError.",
    )


class Reward(Section):
    """Reward functions, which run in a pool of processes while generation goes on."""

    functions: Annotated[tuple[RewardFunction, ...], Listed] = key((), "The terms of the reward, which are summed.")
    models: Annotated[tuple[RewardModel, ...], Listed] = key(
        (), "Models that score completions on engines of the run, for the reward function reward_model."
    )
    workers: Count = key(2, "Processes of the pool.")
    timeout: Positive = key(
        10.0,
        "Seconds that one reward function may take for one completion, or for a group if it grades groups, unless it "
        "has a timeout of its own.",
    )
    memory_gb: Positive = key(
        8.0,
        "GB of memory that each process of the pool may use, and each process that it starts; beyond, a call fails.",
    )
    on_failure: Literal["exclude", "zero"] = key(
        "exclude", "After a reward function has failed, exclude the completion, or count its reward as zero."
    )

    def model_of(self, term: RewardFunction) -> RewardModel | None:
        """Return the model that scores for a term: the one it names, or the only one; None where there is none such."""
        name = term.args.get("model", "")
        if term.function != FUNCTION or not (name or len(self.models) == 1):
            return None
        return next((one for one in self.models if one.name == name or not name), None)

    @property
    def scored(self) -> dict[int, RewardModel]:
        """The models that score for terms, by the positions of these; without terms whose model is not there."""
        found = {number: self.model_of(term) for number, term in enumerate(self.functions)}
        return {number: model for number, model in found.items() if model is not None}


class Judges(Section):
    """The budget of requests that reward functions send to models behind endpoints.

    It is that of the whole run: of all its attempts, with the evaluations in it.
    """

    max_requests: Count | None = key(None, "Requests, repetitions included, at most; null: any number.")
    max_prompt_tokens: Count | None = key(None, "Tokens that these send, at most; null: any number.")
    max_completion_tokens: Count | None = key(None, "Tokens of the answers, at most; null: any number.")
    max_cost: Positive | None = key(
        None, "Their cost, at most, in the currency of the prices that each judge has; null: any."
    )
    used_up: Literal["stop", "exclude"] = key(
        "stop",
        "Once the budget is used up, save and end the run, or exclude the completions that get no score for it.",
    )


class Tool(Section):
    """One tool that the model may call in a conversation."""

    function: Annotated[str, Matching(r"\S(?:[\s\S]*\S)?", "must name a function")] = key(
        ..., "A registered name, or path/to/file.py:function, whose name the model calls."
    )
    args: FreeForm = key({}, "Arguments that the function always gets, and of which the model is not told.")
    description: str | None = key(
        None, "The description that the model sees; by default the first paragraph of the function's docstring."
    )
    parameters: FreeForm = key(
        {},
        "JSON Schema of the arguments that the model gives; by default it is read from the function's signature, its "
        "annotations and its docstring.",
    )


class Environment(Section):
    """The other side of a conversation; without a name and tools, a completion is a single answer."""

    name: str | None = key(None, "A registered environment, or path/to/file.py:Class. Null: there is none.")
    args: FreeForm = key({}, "Arguments of the environment.")
    tools: Annotated[tuple[Tool, ...], Listed] = key((), "Tools that the chat template shows to the model.")
    tool_parser: Literal["auto", "hermes", "llama3_json", "qwen3_coder", "glm45", "openai"] = key(
        "auto", "The form in which the model calls tools; auto takes the one that the chat template asks for."
    )
    max_calls: Count = key(8, "Tool calls in one message that are made; of further ones the model is told an error.")
    max_result: Count = key(4000, "Characters of a tool's result that the model sees, at most.")
    max_turns: Count = key(8, "Messages of the model in a conversation, at most.")
    max_seconds: Positive | None = key(
        None, "Seconds after which a conversation ends with the next answer, with its rewards until then; null: none."
    )
    timeout: Positive = key(60.0, "Seconds that an environment may take to answer a message, and a tool for a call.")
    workers: Count = key(4, "Processes in which environments answer and tools run, for each engine.")

    @property
    def talks(self) -> bool:
        """Tell whether a completion is a conversation."""
        return self.name is not None or bool(self.tools)


class Optimizer(Section):
    """Adam and its schedule, under Megatron's names where it has them."""

    lr: Number = key(1e-6, "The learning rate.")
    min_lr: Number = key(0.0, "The learning rate at the end of the decay; not above lr.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "The schedule by which the learning rate decays until run.max_steps. It counts every step of the run, "
        "also if it changes no weight, being empty or its gradient not finite.",
    )
    lr_warmup_steps: CountFrom0 = key(0, "Optimizer steps over which the learning rate rises from 0.")
    weight_decay: Number = key(0.0, "Decoupled weight decay.")
    adam_beta1: Decay = key(0.9, "Decay of the first moment.")
    adam_beta2: Decay = key(0.999, "Decay of the second moment.")
    adam_eps: Positive = key(1e-8, "Epsilon of Adam's denominator.")
    clip_grad: Number = key(
        1.0, "Largest norm of the gradient; a larger gradient is scaled down to it, and 0 turns this off."
    )
    initial_loss_scale: FromOne = key(
        65536.0, "With float16 only: the first loss scale; a gradient that overflows halves it and skips the step."
    )
    loss_scale_window: Count = key(
        1000, "With float16 only: steps without overflow after which the loss scale doubles."
    )
    grad_reduce_in_fp32: bool = key(True, "Keep and sum gradients in fp32, whatever the model's dtype is.")
    distributed: bool = key(
        False, "Keep and update only a part of the optimizer's state on each data-parallel rank, instead of all of it."
    )

    @field_validator("min_lr", mode="after")
    @classmethod
    def _not_above_lr(cls, min_lr: float, info: ValidationInfo) -> float:
        """Refuse a schedule that would rise."""
        if (lr := info.data.get("lr")) is not None and min_lr > lr:
            raise ValueError(f"({min_lr}) must not be above optimizer.lr ({lr})")
        return min_lr


class Checkpoint(Section):
    """The interval of checkpoints, and how many are kept."""

    interval: Count = key(50, "Optimizer steps between checkpoints; a last one is always saved.")
    keep: Count = key(2, "Number of checkpoints that are kept.")
    async_save: bool = key(
        True, "Write checkpoints in the background from a copy in host memory, while training goes on."
    )


class Tracking(Section):
    """Trackers and traces; metrics.jsonl is always written in addition."""

    wandb: Literal["auto", "online", "offline", "disabled"] = key(
        "auto", "Weights & Biases; auto is online with an API key and offline without."
    )
    wandb_project: str = key("gspo_hpc", "The W&B project.")
    wandb_entity: str | None = key(None, "The W&B entity.")
    project: str = key("gspo_hpc", "The project of Trackio and SwanLab, and the experiment of MLflow.")
    tensorboard: bool = key(False, "Write TensorBoard files, in tensorboard/ of the run directory.")
    mlflow: bool = key(
        False, "Log to MLflow: to the server that MLFLOW_TRACKING_URI names, or else to mlflow.db in the run directory."
    )
    trackio: bool = key(
        False,
        "Log to Trackio's database on this machine, which is where TRACKIO_DIR says, or else where Trackio looks.",
    )
    swanlab: Literal["online", "offline", "disabled"] = key(
        "disabled", "SwanLab; offline writes swanlab/ in the run directory, which gspo-hpc sync sends later."
    )
    prometheus: str | None = key(
        None,
        "The folder of node_exporter's textfile collector, for a file of gauges that is replaced with every step. "
        "Every user of the machine can read it: it has numbers and the run's name.",
    )
    observers: Texts = key(
        (),
        "Functions of your own, path/to/file.py:function, each called with the record of every step, in a process of "
        "its own beside rank 0. One that fails or hangs is reported and changes nothing of the run.",
    )
    samples: CountFrom0 = key(4, "Completions of each logged rollout that are kept for the report.")
    record_interval: Count | None = key(
        None,
        "Optimizer steps between those whose samples are recorded token by token in the run directory, for the pages "
        "of steps that the report links to; the first step is among them. The default is never.",
    )
    record_groups: Count = key(
        2, "Groups of such a step that are recorded, each with all of its completions; those with an advantage first."
    )
    record_mb: Positive = key(
        64.0,
        "Largest size of the whole record in MB, compressed. A step that would make it larger is not recorded, nor is "
        "any after it, and the console says so.",
    )
    profile_steps: Counts = key((), "Optimizer steps that torch's profiler traces, with a table by phase.")
    debug: bool = key(
        False, "Let torch.distributed, NCCL, Megatron and vLLM log what they do, in the logs of the ranks."
    )


class Eval(Section):
    """Greedy accuracy on unseen prompts, before, after and in between; `samples` > 1 adds avg@k, pass@k and maj@k."""

    interval: Count | None = key(None, "Optimizer steps between evaluations.")
    before: bool = key(True, "Evaluate before the first step.")
    after: bool = key(True, "Evaluate after the last step.")
    max_prompts: Count | None = key(
        None, "Number of prompts that are evaluated, of each set and of all others; the default is all."
    )
    samples: Count = key(1, "Sampled completions per prompt, for avg@k, pass@k and maj@k.")
    temperature: Temperature = key(1.0, "The sampling temperature of those samples.")
    top_p: Share = key(1.0, "Those samples are of the most likely tokens whose probabilities add up to this.")
    top_k: TopK = key(-1, "Those samples are of this many of the most likely tokens; -1 samples from all.")
    max_tokens: Count | None = key(
        None,
        "Tokens of the longest answer, also of the greedy ones; the default is rollout.max_response_length, above "
        "which engines have no room.",
    )
    reward: str | None = key(
        None, "The reward function that decides whether an answer is right; the default is the first one."
    )
