"""Everything that this room uses of vLLM beyond its public interface.

No other file names an attribute of vLLM with a leading underscore, replaces one of its functions, or reads the insides
of its engine. Each function here says what it relies on, why, since which version of vLLM, and what to check on an
upgrade; ``tests/torch/engine/test_compat.py`` lists the versions that these names were checked against and finds each
of them in the sources of the installed one.

vLLM is imported inside the functions: the trainer's process imports this module before it knows that it will have an
engine. On platforms other than the CPU the patches do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

# Runs the only worker inside the engine core's process: one process less to start, to wait for, and to spin.
# Relies on the class's place, which `distributed_executor_backend` takes as a string. vLLM 0.22 to 0.32.
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

_LANES = 16  # elements: the CPU's kernels take rows of whole vectors


# ---- the engine, from its owner's side


def token_prompt(tokens: Sequence[int]) -> Any:
    """Return a prompt of token ids in the form that ``LLMEngine.add_request`` takes.

    Relies on ``vllm.inputs.tokens_input`` (0.22 to 0.32), a helper that vLLM does not document: the documented
    ``TokensPrompt`` would be preprocessed once more. On an upgrade check that ``add_request`` still takes its result.
    """
    from vllm.inputs import tokens_input

    return tokens_input(list(tokens))


def close_client(llm: Any) -> None:
    """Close the sockets and end the threads of a ``vllm.LLM`` whose processes are gone.

    Relies on ``LLM.llm_engine.engine_core.shutdown`` (0.22 to 0.32); LLM has no method of its own for this. On an
    upgrade check that the core's client still has it, and that it does not wait for processes.
    """
    llm.llm_engine.engine_core.shutdown()


def is_engine_dead(error: BaseException) -> bool:
    """Return True for the error that vLLM raises in place of an answer once its core has ended.

    Relies on the name of ``vllm.v1.engine.exceptions.EngineDeadError`` (0.22 to 0.32), wherever
    the class stands.
    """
    return type(error).__name__ == "EngineDeadError"


def ipc_is_packed_at_init() -> bool:
    """Return True where the ``ipc`` weight-transfer backend learns once, at its start, that tensors come packed.

    Relies on the field ``packed`` of ``IPCWeightTransferInitInfo``. vLLM 0.22 has it in every update's information
    instead. Raises ImportError where the backend cannot be imported: in some versions its module imports Ray.
    """
    from vllm.distributed.weight_transfer import ipc_engine

    return any(field.name == "packed" for field in fields(ipc_engine.IPCWeightTransferInitInfo))


# ---- the engine's own processes


def register_backend(name: str, backend: type) -> None:
    """Register a weight-transfer backend with vLLM, once in a process.

    ``register_engine`` is public but raises on a second call, and vLLM may load a plugin several times. Relies on
    ``WeightTransferEngineFactory._registry``, a dictionary by name (0.22 to 0.32).
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, backend)


def start_reload(model: torch.nn.Module) -> None:
    """Let the layers of `model` take weights in the checkpoint's format again.

    Relies on ``model_loader.reload.initialize_layerwise_reload`` (0.22 to 0.32), which vLLM's own backends call. From
    about 0.24 on the backend has to call it; before, vLLM's worker does.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Repack the layers that are not repacked yet, and the output layer where only the CPU has a copy of it.

    Relies on ``model_loader.reload.finalize_layerwise_reload`` (0.22 to 0.32), as :func:`start_reload`.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    repack_heads(model)


def connector_metadata(connector: Any) -> Any:
    """Return the metadata that the scheduler's side of a KV connector sent for this step.

    Relies on ``KVConnectorBase_V1._get_connector_metadata`` (0.22 to 0.32), by which vLLM's own connectors read it.
    """
    return connector._get_connector_metadata()


def is_running(request: Any) -> bool:
    """Return True while the scheduler has `request` in its running batch: not waiting, preempted or finished.

    Relies on ``vllm.v1.request.Request.status`` being an enum with the name ``RUNNING`` (0.22 to 0.32).
    """
    return bool(request.status.name == "RUNNING")


# ---- patches of the CPU build


def use_cpu_kernels() -> None:
    """Have norms and gated activations computed by vLLM's C++ kernels for the CPU.

    The CPU build ships these kernels and does not use them: without compilation it computes both as a string of torch
    operations, which was a seventh of a small model's generation. Inputs that a kernel does not take go the old way.
    Call this before the model is made.

    Relies on ``torch.ops._C.{rms_norm, fused_add_rms_norm, silu_and_mul}``, on ``forward_cpu`` being looked up on the
    classes RMSNorm and SiluAndMul, and on RMSNorm's attributes (0.32; a version without them keeps its own code). On an
    upgrade check whether the build uses the kernels by itself, then delete this.
    """
    if not _on_cpu():
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
    """Return True for an input [..., width] that the CPU's kernels take."""
    return x.is_contiguous() and x.dtype == dtype and x.shape[-1] % _LANES == 0


def pack_new_experts() -> None:
    """Bring experts into the order in which the CPU's kernel reads them each time that they are loaded.

    vLLM does so the first time only, and would read new weights in the wrong order. Call this before the model is made.

    Relies on ``UnquantizedFusedMoEMethod._setup_kernel(layer, ...)``, its ``moe_kernel`` being None until the first
    load, and ``moe_kernel.fused_experts.process_weights_after_loading`` (0.32; a version without them packs elsewhere).
    On an upgrade check that ``_setup_kernel`` still skips the packing on later loads; else delete this.
    """
    if not _on_cpu():
        return
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        setup = UnquantizedFusedMoEMethod._setup_kernel
        if setup.__module__ == __name__:
            return  # patched before

        def _setup_kernel(self: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            again = self.moe_kernel is not None
            setup(self, layer, *args, **kwargs)
            if again:
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

        UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel


def repack_heads(model: torch.nn.Module) -> None:
    """Pack the output layers of `model` again.

    An output layer that is tied to the embedding gets no tensor of its own, but on the CPU it has a packed copy. Relies
    on ``ParallelLMHead.quant_method.process_weights_after_loading(module)`` (0.22 to 0.32).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def patch_older_worker() -> None:
    """Give the worker's own layerwise reload the device and the repacking that it lacks on the CPU.

    Before about vLLM 0.24 the worker runs the reload itself, and the backend's base class has no
    ``finish_weight_update``; later versions are left as they are. On the CPU such a worker has no device to run it on,
    and leaves the packed copy of a tied output layer as it was. Relies on ``CPUWorker.{start, finish}_weight_update``,
    ``device`` and ``model_runner.model`` (0.22). Delete it with the support of those versions.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    if hasattr(WeightTransferEngine, "finish_weight_update") or not _on_cpu():
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    start, finish = CPUWorker.start_weight_update, CPUWorker.finish_weight_update
    if start.__module__ == __name__:
        return  # patched before

    def start_weight_update(self: Any, *args: Any, **kwargs: Any) -> None:
        self.device = self.device or torch.device("cpu")
        start(self, *args, **kwargs)

    def finish_weight_update(self: Any) -> None:
        finish(self)
        repack_heads(self.model_runner.model)

    CPUWorker.start_weight_update, CPUWorker.finish_weight_update = start_weight_update, finish_weight_update


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
