"""Parts of a decoder: rotary embeddings, experts, what mixes the tokens of a layer; and pieces of experts that travel.

The ranks that gather experts and the plan that estimates what it takes both call :func:`divide_experts`, so they agree
without a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings. Lengths in tokens; what a kind does not use is ignored by it."""

    theta: float
    kind: str = "default"  # "default", "linear", "llama3", "yarn"
    factor: float = 1.0  # by how much the context is longer than in pre-training
    original_length: int = 0  # the context in pre-training (llama3, yarn)
    low_frequency_factor: float = 1.0  # llama3: waves longer than original_length / this are stretched by the factor
    high_frequency_factor: float = 4.0  # llama3: waves shorter than original_length / this stay as they are
    beta_fast: float = 32.0  # yarn: dimensions that turn more often than this in the original context stay as they are
    beta_slow: float = 1.0  # yarn: ones that turn less often than this are stretched by the factor
    truncate: bool = True  # yarn: whether the bounds between those are whole dimensions
    magnitude: float = 1.0  # yarn: queries and keys are multiplied by this


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that stands in the place of the MLP. Sizes in elements."""

    count: int
    top_k: int  # experts of a token
    ffn_hidden_size: int  # of one
    normalize_top_k: bool  # whether a token's weights of its experts add up to one
    shared_ffn_hidden_size: int = 0  # of the expert that every token has as well; 0: there is none
    dense_layers: tuple[int, ...] = ()  # that have an MLP all the same
    shared_gate: bool = True  # whether the shared expert is behind a gate
    biases: int = 0  # of one expert, in families that are planned only
    router_biases: int = 0


@dataclass(frozen=True)
class Mixer:
    """The part of a layer that mixes tokens, in families that are planned only. Numbers of elements, of one layer."""

    split: int  # parameters that tensor-parallel ranks share
    whole: int  # parameters that every rank has
    products: int  # elements of the matrices that every token is multiplied with
    scores: int  # multiplications for one query and one key, over all heads; 0: tokens do not look back at tokens
    cache: int  # what an engine keeps of a token ...
    cache_heads: int  # ... and the parts that its GPUs can divide this into
    kept: int  # what the backward pass needs of a token


class Piece(NamedTuple):
    """The parameters of experts that are gathered at once: those in [begin, end) of every owner in [first, last)."""

    begin: int
    end: int
    first: int
    last: int
    size: int  # bytes, of all these owners


def divide_experts(sizes: Sequence[int], owners: int, most: int) -> Iterator[Piece]:
    """Yield the pieces in which parameters of `sizes` bytes are gathered, of at most `most` bytes where possible.

    Every owner, which is a rank with experts of its own or several that share them, has such parameters. Owners are
    divided, evenly, before an owner's parameters are. A parameter is never cut, so it may be larger.
    """
    for begin, end in _runs(sizes, most):
        each = sum(sizes[begin:end])
        count = -(-owners // max(1, most // each))
        ends = [owners * number // count for number in range(count + 1)]
        for first, last in itertools.pairwise(ends):
            yield Piece(begin, end, first, last, (last - first) * each)


def _runs(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs that have together at most `most` bytes, if they are several."""
    begin = used = 0
    for place, size in enumerate(sizes):
        if begin < place and used + size > most:
            yield begin, place
            begin, used = place, 0
        used += size
    yield begin, len(sizes)


# The names that families have for sizes: those of `attribute_map` of every decoder of transformers, and a few more.
_NAMES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "emb_dim"),
    "num_attention_heads": (
        *("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
        "num_decoder_attention_heads",
    ),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim", "d_head"),
    "intermediate_size": ("n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "d_inner", "dff", "block_ff_dim"),
    "max_position_embeddings": (
        *("n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length", "max_target_positions"),
        *("max_sequence_length", "seq_length"),
    ),
    "vocab_size": ("padded_vocab_size",),
    "num_experts": ("moe_num_experts",),
    "num_experts_per_tok": ("moe_k", "moe_topk", "num_experts_per_token"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "shared_expert_intermediate_size": ("shared_intermediate_size",),
}
_SIZES = {name for usual_name, others in _NAMES.items() for name in (usual_name, *others)}  # also one for every layer
_INNER = {  # of sections inside, as DBRX has them
    "num_key_value_heads": ("attn_config", "kv_n_heads"),
    "intermediate_size": ("ffn_config", "ffn_hidden_size"),
    "num_experts": ("ffn_config", "moe_num_experts"),
    "num_experts_per_tok": ("ffn_config", "moe_top_k"),
}
_USUAL_INNER = 4  # times the hidden size, where GPT-2 and its like give none


def usual(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with the usual names beside those that it has, of its text model, too."""
    found = _with_usual(raw)
    if isinstance(text := raw.get("text_config"), Mapping):
        found["text_config"] = _with_usual(text)
    return found


def _largest(value: Any) -> Any:
    """Return the largest of sizes that are given for every layer, as Gemma 3n and Hunyuan have them."""
    if isinstance(value, list) and value and all(type(size) is int for size in value):
        return max(value)
    return value


def _with_usual(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _largest(value) if name in _SIZES else value for name, value in raw.items()}

    def add(name: str, value: Any) -> None:
        if found.get(name) is None and type(value) is int:
            found[name] = value

    if raw.get("model_type") == "longcat_flash" and type(layers := raw.get("num_layers")) is int:
        add("num_hidden_layers", 2 * layers)  # each has attention twice
    if raw.get("multi_query") is True and not raw.get("new_decoder_architecture"):  # Falcon, StarCoder
        add("num_key_value_heads", 1)
    for name, (section, own) in _INNER.items():
        add(name, inner.get(own) if isinstance(inner := raw.get(section), Mapping) else None)
    for name, others in _NAMES.items():
        for other in others:
            add(name, found.get(other))
    if isinstance(blocks := raw.get("layers_block_type"), list):  # Nemotron-H
        add("num_hidden_layers", len(blocks))
    hidden = found.get("hidden_size")
    if type(hidden) is int and (raw.get("hidden_size") is None or "n_layer" in raw or "num_layers" in raw):
        add("intermediate_size", hidden * _USUAL_INNER)
    return found
