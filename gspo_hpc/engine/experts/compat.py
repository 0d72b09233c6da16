"""Everything that the loading of experts uses of vLLM beyond its public interfaces.

Each function says what it relies on and in which versions; ``tests/torch/engine/test_compat.py`` finds these names in
the sources of the installed one. :mod:`gspo_hpc.engine.compat` has the rest of the engine's.
"""

from __future__ import annotations

from typing import Any

import torch


def expert_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers of experts that have nothing but their weights, by name; call it after :func:`start_reload`.

    Relies on ``layer_name``, ``quant_method`` and the names of the parameters of FusedMoE, from about 0.24 on
    RoutedExperts, and on ``restore_metadata`` (0.22 to 0.33). Layers that are not found take their tensors one by one.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return {
        str(layer.layer_name): layer
        for layer in model.modules()
        if type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod"
        and get_layerwise_info(layer).restore_metadata[0].keys() == {"w13_weight", "w2_weight"}
        and isinstance(getattr(layer, "layer_name", None), str)
    }


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
