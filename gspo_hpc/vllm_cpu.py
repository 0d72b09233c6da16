"""What vLLM's CPU build leaves undone: kernels that it has and does not use, copies of weights that it forgets.

Floor 3, loaded in vLLM's processes by :mod:`gspo_hpc.vllm_plugin`. On other platforms everything here does nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from vllm.platforms import current_platform

_LANES = 16  # the kernels take rows of whole vectors


def use_own_kernels() -> None:
    """Have norms and gated activations computed by vLLM's C++ kernels for the CPU, where no compiler fuses them.

    Without compilation vLLM computes both as a string of torch operations, which was a seventh of a small model's
    generation. Anything that a kernel does not take goes the old way. Call it before the model is made.
    """
    if not current_platform.is_cpu():
        return
    with contextlib.suppress(ImportError, AttributeError):  # another version, without the layers or the kernels
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.layernorm import RMSNorm

        kernels = torch.ops._C
        rms_norm, add_rms_norm, silu_and_mul = kernels.rms_norm, kernels.fused_add_rms_norm, kernels.silu_and_mul
        native_norm, native_silu = RMSNorm.forward_native, SiluAndMul.forward_native

        def norm(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            weight = getattr(self, "weight", None)
            plain = type(self).forward_native is native_norm and self.variance_size_override is None
            if not (plain and weight is not None and getattr(self, "has_weight", True) and _takes(x, weight.dtype)):
                return self.forward_native(x, residual)
            if residual is None:
                out = torch.empty_like(x)
                rms_norm(out, x, weight.data, self.variance_epsilon)
                return out
            if not _takes(residual, x.dtype):
                return self.forward_native(x, residual)
            add_rms_norm(x, residual, weight.data, self.variance_epsilon)
            return x, residual

        def silu(self: Any, x: torch.Tensor) -> torch.Tensor:
            if type(self).forward_native is not native_silu or not _takes(x, x.dtype) or x.shape[-1] % (2 * _LANES):
                return self.forward_native(x)  # type: ignore[no-any-return]
            out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
            silu_and_mul(out, x)
            return out

        RMSNorm.forward_cpu, SiluAndMul.forward_cpu = norm, silu


def _takes(x: torch.Tensor, dtype: torch.dtype) -> bool:
    return x.is_contiguous() and x.dtype == dtype and x.shape[-1] % _LANES == 0


def mend_older_worker() -> None:
    """Where vLLM's worker runs the layerwise reload itself, on the CPU it has no device to run it on, and leaves the
    packed copy of a tied output layer as it was."""
    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    start, finish = CPUWorker.start_weight_update, CPUWorker.finish_weight_update
    if start.__module__ == __name__:
        return  # mended before

    def start_weight_update(self: Any, *args: Any, **kwargs: Any) -> None:
        self.device = self.device or torch.device("cpu")
        start(self, *args, **kwargs)

    def finish_weight_update(self: Any) -> None:
        finish(self)
        repack_heads(self.model_runner.model)

    CPUWorker.start_weight_update, CPUWorker.finish_weight_update = start_weight_update, finish_weight_update


def pack_new_experts() -> None:
    """Bring experts into the order in which the CPU's kernel reads them each time they are loaded.

    vLLM does so the first time only, and would read new weights in the wrong order. Call it before the model is made.
    """
    if not current_platform.is_cpu():
        return
    with contextlib.suppress(ImportError, AttributeError):  # another version, which packs elsewhere
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        setup = UnquantizedFusedMoEMethod._setup_kernel
        if setup.__module__ == __name__:
            return  # mended before

        def _setup_kernel(self: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            again = self.moe_kernel is not None
            setup(self, layer, *args, **kwargs)
            if again:
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

        UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel


def repack_heads(model: torch.nn.Module) -> None:
    """Pack the output layer again: tied to the embedding it gets no tensor of its own, but on the CPU has a copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
