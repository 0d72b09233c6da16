"""A reward model: a model that scores completions, on engines of the run's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from gspo_hpc.config.constants import JUDGE_REPLY_TOKENS
from gspo_hpc.config.section import Count, FreeForm, Matching, PerNode, Positive, Section, Share, key, replace

if TYPE_CHECKING:
    from gspo_hpc.config.schema import Config

_TEMPLATE_ROOM = 1024  # tokens of a model's template and reply, and those by which its tokenizer needs more
FUNCTION = "reward_model"  # the reward function that a model is behind


class RewardModel(Section):
    """A model that scores completions, which the reward function `reward_model` names (docs/rewards.md)."""

    name: Annotated[
        str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", "must be 1 to 40 letters, digits, '.', '_' or '-'")
    ] = key(..., "The name by which reward functions ask for it.")
    path: str = key(..., "The folder of the model, or its name on the hub.")
    kind: Literal["classification", "generative"] = key(
        "classification",
        "What the model answers: one number, as transformers' AutoModelForSequenceClassification with one label gives "
        "it (classification), or text in which the score stands, as of a judge (generative).",
    )
    placement: Literal["colocate", "apart"] = key(
        "colocate",
        "Where its engines are: on the GPUs that train, awake between generation and training alone (colocate), or in "
        "rollout.mode server on GPUs of their own, behind those of each engine of the policy (apart).",
    )
    tensor_parallel_size: PerNode = key(
        1,
        "GPUs of one of its engines; there is one beside each engine of the policy, on the first of its GPUs or, set "
        "apart, on the GPUs behind them.",
    )
    gpu_memory_utilization: Share = key(
        0.5, "Part of each GPU that its engine may take while it is awake: weights, working memory and cache."
    )
    kv_cache_gb: Positive = key(1.0, "GB of its engine's cache on CPUs.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "The type in which it computes; the default is model.dtype."
    )
    max_length: Count | None = key(
        None,
        "Tokens of the longest sequence that it reads, template, prompt, completion and reply together; the default is "
        "that of the policy and 1024 more.",
    )
    too_long: Literal["fail", "cut"] = key(
        "fail",
        "What becomes of a completion whose sequence is longer: it has no score, as if a reward function had failed "
        "(fail), or the model does not read the beginning of the sequence (cut).",
    )
    template: str | None = key(
        None,
        "Of a generative model: the message that asks for the score, with {prompt}, {completion} and {FIELD} for "
        "fields of the row; the default is that of the reward function judge.",
    )
    pattern: str | None = key(
        None,
        "Of a generative model: the regular expression whose last match in the reply has the score as its group; the "
        "default is that of the reward function judge.",
    )
    max_reply_length: Count = key(JUDGE_REPLY_TOKENS, "Of a generative model: tokens of its longest reply.")
    chat_template_kwargs: FreeForm = key({}, "Variables of its chat template, such as {enable_thinking: false}.")
    engine: FreeForm = key({}, "More arguments of vllm.LLM; a null means vLLM's own default.")


def length(config: Config, model: RewardModel) -> int:
    """Return the tokens of the longest sequence that a model reads, with its reply."""
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    return model.max_length or longest + _TEMPLATE_ROOM


def is_apart(config: Config, model: RewardModel) -> bool:
    """Return whether the engines of a model have GPUs of their own; a job of one rank has them share its GPU."""
    return model.placement == "apart" and config.rollout.mode == "server"


def first_gpu(config: Config, model: RewardModel) -> int:
    """Return how many GPUs behind the first one of an engine of the policy those of the model's engine begin."""
    if not is_apart(config, model):
        return 0
    names = [one.name for one in config.reward.models]
    before = config.reward.models[: names.index(model.name)]
    return config.rollout.tensor_parallel_size + sum(one.tensor_parallel_size for one in before)


def in_place_of_policy(config: Config, model: RewardModel) -> Config:
    """Return the run's config with a reward model, as its engine has it, in the place of the policy."""
    rollout = replace(
        config.rollout,
        tensor_parallel_size=model.tensor_parallel_size,
        dtype=model.dtype,
        engine=model.engine | {"gpu_memory_utilization": model.gpu_memory_utilization},
        kv_cache_gb=model.kv_cache_gb,
    )
    policy = replace(config.model, path=model.path, fp8=None)
    return replace(config, model=policy, rollout=rollout, adapter=type(config.adapter)())
