"""The longest sequence of a model that vLLM takes, from its config.json: its positions, and how they are scaled.

The arithmetic is that of `_get_and_verify_max_len` in vllm/config/model.py, from 0.22 on. Megatron-Core computes rotary
embeddings for any position, so nothing else bounds a model that has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_KEYS = (  # the least of these that are given counts, as in vLLM's model_arch_config_convertor.py
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
_DEFAULTS = {  # of the first key, as transformers has it for the families that are trained
    **dict.fromkeys(("mistral", "mixtral"), 131072),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), 32768),
    "llama": 2048,
}
_INSTEAD = "model_max_length"  # of Cohere's models, which counts in the place of all of them
_ORIGINAL = "original_max_position_embeddings"
_SCALED = frozenset({"longrope", "llama3"})  # types with which positions are given as they are scaled
_SCALED_LATER = _SCALED | {"yarn", "deepseek_yarn", "deepseek_llama_scaling"}  # in newer versions
_OTHER_NAMES = {"su": "longrope", "mrope": "default", "telechat3-yarn": "yarn"}


class Positions(NamedTuple):
    """The tokens of the longest sequence, and what they are made of."""

    length: int
    made: str
    of_file: int  # positions as config.json gives them


def longest(content: Mapping[str, Any], *, yarn_scales: bool) -> Positions | None:
    """Return the longest sequence that vLLM takes of a model; None where nothing is known of its positions.

    `content` is that of config.json, or its `text_config`. `yarn_scales`: whether vLLM multiplies the original
    positions of YaRN by its factor, as versions up to 0.29 do; 0.32 and later ones take positions as they are given.
    """
    given = {key: value for key in _KEYS if (value := _number(content.get(key))) is not None and value > 0}
    default = _DEFAULTS.get(str(content.get("model_type"))) if _KEYS[0] not in content else None
    if default is not None:
        given[_KEYS[0]] = float(default)
    if (instead := _number(content.get(_INSTEAD)) or 0.0) > 0:
        given = {_INSTEAD: instead}
    if not given:
        return None
    key = min(given, key=lambda one: given[one])
    length = of_file = math.floor(given[key])
    made, factor = f"{key} ({length})", 1.0
    if default is not None and key == _KEYS[0]:
        made = f"{key} ({length}, the default of transformers, which counts where config.json has none)"
    for rope in _ropes(content) if "gemma3" not in str(content.get("model_type")) else ():
        kind = _kind(rope)
        if kind in (_SCALED if yarn_scales else _SCALED_LATER):
            continue
        if "factor" in rope:
            factor = _number(rope["factor"]) or 1.0
        original = _number(content.get(_ORIGINAL) or rope.get(_ORIGINAL))
        if kind == "yarn" and original is not None:
            length, made = math.floor(original), f"{_ORIGINAL} ({math.floor(original)})"
    if factor != 1.0:
        made += f" x factor ({factor:g})"
    return Positions(math.floor(length * factor), made, of_file)


def _ropes(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embeddings of the layers: one for all, or one for each type of layer."""
    given = content.get("rope_scaling") or content.get("rope_parameters")
    if not isinstance(given, Mapping):
        return
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    yield from nested or [given]


def _kind(rope: Mapping[str, Any]) -> str:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return _OTHER_NAMES.get(kind, kind)


def _number(value: Any) -> float | None:
    """Return a number that is finite; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
