"""Hugging Face tensors <-> this rank's Megatron shards: load, stream to engines, export.

Floor 3. One table (:func:`stage_table`) says for every Megatron parameter of a stage which Hugging Face tensors make it
and how it is cut over tensor-parallel ranks. Loading reads only the rows a rank needs; streaming gathers one parameter
after the other, so the extra memory is one full tensor. Every rank must take part in :func:`stream`.

Layout of Megatron's fused tensors (rows): ``linear_qkv`` holds, for every key/value group, its query heads, its key
head, its value head; ``linear_fc1`` holds a rank's gate rows, then its up rows.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from safetensors.torch import save_file

from gspo_hpc.model import PackedGPTModel, padded_vocab_size
from gspo_hpc.model_config import Architecture

MAX_SHARD_BYTES = 2 * 1024**3  # of one safetensors file of an export


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter: its name in the stage, the Hugging Face tensors it holds, and its cut.

    cut: "none" (replicated), "rows" (dim 0), "columns" (dim 1), "vocab" (rows, padded), "qkv", "gate_up".
    """

    name: str
    hf: tuple[str, ...]
    cut: str


class Folder:
    """The safetensors files of a Hugging Face folder as one mapping from name to lazily read tensor."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            files: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        elif (self.path / "model.safetensors").exists():
            with safe_open(self.path / "model.safetensors", framework="pt") as opened:
                files = dict.fromkeys(opened.keys(), "model.safetensors")
        else:
            raise ValueError(f"model.path {path} has no model.safetensors and no model.safetensors.index.json")
        self._files = files

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as stored. ValueError names a missing one."""
        if name not in self._files:
            raise ValueError(f"model.path {self.path}: tensor {name} is missing")
        with safe_open(self.path / self._files[name], framework="pt") as opened:
            return opened.get_tensor(name)


def stage_table(arch: Architecture, first_layer: int, num_layers: int, first: bool, last: bool) -> list[Entry]:
    """All parameters of a pipeline stage that holds layers [first_layer, first_layer + num_layers)."""
    table = [Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")] if first else []
    for index in range(num_layers):
        mine, theirs = f"decoder.layers.{index}", f"model.layers.{first_layer + index}"
        attention = f"{theirs}.self_attn"
        table.append(Entry(f"{mine}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",), "none"))
        table.append(Entry(f"{mine}.self_attention.linear_qkv.weight", _three(attention, "weight"), "qkv"))
        if arch.qkv_bias:
            table.append(Entry(f"{mine}.self_attention.linear_qkv.bias", _three(attention, "bias"), "qkv"))
        if arch.qk_norm:
            for q_or_k in "qk":
                name = f"{mine}.self_attention.{q_or_k}_layernorm.weight"
                table.append(Entry(name, (f"{attention}.{q_or_k}_norm.weight",), "none"))
        table.append(Entry(f"{mine}.self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",), "columns"))
        table.append(Entry(f"{mine}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",), "none"))
        mlp = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        table.append(Entry(f"{mine}.mlp.linear_fc1.weight", mlp, "gate_up"))
        table.append(Entry(f"{mine}.mlp.linear_fc2.weight", (f"{theirs}.mlp.down_proj.weight",), "columns"))
    if last:
        table.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "none"))
        if arch.tie_word_embeddings and not first:
            table.append(Entry("output_layer.weight", ("model.embed_tokens.weight",), "vocab"))
        if not arch.tie_word_embeddings:
            table.append(Entry("output_layer.weight", ("lm_head.weight",), "vocab"))
    return table


def _three(attention: str, kind: str) -> tuple[str, str, str]:
    return (f"{attention}.q_proj.{kind}", f"{attention}.k_proj.{kind}", f"{attention}.v_proj.{kind}")


