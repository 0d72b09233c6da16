"""The tensors of a Hugging Face folder that a model is made of: names and shapes, and the parameter that holds each.

No torch, so that a folder can be held against its config.json before a run; :mod:`gspo_hpc.ops.weight_map` cuts and
joins the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo_hpc.models.architecture import Architecture

_MLP = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")


@dataclass(frozen=True)
class WeightMapping:
    """One Megatron parameter: its name in the stage, the Hugging Face tensors that it holds, and how it is split.

    `cut` is "none" (replicated), "columns" (dim 1), "vocab" (rows, padded), "qkv" or "gate_up" (rows of each tensor).
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # shapes of the Hugging Face tensors
    cut: str
    expert: int | None = (
        None  # its expert's number in the layer, if it has one: then only some ranks of a stage hold it
    )


def stage_table(
    arch: Architecture,
    first_layer: int,
    num_layers: int,
    first: bool,
    last: bool,
    ep_size: int = 1,
    fused: bool = False,
) -> list[WeightMapping]:
    """Return all parameters of a pipeline stage that holds layers [first_layer, first_layer + num_layers).

    `first` and `last` say that the stage has the embedding, and the output layer. Experts have the names that they have
    on their rank of `ep_size` expert-parallel ones. With `fused`, names are those of Transformer Engine's layers.
    """
    hidden, vocab = (arch.hidden_size,), (arch.vocab_size, arch.hidden_size)
    table = (
        [WeightMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocab,), "vocab")]
        if first
        else []
    )
    for index in range(num_layers):
        layer = first_layer + index
        mine, theirs = f"decoder.layers.{index}", f"model.layers.{layer}"
        table.append(
            WeightMapping(f"{mine}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",), (hidden,), "none")
        )
        table += _attention(arch, f"{mine}.self_attention", f"{theirs}.self_attn")
        norm = f"{theirs}.post_attention_layernorm.weight"
        table.append(WeightMapping(f"{mine}.pre_mlp_layernorm.weight", (norm,), (hidden,), "none"))
        if arch.has_experts(layer):
            table += _experts(arch, f"{mine}.mlp", theirs, ep_size)
        else:
            table += _mlp(arch, f"{mine}.mlp", f"{theirs}.mlp", _MLP, arch.ffn_hidden_size)
    if last:
        table.append(WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,), "none"))
        if arch.tie_word_embeddings and not first:
            table.append(WeightMapping("output_layer.weight", ("model.embed_tokens.weight",), (vocab,), "vocab"))
        if not arch.tie_word_embeddings:
            table.append(WeightMapping("output_layer.weight", ("lm_head.weight",), (vocab,), "vocab"))
    if fused:
        dense = {f"decoder.layers.{i}" for i in range(num_layers) if not arch.has_experts(first_layer + i)}
        table = [replace(mapping, name=_fused_name(mapping.name, dense)) for mapping in table]
    return table


def is_extra(name: str) -> bool:
    """Return True for a tensor that a folder may have although the model needs it not: a tied head, and frequencies."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _fused_name(name: str, dense: set[str]) -> str:
    """Return a parameter's name where norms are fused with the matrix product behind them, and experts are grouped."""
    layer, _, rest = name.partition(".input_layernorm.")
    if rest:
        return f"{layer}.self_attention.linear_qkv.layer_norm_{rest}"
    layer, _, rest = name.partition(".pre_mlp_layernorm.")
    if rest and layer in dense:
        return f"{layer}.mlp.linear_fc1.layer_norm_{rest}"
    layer, _, rest = name.partition(".local_experts.")
    if rest:
        number, product, kind = rest.split(".")
        return f"{layer}.{product}.{kind}{number}"
    return name


def _attention(arch: Architecture, mine: str, theirs: str) -> list[WeightMapping]:
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim

    def three(kind: str, *tail: int) -> WeightMapping:
        names = tuple(f"{theirs}.{which}_proj.{kind}" for which in "qkv")
        return WeightMapping(
            f"{mine}.linear_qkv.{kind}", names, ((queries, *tail), (keys, *tail), (keys, *tail)), "qkv"
        )

    table = [three("weight", arch.hidden_size)]
    if arch.qkv_bias:
        table.append(three("bias"))
    for q_or_k in "qk" if arch.qk_norm else "":
        name = f"{theirs}.{q_or_k}_norm.weight"
        table.append(WeightMapping(f"{mine}.{q_or_k}_layernorm.weight", (name,), ((arch.head_dim,),), "none"))
    shape = (arch.hidden_size, queries)
    return [*table, WeightMapping(f"{mine}.linear_proj.weight", (f"{theirs}.o_proj.weight",), (shape,), "columns")]


def _mlp(
    arch: Architecture, mine: str, theirs: str, names: Sequence[str], ffn: int, expert: int | None = None
) -> list[WeightMapping]:
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    wide, high = (ffn, arch.hidden_size), (arch.hidden_size, ffn)
    return [
        WeightMapping(f"{mine}.linear_fc1.weight", (gate, up), (wide, wide), "gate_up", expert),
        WeightMapping(f"{mine}.linear_fc2.weight", (down,), (high,), "columns", expert),
    ]


def _experts(arch: Architecture, mine: str, layer: str, ep_size: int) -> list[WeightMapping]:
    assert arch.experts is not None
    count, ffn, hidden = arch.experts.count, arch.experts.ffn_hidden_size, arch.hidden_size
    mixtral = arch.family == "MixtralForCausalLM"
    theirs, names = (f"{layer}.block_sparse_moe", _MIXTRAL) if mixtral else (f"{layer}.mlp", _MLP)
    table = [WeightMapping(f"{mine}.router.weight", (f"{theirs}.gate.weight",), ((count, hidden),), "none")]
    if arch.experts.shared_ffn_hidden_size:
        shared = arch.experts.shared_ffn_hidden_size
        gate = (f"{theirs}.shared_expert_gate.weight",)
        table.append(WeightMapping(f"{mine}.shared_experts.gate_weight", gate, ((1, hidden),), "none"))
        table += _mlp(arch, f"{mine}.shared_experts", f"{theirs}.shared_expert", _MLP, shared)
    for expert in range(count):
        place = f"{mine}.experts.local_experts.{expert % (count // ep_size)}"
        table += _mlp(arch, place, f"{theirs}.experts.{expert}", names, ffn, expert)
    return table
