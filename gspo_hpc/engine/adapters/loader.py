"""Adapters beside an engine's weights: what vLLM's workers do with those that their owner sends.

vLLM can keep LoRA adapters apart from the weights, as files that it reads when a request names them. Here they come
through memory, like weights: a worker makes them known to vLLM under the number of their version before a request names
it, so nothing is read. vLLM's prefix cache has the name of the adapters in its keys, so keys and values of one version
are never taken for those of another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

PLACES = 1  # versions that an engine computes with at once


def request(version: int | None) -> Any:
    """Return what a request of vLLM's names its adapters by; None for an engine without adapters.

    There is nothing at the path: vLLM would look there if the worker did not have the version, and fail.
    """
    if version is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"version-{version}", version, "/handed over in memory")


def install(model: Any, bucket: Mapping[str, Any], matrices: Mapping[str, torch.Tensor]) -> None:
    """Have `model` compute with these matrices for requests that name the bucket's version, and forget all others.

    Raises ValueError where a matrix belongs to no layer of the model that can have adapters: vLLM leaves it out.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager, version = model.lora_manager, bucket["version"]
    settings = PEFTHelper(r=bucket["rank"], lora_alpha=bucket["alpha"], target_modules=[])
    # Without the model's own mapper of names: layers that have adapters have the same names here and there, but a
    # mapper also has the names of fused layers, and how to take these out of it differs from version to version.
    made = LoRAModel.from_lora_tensors(
        version,
        {f"base_model.model.{name}.weight": matrix for name, matrix in matrices.items()},
        settings,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
    )
    before = set(manager.list_adapters())
    if version in before:  # left by vLLM's trial runs, which use the first numbers
        manager.remove_adapter(version)
    manager.add_adapter(made)  # which brings together what vLLM has in one layer
    if strays := sorted(made.loras.keys() - manager.modules.keys()):
        raise ValueError(f"vLLM has no adapters on {', '.join(strays[:3])}")
    manager.activate_adapter(version)
    for other in before - {version}:
        manager.remove_adapter(other)


@contextlib.contextmanager
def set_aside(model: Any) -> Iterator[None]:
    """Let the layers of `model` have their own names within the block, which they lose where vLLM wraps them.

    Its loading of weights looks for these names. A model without adapters is left as it is.
    """
    manager = getattr(model, "lora_manager", None)
    wrapped = {} if manager is None else dict(manager.modules)
    for name, wrapper in wrapped.items():
        _put(model, name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrapped.items():
            _put(model, name, wrapper)


def _put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