def to_shard(entry: Entry, tensors: Sequence[torch.Tensor], arch: Architecture, rank: int, size: int) -> torch.Tensor:
    """Rank `rank` of `size`'s shard of one parameter, from its full Hugging Face tensors."""
    if entry.cut == "none":
        return tensors[0]
    if entry.cut == "rows":
        return tensors[0].chunk(size, 0)[rank]
    if entry.cut == "columns":
        return tensors[0].chunk(size, 1)[rank]
    if entry.cut == "gate_up":
        return torch.cat([tensor.chunk(size, 0)[rank] for tensor in tensors])
    if entry.cut == "vocab":
        rows = padded_vocab_size(arch, size) // size
        part = tensors[0][rank * rows : (rank + 1) * rows]
        if part.shape[0] < rows:  # the last rank's padding rows
            part = torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
        return part
    assert entry.cut == "qkv", entry
    groups, dim = arch.num_key_value_heads, arch.head_dim
    tail = tensors[0].shape[1:]
    split = [tensor.reshape(groups, -1, *tail) for tensor in tensors]  # per group: queries, key, value rows
    assert split[1].shape[1] == split[2].shape[1] == dim
    return torch.cat(split, dim=1).chunk(size, 0)[rank].reshape(-1, *tail)


def to_hf(entry: Entry, shards: Sequence[torch.Tensor], arch: Architecture) -> list[tuple[str, torch.Tensor]]:
    """The full Hugging Face tensors of one parameter, from all ranks' shards: the inverse of :func:`to_shard`."""
    if entry.cut == "none":
        return [(entry.hf[0], shards[0])]
    if entry.cut == "rows":
        return [(entry.hf[0], torch.cat(list(shards)))]
    if entry.cut == "columns":
        return [(entry.hf[0], torch.cat(list(shards), dim=1))]
    if entry.cut == "vocab":
        return [(entry.hf[0], torch.cat(list(shards))[: arch.vocab_size])]
    if entry.cut == "gate_up":
        halves = [shard.chunk(2, 0) for shard in shards]
        return [(name, torch.cat([half[i] for half in halves])) for i, name in enumerate(entry.hf)]
    groups, dim = arch.num_key_value_heads, arch.head_dim
    full = torch.cat(list(shards))
    tail = full.shape[1:]
    queries = arch.num_attention_heads // groups * dim
    parts = full.reshape(groups, queries + 2 * dim, *tail).split([queries, dim, dim], dim=1)
    return [(name, part.reshape(-1, *tail)) for name, part in zip(entry.hf, parts, strict=True)]


def _my_table(model: PackedGPTModel, arch: Architecture) -> list[Entry]:
    return stage_table(
        arch,
        get_transformer_layer_offset(model.config),
        len(model.decoder.layers),
        model.pre_process,
        model.post_process,
    )


