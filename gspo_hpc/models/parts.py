"""Parts of a decoder: rotary embeddings, experts, and what mixes the tokens of a layer."""

from __future__ import annotations

from dataclasses import dataclass


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
