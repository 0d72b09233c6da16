"""Everything that this room uses of vLLM, and of torch's sharing of GPU memory, beyond the public interface.

No other file names an attribute of vLLM with a leading underscore, replaces one of its functions, or reads the insides
of its engine. Each function here says what it relies on, why, since which version of vLLM, and what to check on an
upgrade; ``tests/torch/engine/test_compat.py`` lists the versions that these names were checked against and finds each
of them in the sources of the installed one.

vLLM is imported inside the functions: the trainer's process imports this module before it knows that it will have an
engine. On platforms other than the CPU the patches do nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Runs the only worker in the process of vLLM's core: one process less to start, to wait for, and to spin.
# Relies on the class's place, which `distributed_executor_backend` takes as a string. vLLM 0.22 to 0.33.
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

_LANES = 16  # elements: the CPU's kernels take rows of whole vectors


# ---- the process that owns the vllm.LLM


def token_prompt(tokens: Sequence[int]) -> Any:
    """Return a prompt of token ids in the form that ``LLMEngine.add_request`` takes.

    Relies on ``vllm.inputs.tokens_input`` (0.22 to 0.33), a helper that vLLM does not document: the documented
    ``TokensPrompt`` would be preprocessed once more. On an upgrade check that ``add_request`` still takes its result.
    """
    from vllm.inputs import tokens_input

    return tokens_input(list(tokens))


def shut_down(llm: Any) -> None:
    """End the processes of a ``vllm.LLM``, and remove its files and sockets.

    Relies on ``LLM.llm_engine.engine_core.shutdown`` (0.22 to 0.33), which both of vLLM's clients of the core have; LLM
    has no method of its own for this. The process ends with its engine, so garbage is left: where the core runs in this
    process, vLLM would call ``gc.unfreeze`` and look through everything that its imports made, several times over.
    """
    gc.unfreeze = lambda: None
    llm.llm_engine.engine_core.shutdown()


def is_of_the_core(error: BaseException) -> bool:
    """Return True for an error that vLLM's core raised in this process, while it loaded the model or made the cache.

    What the arguments say by themselves is checked before there is a core. Relies on ``vllm.v1.engine.core`` being the
    module of the core (0.22 to 0.33).
    """
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "vllm.v1.engine.core" for frame, _ in frames)


def is_engine_dead(error: BaseException) -> bool:
    """Return True for the error that vLLM raises in place of an answer once its core has ended.

    Relies on the name of ``vllm.v1.engine.exceptions.EngineDeadError`` (0.22 to 0.33), wherever
    the class stands.
    """
    return type(error).__name__ == "EngineDeadError"


# ---- GPU memory that a rank shares with an engine


@contextlib.contextmanager
def ordinary_segments() -> Iterator[None]:
    """Have torch allocate from the driver's ordinary memory.

    With expandable_segments a mapping in another process needs pidfd_getfd, which containers and hardened kernels
    refuse. Torch finds no block of such a segment while the setting is off; the other settings are said again, because
    each call sets them all. Relies on ``torch.cuda.memory._set_allocator_settings`` (torch 2.11 to 2.14), which is
    deprecated for a name in ``torch._C``.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:true" not in given.lower().replace(" ", ""):
        yield
        return
    others = [one for one in given.split(",") if not one.strip().startswith("expandable_segments")]
    memory: Any = torch.cuda.memory
    memory._set_allocator_settings(",".join([*others, "expandable_segments:False"]))
    try:
        yield
    finally:
        memory._set_allocator_settings(given)


def export_memory(memory: torch.Tensor) -> dict[str, Any]:
    """Return, in plain values, where another process finds `memory` [bytes], which is on a GPU; counted as one export.

    Relies on the order of the values of ``torch.multiprocessing.reductions.reduce_tensor`` (torch 2.11 to 2.14).
    """
    from torch.multiprocessing.reductions import reduce_tensor

    values = reduce_tensor(memory)[1]
    return {
        **{"handle": values[7].hex(), "size": values[8], "offset": values[9]},
        **{"counter": values[11].hex(), "counter_offset": values[12], "event": values[13].hex(), "waits": values[14]},
    }


def map_export(export: dict[str, Any]) -> torch.Tensor:
    """Return the memory [bytes] that another process on the same GPU has exported; relies on what the export does."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    size, device = export["size"], torch.cuda.current_device()
    handle, counter, event = (bytes.fromhex(export[name]) for name in ("handle", "counter", "event"))
    storage = (torch.storage.TypedStorage, torch.uint8, device, handle, size, export["offset"], False)
    mapped: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor, (size,), (1,), 0, *storage, counter, export["counter_offset"], event, export["waits"]
    )
    return mapped


def release_ipc_counter(counter: bytes, offset: int) -> None:
    """Count that a worker which is dead has let go of memory that was exported to it: else torch keeps it for ever.

    Relies on ``torch.UntypedStorage._release_ipc_counter`` (torch 2.11 to 2.14), which torch calls for a second
    mapping of what a process has mapped.
    """
    torch.UntypedStorage._release_ipc_counter(counter, offset, device="cuda")


# ---- the engine's own processes


def register_backend(name: str, backend: type) -> None:
    """Register a weight-transfer backend with vLLM, once in a process.

    ``register_engine`` is public but raises on a second call, and vLLM may load a plugin several times. Relies on
    ``WeightTransferEngineFactory._registry``, a dictionary by name (0.22 to 0.33).
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, backend)