@torch.no_grad()
def load(model: PackedGPTModel, arch: Architecture, folder: str | Path) -> None:
    """Fill this rank's shards from a Hugging Face folder. Missing, unknown or misshapen tensors are a ValueError."""
    source = Folder(folder)
    every = stage_table(arch, 0, arch.num_layers, True, True)
    known = {name for entry in every for name in entry.hf} | {"lm_head.weight"}  # tied heads may be stored too
    unknown = sorted(name for name in source.names() - known if not name.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ValueError(f"model.path {folder}: {len(unknown)} tensors have no place in the model: {unknown[:3]}")
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    parameters = dict(model.named_parameters())
    for entry in _my_table(model, arch):
        shard = to_shard(entry, [source.read(name) for name in entry.hf], arch, rank, size)
        parameter = parameters.pop(entry.name)
        if parameter.shape != shard.shape:
            raise ValueError(
                f"model.path {folder}: {entry.hf[0]} gives {tuple(shard.shape)}, config.json says "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(shard)
    assert not parameters, f"parameters without a rule: {sorted(parameters)}"


@torch.no_grad()
def stream(model: PackedGPTModel, arch: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor, full, in a fixed order, on every rank. All ranks must iterate to the end.

    Tensors may alias the model's parameters: use or copy them before the next optimizer step.
    """
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    pp_size = parallel_state.get_pipeline_model_parallel_world_size()
    if pp_size == 1:
        parameters = dict(model.named_parameters())
        for entry in _my_table(model, arch):
            yield from to_hf(entry, _gather(parameters[entry.name].detach(), entry, tp_size), arch)
        return
    parameters = dict(model.named_parameters())
    group = parallel_state.get_pipeline_model_parallel_group()
    my_stage = parallel_state.get_pipeline_model_parallel_rank()
    ranks = dist.get_process_group_ranks(group)
    device = next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    layers = torch.zeros(pp_size, 2, dtype=torch.int64, device=device)
    layers[my_stage] = torch.tensor([get_transformer_layer_offset(model.config), len(model.decoder.layers)])
    dist.all_reduce(layers, group=group)
    seen: set[str] = set()  # a tied head of the last stage repeats the embedding
    for stage in range(pp_size):
        first_layer, count = (int(value) for value in layers[stage].tolist())
        for entry in stage_table(arch, first_layer, count, stage == 0, stage == pp_size - 1):
            if entry.hf[0] in seen:
                continue
            seen.update(entry.hf)
            if stage == my_stage:
                tensors = to_hf(entry, _gather(parameters[entry.name].detach(), entry, tp_size), arch)
            else:
                tensors = [
                    (name, torch.empty(shape, dtype=dtype, device=device)) for name, shape in hf_shapes(entry, arch)
                ]
            for name, tensor in tensors:
                tensor = tensor.contiguous()
                dist.broadcast(tensor, ranks[stage], group=group)
                yield name, tensor


def _gather(shard: torch.Tensor, entry: Entry, tp_size: int) -> list[torch.Tensor]:
    if tp_size == 1 or entry.cut == "none":
        return [shard]
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(tp_size)]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def hf_shapes(entry: Entry, arch: Architecture) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the Hugging Face tensors of one entry."""
    hidden, ffn, dim = arch.hidden_size, arch.ffn_hidden_size, arch.head_dim
    heads, groups = arch.num_attention_heads, arch.num_key_value_heads
    if entry.cut == "vocab":
        return [(entry.hf[0], (arch.vocab_size, hidden))]
    if entry.cut == "gate_up":
        return [(name, (ffn, hidden)) for name in entry.hf]
    if entry.cut == "qkv":
        tail = (hidden,) if entry.name.endswith("weight") else ()
        rows = (heads * dim, groups * dim, groups * dim)
        return [(name, (count, *tail)) for name, count in zip(entry.hf, rows, strict=True)]
    if entry.cut == "columns":
        inner = ffn if "mlp" in entry.name else heads * dim
        return [(entry.hf[0], (hidden, inner))]
    return [(entry.hf[0], (dim,) if "_layernorm" in entry.name and "self_attention" in entry.name else (hidden,))]


def export(model: PackedGPTModel, arch: Architecture, source: str | Path, out: Path) -> None:
    """Write the weights with the configuration and tokenizer of `source` as a Hugging Face folder. One rank only.

    The folder appears whole or not at all; one that exists and is not empty is refused.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} exists and is not empty: give another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        staging = Path(name) / out.name
        staging.mkdir()
        dtype = _write_shards(stream(model, arch), staging)
        for path in sorted(Path(source).iterdir()):
            if path.is_file() and not path.name.startswith("model") and path.suffix not in (".safetensors", ".bin"):
                shutil.copyfile(path, staging / path.name)
        settings = json.loads((staging / "config.json").read_text("utf-8"))
        settings.pop("torch_dtype", None)
        (staging / "config.json").write_text(json.dumps(settings | {"dtype": dtype}, indent=2) + "\n", "utf-8")
        if out.exists():
            out.rmdir()
        staging.rename(out)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> str:
    """Safetensors files of bounded size, with an index where there is more than one. The dtype's name."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0
    dtype = ""

    def flush() -> None:
        save_file(pending, folder / f"part-{len(shards):05d}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > MAX_SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous().clone()
        size += nbytes
        total += nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
    flush()
    if len(shards) == 1:
        (folder / "part-00000").rename(folder / "model.safetensors")
        return dtype
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number:05d}").rename(folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1) + "\n", "utf-8"
    )
    return dtype
