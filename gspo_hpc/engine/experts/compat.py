"""Everything that the loading of experts uses of vLLM beyond its public interfaces.

Each function says what it relies on and in which versions; ``tests/torch/engine/test_compat.py`` finds these names in
the sources of the installed one. :mod:`gspo_hpc.engine.compat` has the rest of the engine's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def expert_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers of experts that have nothing but their weights, by name; call it after :func:`start_reload`.

    Relies on ``layer_name``, ``quant_method`` and the names of the parameters of FusedMoE, from about 0.24 on
    RoutedExperts, and on ``restore_metadata`` (0.22 to 0.33). Layers that are not found take their tensors one by one.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return {
        name: layer
        for name, layer in layers_with_weights(model).items()
        if get_layerwise_info(layer).restore_metadata[0].keys() == {"w13_weight", "w2_weight"}
    }


def layers_with_weights(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers of experts whose weights are not quantized, by name, as the model computes with them.

    Relies on what :func:`expert_layers` relies on, but on nothing of a reload.
    """
    return {
        str(layer.layer_name): layer
        for layer in model.modules()
        if type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod"
        and all(isinstance(getattr(layer, name, None), torch.Tensor) for name in ("w13_weight", "w2_weight"))
        and isinstance(getattr(layer, "layer_name", None), str)
    }


def weights(layer: Any, kind: str) -> torch.Tensor:
    """Return the weights [experts, rows, columns] of a layer: ``w13``, of gate and up projections, or ``w2``.

    Relies on the parameters' names, and on kernels that leave the first dimension to the experts (0.22 to 0.33).
    """
    found: torch.Tensor = getattr(layer, f"{kind}_weight").data
    return found.flatten(2) if found.dim() > 3 else found


def expert_places(layer: Any) -> list[int]:
    """Return for each expert of the model its place in this worker's `layer`, or -1.

    Relies on ``_expert_map``, which is None without expert parallelism, and on ``w13_weight`` (0.22 to 0.33). With
    copies of experts, as load balancing has them, the list is empty.
    """
    held = layer.w13_weight.shape[0]
    if layer._expert_map is None:
        return list(range(held))
    places = [int(place) for place in layer._expert_map.tolist()]
    return places if sorted(place for place in places if place >= 0) == list(range(held)) else []


def materialize(layer: torch.nn.Module) -> None:
    """Give a layer memory for weights in the checkpoint's format, beside those that it computes with.

    Relies on ``reload.meta.materialize_layer`` (0.22 to 0.33), as the layerwise reload does once it has all tensors.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer

    materialize_layer(layer, get_layerwise_info(layer))


def load_experts(layer: Any, name: str, place: int, shard: str, first: int, stack: torch.Tensor) -> None:
    """Load tensors [experts, ...] of experts `first` and following into parameter `name`, from `place` on.

    Relies on ``reload.layerwise._get_original_loader`` and on the layers' ``weight_loader`` taking all experts of the
    parameter that it is given at once, where the tensor has three dimensions (0.22 to 0.33).
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

    parameter = getattr(layer, name)
    some = torch.nn.Parameter(parameter.data[place : place + len(stack)], requires_grad=False)
    _get_original_loader(parameter)(some, stack, weight_name=name, shard_id=shard, expert_id=first)


def process(layer: torch.nn.Module) -> None:
    """Bring the weights of a layer, all loaded, into the kernel's format, and to where it computes with them.

    Relies on ``reload.layerwise._layerwise_process`` (0.22 to 0.33), which finds no tensors that it kept.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

    _layerwise_process(layer, get_layerwise_info(layer))


class PackedLayer:
    """A layer whose experts are brought into the order of vLLM's kernel for the CPU as they come, where they belong.

    vLLM's own way copies them into a layer beside it, orders that one, and copies the result back.
    """

    def __init__(self, layer: Any, isa: str) -> None:
        self._layer, self._isa = layer, isa
        self._kernel = _kernel_parameters(layer)

    def load(self, place: int, shard: str, stack: torch.Tensor) -> None:
        """Load tensors [experts, ...], whole, of the experts from `place` on; the worker's share is cut out."""
        size = self._kernel["w2_weight"].shape[2]
        begin = self._layer.moe_config.tp_rank * size
        for number, tensor in enumerate(stack, place):
            if shard == "w2":
                to, part = self._kernel["w2_weight"][number], tensor[:, begin : begin + size]
            else:
                half = 0 if shard == "w1" else size
                to, part = self._kernel["w13_weight"][number, half : half + size], tensor[begin : begin + size]
            torch.ops._C.prepack_moe_weight(part.contiguous()[None], to[None], self._isa)

    def finish(self) -> None:
        """Give the layer the tensors that it computes with, all of which have been loaded."""
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

        info = get_layerwise_info(self._layer)
        _place_kernel_tensors(self._layer, info)
        info.reset()


def packed_layer(layer: Any) -> PackedLayer | None:
    """Return the layer as one that takes experts in place, or None where vLLM must load and process it.

    Relies on ``moe_kernel.fused_experts`` being a CPUUnquantizedExperts that does no more after loading than order its
    weights with ``torch.ops._C.prepack_moe_weight(weight, output, isa)``, on ``moe_config.tp_rank``, and on
    ``_place_kernel_tensors`` and ``kernel_tensors`` of the reload (0.32). What the kernel pads goes the usual way, and
    so do other versions.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return None
    experts = getattr(getattr(layer.quant_method, "moe_kernel", None), "fused_experts", None)
    if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
        return None
    kernel = _kernel_parameters(layer)
    as_in_checkpoint = all(getattr(layer, name).shape == tensor.shape for name, tensor in kernel.items())
    processed = type(experts).process_weights_after_loading is CPUUnquantizedExperts.process_weights_after_loading
    w13 = kernel["w13_weight"]
    if as_in_checkpoint and processed and _packs_halves_apart(w13.shape[1], w13.shape[2], w13.dtype, experts.isa):
        return PackedLayer(layer, experts.isa)
    return None


def _kernel_parameters(layer: Any) -> dict[str, torch.Tensor]:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, _ = get_layerwise_info(layer).kernel_tensors
    return {name: parameters[name].data for name in ("w13_weight", "w2_weight")}


@functools.cache
def _packs_halves_apart(rows: int, columns: int, dtype: torch.dtype, isa: str) -> bool:
    """Return True if ordering the two halves of an expert's rows gives the same as ordering all of them."""
    whole = torch.arange(rows * columns).remainder(251).to(dtype).view(1, rows, columns)
    together, apart = torch.empty_like(whole), torch.empty_like(whole)
    torch.ops._C.prepack_moe_weight(whole, together, isa)
    for half in (slice(0, rows // 2), slice(rows // 2, rows)):
        torch.ops._C.prepack_moe_weight(whole[:, half], apart[:, half], isa)
    return torch.equal(together, apart)