def start_reload(model: torch.nn.Module) -> None:
    """Let the layers of `model` take weights in the checkpoint's format again.

    Relies on ``model_loader.reload.initialize_layerwise_reload`` (0.22 to 0.33), which vLLM's own backends call. From
    about 0.24 on the backend has to call it; before, vLLM's worker does.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Repack the layers that are not repacked yet, and the output layer where only the CPU has a copy of it.

    Relies on ``model_loader.reload.finalize_layerwise_reload`` (0.22 to 0.33), as :func:`start_reload`.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    repack_heads(model)


def keep_pending(model: torch.nn.Module, memory: torch.Tensor) -> None:
    """Copy what layers of `model` still hold of `memory`, because they wait for more weights.

    Relies on ``reload.layerwise.get_layerwise_info`` and on ``loaded_weights`` being pairs of a name and bound
    arguments (0.22 to 0.33). What is not found here would be overwritten by the next bucket but one, so the tests send
    a layer in several.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    place = memory.untyped_storage().data_ptr()
    for layer in model.modules():
        for _, given in get_layerwise_info(layer).loaded_weights:
            tensors = [(key, one) for key, one in given.arguments.items() if isinstance(one, torch.Tensor)]
            for key, one in tensors:
                if not one.is_meta and one.untyped_storage().data_ptr() == place:
                    given.arguments[key] = one.clone()


def worker_rank() -> int:
    """Return this worker's place among those of its engine."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def connector_metadata(connector: Any) -> Any:
    """Return the metadata that the scheduler's side of a KV connector sent for this step.

    Relies on ``KVConnectorBase_V1._get_connector_metadata`` (0.22 to 0.33), by which vLLM's own connectors read it.
    """
    return connector._get_connector_metadata()


def is_running(request: Any) -> bool:
    """Return True while the scheduler has `request` in its running batch: not waiting, preempted or finished.

    Relies on ``vllm.v1.request.Request.status`` being an enum with the name ``RUNNING`` (0.22 to 0.33).
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


def compute_logits_in_fp32() -> None:
    """Have ``hf_overrides: {head_dtype: float32}`` obeyed by versions of vLLM that do so for pooling models only.

    vLLM 0.22 replaces it by the model's type, with a warning. Later versions have ``LogitsProcessor._apply_head``, and
    are left as they are. Call this before the model is made.

    Relies on ``LogitsProcessor._get_logits(hidden_states, lm_head, embedding_bias)``, ``_gather_logits`` and
    ``org_vocab_size`` (0.22), and on ``VocabParallelEmbedding.weight`` where the head is not quantized. Delete it with
    the support of those versions.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    if hasattr(LogitsProcessor, "_apply_head"):
        return
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    construct, get_logits = LogitsProcessor.__init__, LogitsProcessor._get_logits
    if get_logits.__module__ == __name__:
        return  # patched before

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        model = get_current_vllm_config().model_config
        self.in_fp32 = getattr(model.hf_config, "head_dtype", None) == "float32"

    def _get_logits(self: Any, hidden: torch.Tensor, lm_head: Any, bias: torch.Tensor | None, *rest: Any) -> Any:
        plain = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)
        if not (self.in_fp32 and plain) or hidden.dtype == torch.float32:
            return get_logits(self, hidden, lm_head, bias, *rest)
        logits = fp32_product(hidden, lm_head.weight)
        if bias is not None:
            logits = logits + bias.float()
        gathered = self._gather_logits(logits)
        return None if gathered is None else gathered[..., : self.org_vocab_size]

    LogitsProcessor.__init__, LogitsProcessor._get_logits = __init__, _get_logits


def fp32_product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return hidden [..., H] times weight [V, H] transposed, in fp32, without a copy of the weight on GPUs."""
    if not hidden.is_cuda:
        return hidden.float() @ weight.float().t()
    flat = hidden.reshape(-1, hidden.shape[-1])
    return torch.mm(flat, weight.t(), out_dtype=torch.float32).reshape(*hidden.shape[:-1], -1)


def repack_heads(model: torch.nn.Module) -> None:
    """Pack the output layers of `model` again.

    An output layer that is tied to the embedding gets no tensor of its own, but on the CPU it has a packed copy. Relies
    on ``ParallelLMHead.quant_method.process_weights_after_loading(module)`` (0.22 to 0.33).
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
