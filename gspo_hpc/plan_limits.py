"""What libraries refuse only when they run, as rules of the plan: minutes into a job, and after the queue.

Floor 1: plain Python. Read in the sources of Megatron-Core 0.16.1, DeepEP 1.2.1 and vLLM 0.32, not asked of them. The
rules are numbered in plan_rules.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from gspo_hpc.plan_book import Book

# Groups of ranks for which DeepEP has kernels, and how many of them it takes for those of one node.
_DEEPEP_RANKS = (2, 4, 8, 16, 32, 64, 128, 144, 160)
_DEEPEP_NODE = 8
_DEEPEP_TOP_K = 32  # places that a token may go to: its experts, on each rank that has a part of them

ENGINE_RULE = 17
_SLIP = 0.88  # as like are a name and its misspelling; no two arguments of vLLM are (0.86: data_parallel_size_local)
# vLLM arguments that are not the user's to give, and where they come from.
OWN_ENGINE_ARGUMENTS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "rollout.max_prompt_length and rollout.max_response_length",
    "seed": "run.seed",
    "logprobs_mode": "the log-probs that training needs",
    "weight_transfer_config": "the way weights are sent",
}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


# What each of these must be, where it is given, and how that is said.
_ENGINE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "gpu_memory_utilization": (_share, "must be above 0 and at most 1"),
    "max_num_seqs": (_whole, "must be a whole number, 1 or more"),
    "max_num_batched_tokens": (_whole, "must be a whole number, 1 or more"),
    "pipeline_parallel_size": (lambda v: v == 1, "must be 1: an engine is cut by rollout.tensor_parallel_size alone"),
    "data_parallel_size": (lambda v: v == 1, "must be 1: rollout.engines_per_node says how many engines there are"),
    "enable_sleep_mode": (lambda v: v is True, "must be true: engines sleep while the trainer works"),
    "skip_tokenizer_init": (lambda v: v is False, "must be false: graders are given text"),
    "enable_return_routed_experts": (lambda v: v is True, "must be true, or left to moe.router_replay"),
}


def slip_of(key: str) -> str | None:
    """The argument that is meant by one that is nearly spelt like it, of those that rules know. vLLM has others."""
    near = difflib.get_close_matches(key, (*_ENGINE, *OWN_ENGINE_ARGUMENTS), n=1, cutoff=_SLIP)
    return near[0] if near and near[0] != key else None


def apply_limits(book: Book) -> None:
    """Checks every rule of this file; what is found goes into `book`."""
    _flex(book)
    _engine(book)


def _engine(book: Book) -> None:
    """Rule 17: vLLM takes what stands in rollout.engine, and that contradicts no setting beside it."""
    config, given = book.config, book.config.rollout.engine
    for key, value in given.items():
        if key in OWN_ENGINE_ARGUMENTS:
            text = f"rollout.engine.{key} ({value}) cannot be given: it follows from {OWN_ENGINE_ARGUMENTS[key]}"
            if key == "max_model_len":
                prompt, response = config.rollout.max_prompt_length, config.rollout.max_response_length
                text += f", {prompt} + {response} = {prompt + response}"
            book.check(ENGINE_RULE, False, text)
        elif key in _ENGINE:
            holds, must = _ENGINE[key]
            book.check(ENGINE_RULE, holds(value), f"rollout.engine.{key} ({value}) {must}")
        elif near := slip_of(key):
            text = f"rollout.engine.{key} is no argument of vLLM; nearest: {near}"
            book.check(ENGINE_RULE, False, text)
    tokens: Any = given.get("max_num_batched_tokens")
    sequences: Any = given.get("max_num_seqs")
    if not _whole(tokens):
        return
    text = f"rollout.engine.max_num_batched_tokens ({tokens}) must be at least"
    if _whole(sequences):
        book.check(ENGINE_RULE, tokens >= sequences, f"{text} rollout.engine.max_num_seqs ({sequences})")
    if given.get("enable_chunked_prefill") is False:
        longest = config.rollout.max_prompt_length + config.rollout.max_response_length
        made = f"max_prompt_length + max_response_length ({longest}) with rollout.engine.enable_chunked_prefill=false"
        book.check(ENGINE_RULE, tokens >= longest, f"{text} {made}")


def _flex(book: Book) -> None:
    """Rule 11: what moe.token_dispatcher=flex needs, where the model has experts or nobody knows."""
    config, who = book.config, "moe.token_dispatcher: flex"
    if config.moe.token_dispatcher != "flex":
        return
    arch = book.models.find(config)
    if arch is not None and arch.experts is None:
        return
    text = f"{who} is DeepEP's kernels, which need GPUs (cluster.platform: cuda); alltoall runs everywhere"
    book.check(11, config.cluster.platform == "cuda", text)
    text = f"{who}: DeepEP brings tokens back in bfloat16 only, and model.dtype is {config.model.dtype}"
    book.check(11, config.model.dtype == "bfloat16", text)
    given = config.moe.router_dtype
    text = f"{who}: DeepEP carries the weights of experts in float32, and moe.router_dtype is {given or 'not given'}"
    book.check(11, given == "float32", text)
    parallel, gpus = config.parallel, config.cluster.gpus_per_node
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    ranks = etp * parallel.expert_model_parallel_size
    made = f"expert tensor ({etp}) x expert ({parallel.expert_model_parallel_size}) parallel size = {ranks}"
    if ranks == 1:
        book.check(11, False, f"{who} needs {made} above 1: there is nobody to send tokens to")
    elif ranks not in _DEEPEP_RANKS:
        known = ", ".join(map(str, _DEEPEP_RANKS))
        book.check(11, False, f"{who}: {made} must be one of {known}: for others DeepEP has no kernels")
    else:
        unit = min(ranks, _DEEPEP_NODE)
        text = f"{who}: gpus_per_node ({gpus}) must be divisible by {unit} of the {made} ranks: DeepEP wants so many "
        text += "of a group on each node"
        book.check(11, gpus % unit == 0, text)
    top_k = arch.experts.top_k if arch is not None and arch.experts is not None else 1
    made = f"expert_tensor_parallel_size ({etp}) x the model's experts of a token ({top_k}) = {etp * top_k}"
    text = f"{who}: {made} must be at most {_DEEPEP_TOP_K}, to as many places DeepEP sends a token"
    book.check(11, etp * top_k <= _DEEPEP_TOP_K, text)
