"""Rules of rollout.engine: vLLM takes the arguments, and they contradict no other setting.

The rules follow the sources of vLLM 0.32, and of the vLLM that is installed, if one is; a plan must not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import auto
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.engine_arguments import (
    ENGINE_VALUES,
    LATER_OR_EARLIER,
    ONLY_ENGINE_VALUES,
    OWN_ENGINE_ARGUMENTS,
    VLLM_ARGUMENTS,
    is_count,
    is_not_negative,
    is_number,
    is_number_of_logprobs,
    is_positive,
    is_share,
)
from gspo_hpc.config.reading.config_yaml import number_meant, numbers_meant
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.registry import rule
from gspo_hpc.system.text import near_miss, nearest

if TYPE_CHECKING:
    from gspo_hpc.planning.installed import Values

# Similarity of a name and its misspelling: one or two letters of a usual name. Arguments of other versions of vLLM than
# the listed one are less like any of its arguments.
_SLIP = 0.88
_LISTED = 8  # values of an argument that a message names


class EngineArgumentRule(RuleId):
    """Names of the rules in this file."""

    ENGINE_ARGUMENT_IS_FREE = auto()
    ENGINE_ARGUMENT_VALUE = auto()
    ENGINE_ARGUMENT_SPELLING = auto()
    ENGINE_TOKENS_HOLD_SEQUENCES = auto()
    ENGINE_TOKENS_HOLD_LONGEST_SEQUENCE = auto()


_NUMBERS = (is_count, is_share, is_number, is_positive, is_not_negative, is_number_of_logprobs)
_LISTED_ARGUMENTS = VLLM_ARGUMENTS.union(ENGINE_VALUES, OWN_ENGINE_ARGUMENTS)


def slip_of(key: str) -> str | None:
    """Return the argument of vLLM that a misspelt one means; None for one that vLLM has, or may have in a version."""
    if key in _LISTED_ARGUMENTS or key in (here := of_this_version()):
        return None
    return nearest(key, here, cutoff=_SLIP)


def of_this_version() -> list[str]:
    """Return the arguments that may be meant: of the vLLM here, which refuses others, or of the listed version."""
    from gspo_hpc.planning import installed  # only here: most plans have no argument that is not known

    here = installed.vllm()
    return sorted(
        _LISTED_ARGUMENTS
        if here is None
        else here[1].union(ENGINE_VALUES, OWN_ENGINE_ARGUMENTS)
        - {key for key in LATER_OR_EARLIER if key not in here[1]}
    )


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
        holds, must = ENGINE_VALUES.get(key, (lambda _: True, ""))
        if not holds(value):
            yield f"rollout.engine.{key} ({value}) {must}{_advice(key, value, holds)}"
        elif key not in ENGINE_VALUES and (known := _known(key)) is not None and not known.take(value):
            yield f"rollout.engine.{key} ({value}) {_must(key, value, known)}"


def _known(key: str) -> Values | None:
    """Return the values that the vLLM here takes of an argument; None where that is not known, or is another rule's."""
    if key in OWN_ENGINE_ARGUMENTS:
        return None
    from gspo_hpc.planning import installed  # only here: most plans have no argument of the kind

    return installed.values(key)


def _must(key: str, value: Any, known: Values) -> str:
    """Return what a value of an argument must be by the source of the vLLM here, as the end of a sentence."""
    from gspo_hpc.planning import installed  # only here, as above

    numbers = {int: "a whole number", float: "a number"}
    told = isinstance(value, int | float) and known.bounds  # else it is no number, and there is nothing to compare
    bounds = " and ".join(f"{installed.BOUNDS[name][1]} {bound:g}" for name, bound in told or ())
    words = [
        *(["true or false"] if bool in known.kinds else []),
        *(f"{text}, {bounds}".removesuffix(", ") for kind, text in numbers.items() if kind in known.kinds),
    ]
    likely = meant(key, value)
    if known.listed:
        shown = ", ".join(str(one) for one in known.listed[:_LISTED]) + ", ..." * (len(known.listed) > _LISTED)
        words.append(f"one of {shown}")
    if likely and all(isinstance(one, int | float) for one in likely):
        hint = f"; write {' or '.join(str(one) for one in likely)}"
    else:
        hint = f"; nearest: {likely[0]}" if likely else ""
    return f"must be {' or '.join(words) or 'text'} for vLLM {_version()}, which is installed here{hint}"


def _version() -> str:
    from gspo_hpc.planning import installed  # only here, as above

    here = installed.vllm()
    return here[0] if here is not None else ""


