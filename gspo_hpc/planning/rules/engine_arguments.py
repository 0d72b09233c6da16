"""Rules of rollout.engine: vLLM takes the arguments, and they contradict no other setting.

The rules follow the sources of vLLM 0.32; a plan must not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import auto
from functools import cache
from typing import Any

from gspo_hpc.config.engine_arguments import OWN_ENGINE_ARGUMENTS, VLLM_ARGUMENTS
from gspo_hpc.config.reading.config_yaml import number_meant, numbers_meant
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule
from gspo_hpc.system.text import nearest

# Similarity of a name and its misspelling: one or two letters of a usual name. Arguments of other versions of vLLM than
# the listed one are less like any of its arguments.
_SLIP = 0.88


class EngineArgumentRule(RuleId):
    """Names of the rules in this file."""

    ENGINE_ARGUMENT_IS_FREE = auto()
    ENGINE_ARGUMENT_VALUE = auto()
    ENGINE_ARGUMENT_SPELLING = auto()
    ENGINE_TOKENS_HOLD_SEQUENCES = auto()
    ENGINE_TOKENS_HOLD_LONGEST_SEQUENCE = auto()


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


_COUNTED = (  # arguments whose values are counts or sizes, besides those that have a bound of their own
    *("block_size", "max_logprobs", "kv_cache_memory_bytes", "long_prefill_token_threshold", "cpu_offload_gb"),
    *("max_num_partial_prefills", "swap_space"),
)

_NUMBERS = (_whole, _share, _number)
_ONLY = {  # arguments that have one value here, which engines have without them
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_sleep_mode": True,
    "skip_tokenizer_init": False,
    "enable_return_routed_experts": True,
}

# The values that each argument may have, and the words for a message.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "gpu_memory_utilization": (_share, "must be above 0 and at most 1"),
    "max_num_seqs": (_whole, "must be a whole number, 1 or more"),
    "max_num_batched_tokens": (_whole, "must be a whole number, 1 or more"),
    "pipeline_parallel_size": (lambda v: v == 1, "must be 1: an engine is cut by rollout.tensor_parallel_size alone"),
    "data_parallel_size": (lambda v: v == 1, "must be 1: rollout.engines_per_node says how many engines there are"),
    "enable_sleep_mode": (lambda v: v is True, "must be true: engines sleep while the trainer works"),
    "skip_tokenizer_init": (lambda v: v is False, "must be false: reward functions need text"),
    "enable_return_routed_experts": (lambda v: v is True, "must be true or absent: moe.router_replay sets it"),
    **dict.fromkeys(_COUNTED, (_number, "must be a number")),
}


@cache
def slip_of(key: str) -> str | None:
    """Return the argument of vLLM that a misspelt one means; None for one that vLLM has, or may have in a version."""
    known = VLLM_ARGUMENTS.union(_VALUES, OWN_ENGINE_ARGUMENTS)
    return None if key in known else nearest(key, sorted(known), cutoff=_SLIP)


@rule(
    EngineArgumentRule.ENGINE_ARGUMENT_IS_FREE,
    "`rollout.engine` gives no argument that follows from another setting",
    Topic.ENGINE_ARGUMENTS,
)
def _free(plan: PlanBuilder) -> Iterator[str]:
    rollout = plan.config.rollout
    for key, value in rollout.engine.items():
        if key in OWN_ENGINE_ARGUMENTS:
            text = f"rollout.engine.{key} ({value}) cannot be given: it follows from {OWN_ENGINE_ARGUMENTS[key]}"
            if key == "max_model_len":
                text += f", {rollout.max_prompt_length} + {rollout.max_response_length} = {plan.longest_sequence}"
            yield text


@rule(
    EngineArgumentRule.ENGINE_ARGUMENT_VALUE,
    "`rollout.engine` gives values that vLLM takes and that fit the trainer",
    Topic.ENGINE_ARGUMENTS,
)
def _value(plan: PlanBuilder) -> Iterator[str]:
    for key, value in plan.config.rollout.engine.items():
        holds, must = _VALUES.get(key, (lambda _: True, ""))
        if not holds(value):
            yield f"rollout.engine.{key} ({value}) {must}{_advice(key, value, holds)}"


def takes(key: str, value: Any) -> bool:
    """Return whether vLLM takes a value of an argument, as far as that is known."""
    return key not in _VALUES or _VALUES[key][0](value)


def meant(key: str, value: Any) -> tuple[Any, ...]:
    """Return what may be meant by a value that vLLM does not take, of values that it takes; empty if that is unknown.

    That is 0.9 for 90% or 90, 16000 or 16384 for 16k, and the only value that an argument may have.
    """
    holds, _ = _VALUES.get(key, (lambda _: True, ""))
    if holds(value):
        return ()
    if key in _ONLY:
        return (_ONLY[key],)
    numbers: tuple[Any, ...] = ()
    if isinstance(value, str) and holds in _NUMBERS:
        numbers = numbers_meant(value, whole=holds is not _share)
    elif isinstance(value, float) and value.is_integer():  # 1e3, which vLLM does not take
        numbers = (int(value),)
    if isinstance(value, int | float) and holds is _share and 10 <= value <= 100:  # no engine lives on less
        numbers = (value / 100,)
    return tuple(number for number in numbers if holds(number))


def _advice(key: str, value: Any, holds: Callable[[Any], bool]) -> str:
    """Return what to write for a value that is meant as a number, as the end of a sentence; empty for others."""
    if key in _ONLY:
        return ""
    if isinstance(value, str):
        return number_meant(value, whole=holds is not _share, taken=holds) if holds in _NUMBERS else ""
    if holds is _share and (numbers := meant(key, value)):
        return f"; write {numbers[0]:g} for {value:g} %"
    return "".join(f"; write {number}" for number in meant(key, value))


@rule(
    EngineArgumentRule.ENGINE_ARGUMENT_SPELLING,
    "`rollout.engine` misspells no argument of vLLM",
    Topic.ENGINE_ARGUMENTS,
)
def _spelling(plan: PlanBuilder) -> Iterator[str]:
    for key in plan.config.rollout.engine:
        if near := slip_of(key):
            yield f"rollout.engine.{key} is no argument of vLLM; nearest: {near}"


@rule(
    EngineArgumentRule.ENGINE_TOKENS_HOLD_SEQUENCES,
    "`max_num_batched_tokens` is at least `max_num_seqs`",
    Topic.ENGINE_ARGUMENTS,
)
def _sequences(plan: PlanBuilder) -> Iterator[str]:
    given = plan.config.rollout.engine
    tokens: Any = given.get("max_num_batched_tokens")
    sequences: Any = given.get("max_num_seqs")
    if _whole(tokens) and _whole(sequences) and tokens < sequences:
        text = f"rollout.engine.max_num_batched_tokens ({tokens}) must be at least"
        yield f"{text} rollout.engine.max_num_seqs ({sequences})"


@rule(
    EngineArgumentRule.ENGINE_TOKENS_HOLD_LONGEST_SEQUENCE,
    "`max_num_batched_tokens` holds the longest sequence, where vLLM does not prefill in chunks",
    Topic.ENGINE_ARGUMENTS,
)
def _longest(plan: PlanBuilder) -> Iterator[str]:
    given, longest = plan.config.rollout.engine, plan.longest_sequence
    tokens: Any = given.get("max_num_batched_tokens")
    if _whole(tokens) and given.get("enable_chunked_prefill") is False and tokens < longest:
        made = f"max_prompt_length + max_response_length ({longest}) with rollout.engine.enable_chunked_prefill=false"
        yield f"rollout.engine.max_num_batched_tokens ({tokens}) must be at least {made}"
