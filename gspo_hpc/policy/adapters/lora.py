"""LoRA adapters beside the linear layers and the embedding of Megatron's model (arXiv 2106.09685), in every layout.

A linear layer with weight W gets ``scale * B (A x)`` added to its output. W is frozen; A [rank, inputs] is drawn from
the run's seed and the name of its layer, whatever the layout, and B [outputs, rank] begins as zeros. Megatron's fused
layers (queries, keys and values; gate and up) have an A and a B for each of the layers that they are made of, as
Hugging Face's model and `peft` have them.

Over tensor-parallel ranks B is cut like the rows of W, or A like its columns. What ranks exchange is ``A x``, which has
`rank` numbers a token. With sequence parallelism every rank has other tokens of it, so the gradients of the whole
matrices are summed over the ranks, by the mark that Megatron has for that. Where there are more ranks than key-value
heads, a rank has a part of a group's rows; then B of queries, keys and values is whole on every rank, and each uses its
rows of it.

Each expert has adapters of its own, on the ranks that have the expert. Ranks that share one have the same tokens of it,
and Megatron sums what they make of them and what they give back. So nothing is exchanged for an adapter: with A whole
and B cut, or B whole and A cut, each rank has a part of both sums, and of the gradient of the matrix that is whole.
Those gradients are summed over these ranks when all micro-batches are done (:func:`sum_gradients_of_experts`). Routers
stay as they are.

The embedding's A is looked up as its weight is: every tensor-parallel rank has the columns of its tokens, and the sum
over ranks has `rank` numbers a token. As in `peft` its A begins as zeros, and B is drawn.

Shapes: T tokens of a micro-batch, R rank of the adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gspo_hpc.config.constants import MERGED_ROWS
from gspo_hpc.config.schema import Adapter
from gspo_hpc.models.adapter_table import AdaptedLinear, AdapterPart, embedding, every_linear
from gspo_hpc.models.architecture import Architecture

_NAME = "lora"  # of the module in its linear layer


class Lora(torch.nn.Module):
    """The adapters of one linear layer of Megatron's, on this tensor-parallel rank."""

    def __init__(
        self, linear: AdaptedLinear, adapter: Adapter, arch: Architecture, settings: TransformerConfig
    ) -> None:
        super().__init__()
        self.enabled = True
        self.parts, self.by_rows = linear.parts, linear.cut not in ("columns", "vocab")
        self._cut, self._rank, self._scale = linear.cut, adapter.rank, adapter.alpha / adapter.rank
        self.expert = linear.expert
        self._size, self._mine = settings.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        if self.expert is not None:
            self._size = parallel_state.get_expert_tensor_parallel_world_size()
            self._mine = parallel_state.get_expert_tensor_parallel_rank()
        self._by_sequence = settings.sequence_parallel
        self._deterministic = settings.deterministic_mode
        self._groups = _Groups(arch, self._size, self._mine) if linear.cut == "qkv" else None
        for part in self.parts:
            for which in "ab":
                whole, dim = self.shape(part, which), self.cut_dim(which)
                shape = [-(-length // self._size) if place == dim else length for place, length in enumerate(whole)]
                parameter = torch.nn.Parameter(torch.empty(shape, dtype=settings.params_dtype))
                if self.expert is not None:
                    # Megatron's norm of gradients counts what is cut on every rank, and what is shared on none.
                    set_tensor_model_parallel_attributes(parameter, True, dim or 0, 1)
                    setattr(parameter, "shared", dim is None and self._mine > 0)  # noqa: B010
                    apart = settings.expert_model_parallel_size > 1  # as Megatron marks the weights of experts
                    setattr(parameter, "allreduce", not apart)  # noqa: B010
                elif dim is not None:
                    set_tensor_model_parallel_attributes(parameter, True, dim, 1)
                else:  # whole on every rank, which sees other tokens of it with sequence parallelism
                    sums = self._by_sequence and (which == "a") == self.by_rows
                    setattr(parameter, "sequence_parallel", sums)  # noqa: B010 (an attribute torch lacks)
                self.register_parameter(f"{part.target}_{which}", parameter)

    def shape(self, part: AdapterPart, which: str) -> tuple[int, int]:
        """Return the shape of the whole matrix A or B (`which`: "a" or "b") of a part."""
        return (self._rank, part.inputs) if which == "a" else (part.outputs, self._rank)

    def cut_dim(self, which: str) -> int | None:
        """Return the dimension in which tensor-parallel ranks have a part each of A or B; None: all have it whole."""
        if self.by_rows:
            return 0 if which == "b" and not self._shares_groups else None
        return 1 if which == "a" else None

    def matrix(self, part: AdapterPart, which: str) -> torch.nn.Parameter:
        """Return this rank's A or B of a part."""
        found = self.get_parameter(f"{part.target}_{which}")
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the layer's output, in its shape, from the layer's input x [T, 1, inputs].

        Of an expert it is [T, inputs].
        """
        # Matrices throughout: with more dimensions torch computes other products where a gradient is wanted.
        low = torch.nn.functional.linear(x.flatten(0, -2), torch.cat([self.matrix(part, "a") for part in self.parts]))
        low = self._exchanged(low) * self._scale
        each = zip(self.parts, low.split(self._rank, dim=-1), strict=True)
        output = self._joined([torch.nn.functional.linear(one, self._rows(part)) for part, one in each])
        return output if x.ndim == 2 else output.unflatten(0, (-1, x.shape[1]))

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of W + scale * B A, added in fp32 and rounded once to the dtype of `weight`."""
        pairs = [(self.matrix(part, "a"), self._rows(part, local=True)) for part in self.parts]
        return added(weight, self._joined([product(a, b) for a, b in pairs]), self._scale)

    def local(self, whole: torch.Tensor, which: str) -> torch.Tensor:
        """Return this rank's part of a whole A or B; of a vocabulary, with zeros where ranks have rows without one."""
        dim = self.cut_dim(which)
        if dim is None:
            return whole
        if lacking := -whole.shape[dim] % self._size:
            whole = torch.nn.functional.pad(whole, (0, lacking))  # A's last dimension, which alone may not divide
        return whole.chunk(self._size, dim)[self._mine]

    def partial(self) -> Iterator[torch.nn.Parameter]:
        """Yield the matrices of which each rank that shares an expert has a part of the gradient."""
        if self.expert is not None and self._size > 1:
            for part in self.parts:
                yield from (self.matrix(part, which) for which in "ab" if self.cut_dim(which) is None)

    @property
    def _shares_groups(self) -> bool:
        return self._groups is not None and self._groups.shared

    def _exchanged(self, low: torch.Tensor) -> torch.Tensor:
        """Return A x [T, parts * R] of all of this rank's output, from that of its input."""
        if self._size == 1 or self.expert is not None:
            return low
        if self.by_rows:
            return gather_from_sequence_parallel_region(low) if self._by_sequence else _copied(low)
        if self._by_sequence:
            scattered: torch.Tensor = reduce_scatter_to_sequence_parallel_region(low)
            return scattered
        reduced: torch.Tensor = reduce_from_tensor_model_parallel_region(low)
        return reduced

    def _rows(self, part: AdapterPart, *, local: bool = False) -> torch.Tensor:
        """Return the rows of B that this rank computes with; `local`: no gradient is wanted."""
        matrix = self.matrix(part, "b")
        if self._groups is None or not self._groups.shared:
            return matrix
        # Each rank has the gradient of its own rows, and all rows are on all ranks.
        return (matrix if local else _copied(matrix))[self._groups.rows(part.target)]

    def _joined(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the outputs of the parts [..., rows] in the order of the rows of W; rows without an adapter are 0."""
        if self._cut in ("columns", "vocab"):
            return outputs[0]
        have = {part.target: output for part, output in zip(self.parts, outputs, strict=True)}
        lead = outputs[0].shape[:-1]
        if self._groups is not None:
            return self._groups.joined(have, outputs[0])
        width = outputs[0].shape[-1]
        both = [have.get(name, outputs[0].new_zeros(())) for name in ("gate_proj", "up_proj")]
        return torch.cat([one.expand(*lead, width) for one in both], -1)


class EmbeddingLora(Lora):
    """The adapter of the embedding, on this tensor-parallel rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the embedding's output, in its shape, from tokens x [1, T]."""
        (part,) = self.parts
        a = self.matrix(part, "a")  # [R, tokens of this rank]
        here = x - self._mine * a.shape[1]
        others = (here < 0) | (here >= a.shape[1])
        here = here.masked_fill(others, 0)
        # As Megatron's embedding: the backward pass of torch's need not be deterministic on GPUs.
        low = a.t()[here] if self._deterministic else torch.nn.functional.embedding(here, a.t())
        low = low.masked_fill(others[..., None], 0.0)
        if self._by_sequence:  # where the embedding puts tokens first, too
            low = low.transpose(0, 1).contiguous()
        return torch.nn.functional.linear(self._exchanged(low) * self._scale, self.matrix(part, "b"))

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of W + scale * (B A) transposed, added in fp32 and rounded once."""
        (part,) = self.parts
        return added_to_rows(weight, self.matrix(part, "a"), self.matrix(part, "b"), self._scale)


def added_to_rows(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return an embedding [tokens, outputs] with scale * (B A) transposed added in fp32, block by block of its rows."""
    result = torch.empty_like(weight)
    rows = MERGED_ROWS
    for place, block, columns in zip(result.split(rows), weight.split(rows), a.split(rows, 1), strict=True):
        place.copy_(torch.add(block.float(), product(columns, b), alpha=scale))
    return result


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return (B A) transposed [inputs, rows], in fp32."""
    return torch.nn.functional.linear(a.float().t(), b.float())


def added(weight: torch.Tensor, transposed: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a weight with a product [inputs, rows] added in fp32, rounded once to the dtype of the weight."""
    return torch.add(weight.float(), transposed.t(), alpha=scale).to(weight.dtype)


class _Groups:
    """The rows of queries, keys and values on one tensor-parallel rank.

    Every key-value group has rows of its queries, of its key and of its value, and each rank has equally many rows:
    whole groups, or a part of one.
    """

    def __init__(self, arch: Architecture, size: int, rank: int) -> None:
        groups, dim = arch.num_key_value_heads, arch.head_dim
        self._rows = {"q_proj": arch.num_attention_heads // groups * dim, "k_proj": dim, "v_proj": dim}  # of a group
        self.shared = groups < size  # several ranks have one group
        self._whole = max(1, groups // size)  # groups of a rank
        each = sum(self._rows.values()) * groups // size
        self._begin, self._end, first = rank * each, (rank + 1) * each, 0
        if self.shared:
            first = self._begin // sum(self._rows.values())
        self._group = first

    def rows(self, target: str) -> slice:
        """Return which rows of a whole B this rank has, where several ranks have one group."""
        before = self._group * sum(self._rows.values())
        for name, count in self._rows.items():
            if name == target:
                begin, end = (min(max(at - before, 0), count) for at in (self._begin, self._end))
                return slice(self._group * count + begin, self._group * count + end)
            before += count
        raise KeyError(target)

    def joined(self, have: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., rows] in the order of this rank's rows; `like` has the leading dimensions."""
        lead, found = like.shape[:-1], []
        for name, count in self._rows.items():
            rows = self.rows(name)
            width = rows.stop - rows.start if self.shared else count
            one = have[name].unflatten(-1, (self._whole, width)) if name in have and width else None
            if one is None and name in have:  # it takes part in the backward pass, which all ranks go through together
                one = have[name].view(*lead, self._whole, 0)
            found.append(like.new_zeros(*lead, self._whole, width) if one is None else one)
        return torch.cat(found, -1).flatten(-2)


def _copied(values: torch.Tensor) -> torch.Tensor:
    """Return the values; the gradients of all tensor-parallel ranks are summed."""
    copied: torch.Tensor = copy_to_tensor_model_parallel_region(values)
    return copied


def attach(model: Any, adapter: Adapter, arch: Architecture) -> None:
    """Freeze a chunk of the model, and give its layers adapters, without values yet."""
    model.requires_grad_(False)
    for linear in embedding(arch, adapter.targets) if model.pre_process else []:
        module = model.get_submodule(linear.path)
        module.add_module(_NAME, EmbeddingLora(linear, adapter, arch, model.config))
        module.register_forward_hook(_add_to_embedding)
    for layer, number in zip(model.decoder.layers, layer_numbers(model), strict=True):
        for linear in every_linear(arch, adapter.targets, number):
            if linear.expert is not None and owner(arch, linear.expert) != _expert_rank():
                continue
            module = layer.get_submodule(_path(arch, linear))
            module.add_module(_NAME, Lora(linear, adapter, arch, model.config))
            module.register_forward_hook(_add)
    if model.pre_process and model.config.recompute_granularity is not None:
        # What is computed again gets gradients only if an input of it wants one, and nothing before it is trained.
        model.embedding.register_forward_hook(_want_gradient)


def owner(arch: Architecture, expert: int) -> int:
    """Return the expert-parallel rank that has an expert."""
    assert arch.experts is not None
    return expert // (arch.experts.count // parallel_state.get_expert_model_parallel_world_size())


def _expert_rank() -> int:
    found: int = parallel_state.get_expert_model_parallel_rank()
    return found


def _path(arch: Architecture, linear: AdaptedLinear) -> str:
    """Return where in its layer a linear layer is on the rank that has it."""
    if linear.expert is None:
        return linear.path
    assert arch.experts is not None
    here = linear.expert % (arch.experts.count // parallel_state.get_expert_model_parallel_world_size())
    return f"mlp.experts.local_experts.{here}.{linear.path}"


def _add(module: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
    lora = module.get_submodule(_NAME)
    assert isinstance(lora, Lora)
    return (output[0] + lora(inputs[0]), output[1]) if lora.enabled else output


def _add_to_embedding(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    lora = module.get_submodule(_NAME)
    assert isinstance(lora, EmbeddingLora)
    return output + lora(inputs[0]) if lora.enabled else output


def _want_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def layer_numbers(model: Any) -> range:
    """Return the numbers of a chunk's layers, counted from 0 over all stages."""
    first = get_transformer_layer_offset(model.config, model.vp_stage)
    return range(first, first + len(model.decoder.layers))


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a chunk is that of an adapter, by its name."""
    return f".{_NAME}." in name


def of_weights(model: torch.nn.Module) -> dict[str, Lora]:
    """Return the adapters of a chunk by the name of the weight that they belong to."""
    suffix = f".{_NAME}"
    every = ((name, module) for name, module in model.named_modules() if isinstance(module, Lora))
    return {f"{name.removesuffix(suffix)}.weight": module for name, module in every}


def of_weights_in_order(model: torch.nn.Module) -> list[Lora]:
    """Return the adapters of a chunk, or of a layer, in the order of layers; that of the embedding is the first."""
    return [module for module in model.modules() if isinstance(module, Lora)]


@torch.no_grad()
def sum_gradients_of_experts(chunks: Sequence[Any]) -> None:
    """Sum over the ranks that share an expert what each has of the gradients of whole matrices. Collective."""
    group = parallel_state.get_expert_tensor_parallel_group()
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):  # one at a time: it takes a copy
        gradients = [getattr(one, "main_grad") for lora in of_weights_in_order(layer) for one in lora.partial()]  # noqa: B009
        if gradients:
            joined = torch.cat([one.view(-1) for one in gradients])
            dist.all_reduce(joined, group=group)
            for one, whole in zip(gradients, joined.split([one.numel() for one in gradients]), strict=True):
                one.view(-1).copy_(whole)


@contextlib.contextmanager
def turned_off(chunks: Sequence[Any]) -> Iterator[None]:
    """Have the model compute without its adapters within the block."""
    every = [lora for chunk in chunks for lora in of_weights_in_order(chunk)]
    for lora in every:
        lora.enabled = False
    try:
        yield
    finally:
        for lora in every:
            lora.enabled = True