def takes(key: str, value: Any) -> bool:
    """Return whether vLLM takes a value of an argument, as far as that is known."""
    if key in ENGINE_VALUES:
        return ENGINE_VALUES[key][0](value)
    return (known := _known(key)) is None or known.take(value)


def meant(key: str, value: Any) -> tuple[Any, ...]:
    """Return what may be meant by a value that vLLM does not take, of values that it takes; empty if that is unknown.

    That is 0.9 for 90% or 90, 16000 or 16384 for 16k, the only value that an argument may have, and the nearest one of
    those that are listed in the source of the vLLM here.
    """
    if key not in ENGINE_VALUES:
        known = _known(key)
        return () if known is None or known.take(value) else tuple(_nearest_known(value, known))
    holds, _ = ENGINE_VALUES[key]
    if holds(value):
        return ()
    if key in ONLY_ENGINE_VALUES:
        return (ONLY_ENGINE_VALUES[key],)
    numbers: tuple[Any, ...] = ()
    if isinstance(value, str) and holds in _NUMBERS:
        numbers = numbers_meant(value, whole=holds is not is_share)
    elif isinstance(value, float) and value.is_integer():  # 1e3, which vLLM does not take
        numbers = (int(value),)
    if isinstance(value, int | float) and holds is is_share and 10 <= value <= 100:  # no engine lives on less
        numbers = (value / 100,)
    return tuple(number for number in numbers if holds(number))


def _nearest_known(value: Any, known: Values) -> Iterator[Any]:
    """Yield what may be meant, of the values that the vLLM here takes: the numbers of a text, one listed."""
    if isinstance(value, str) and known.kinds & {int, float}:
        yield from (one for one in numbers_meant(value, whole=float not in known.kinds) if known.take(one))
    texts = [one for one in known.listed if isinstance(one, str)]
    if texts and (near := nearest(str(value).lower(), [one.lower() for one in texts])) is not None:
        yield next(one for one in texts if one.lower() == near)
    counts = sorted(one for one in known.listed if isinstance(one, int))
    if counts and isinstance(value, int | float):
        yield next((one for one in counts if one >= value), counts[-1])


def _advice(key: str, value: Any, holds: Callable[[Any], bool]) -> str:
    """Return what to write for a value that is meant as a number, as the end of a sentence; empty for others."""
    if key in ONLY_ENGINE_VALUES:
        return ""
    if isinstance(value, str):
        return number_meant(value, whole=holds is not is_share, taken=holds) if holds in _NUMBERS else ""
    if holds is is_share and (numbers := meant(key, value)):
        return f"; write {numbers[0]:g} for {value:g} %"
    return "".join(f"; write {number}" for number in meant(key, value))


@rule(
    EngineArgumentRule.ENGINE_ARGUMENT_SPELLING,
    "`rollout.engine` misspells no argument of vLLM, and has none that the installed one lacks",
    Topic.ENGINE_ARGUMENTS,
)
def _spelling(plan: PlanBuilder) -> Iterator[str]:
    for key in plan.config.rollout.engine:
        if near := slip_of(key):
            yield f"rollout.engine.{key} is no argument of vLLM; nearest: {near}"
        elif version := lacks(key):
            hint = near_miss(key, of_this_version())
            yield f"rollout.engine.{key} is no argument of vLLM {version}, which is installed here{hint}"


def lacks(key: str) -> str | None:
    """Return the version of vLLM here if it has no such argument; None if it has, and where none is installed."""
    if (key in ENGINE_VALUES and key not in LATER_OR_EARLIER) or key in OWN_ENGINE_ARGUMENTS:
        return None
    from gspo_hpc.planning import installed  # only here: most plans have no argument of the kind

    here = installed.vllm()
    return here[0] if here is not None and key not in here[1] else None


@rule(
    EngineArgumentRule.ENGINE_TOKENS_HOLD_SEQUENCES,
    "`max_num_batched_tokens` is at least `max_num_seqs`",
    Topic.ENGINE_ARGUMENTS,
)
def _sequences(plan: PlanBuilder) -> Iterator[str]:
    given = plan.config.rollout.engine
    tokens: Any = given.get("max_num_batched_tokens")
    sequences: Any = given.get("max_num_seqs")
    if is_count(tokens) and is_count(sequences) and tokens < sequences:
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
    if is_count(tokens) and given.get("enable_chunked_prefill") is False and tokens < longest:
        made = f"max_prompt_length + max_response_length ({longest}) with rollout.engine.enable_chunked_prefill=false"
        yield f"rollout.engine.max_num_batched_tokens ({tokens}) must be at least {made}"
