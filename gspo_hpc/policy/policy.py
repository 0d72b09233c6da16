"""The model that is trained, with its gradients, optimizer and learning-rate schedule.

Passes over it are in :mod:`gspo_hpc.policy.schedule`, and keep nothing here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gspo_hpc.config.derived import engine_dtype, overlaps
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Floats
from gspo_hpc.models.adapter_table import shapes
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops import peft_folder
from gspo_hpc.ops.constants import Constants
from gspo_hpc.ops.host_memory import HostCopy
from gspo_hpc.ops.weight_parts import Fingerprint, Memory, Part, Scratch, stream_of
from gspo_hpc.policy import moe, provider
from gspo_hpc.policy.adapters import lora, matrices
from gspo_hpc.policy.model import DTYPES
from gspo_hpc.policy.offload import OffloadBuffer
from gspo_hpc.policy.process_groups import Ranks, shared_fingerprint


class ForwardOnly(torch.nn.Module):
    """A part of a model that is not trained, in place of Megatron's wrapper and its buffers of gradients."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module.requires_grad_(False)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the module makes of its inputs."""
        return self.module(*inputs, **named)


class Policy:
    """This rank's part of the model, with its gradients, optimizer and learning-rate schedule."""

    def __init__(self, arch: Architecture, config: Config, ranks: Ranks, *, trains: bool = True) -> None:
        """Build the model with weights that are still to be loaded.

        One that does not train has no buffers of gradients, which take more memory than its weights.
        """
        self.arch = arch
        self.config = config
        self.ranks = ranks
        self.provider = provider.make(arch, config)
        self.chunks = self.provider.build(ranks.device)  # one, or several with a virtual pipeline
        self.routing = moe.routing(self.chunks)
        self.weight_offload, self.gradient_offload, self.state_offload = (OffloadBuffer() for _ in range(3))
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.base: str | None = None  # where adapters are trained: the fingerprint of the model's own weights
        self.first_adapters: str | None = None  # and of those in `adapter.path`
        self.state_copy = HostCopy(())  # the newest, which a checkpoint is written from beside training
        self.wrapped: list[Any] = self._for_training() if trains else [ForwardOnly(chunk) for chunk in self.chunks]

    def _for_training(self) -> list[DistributedDataParallel]:
        """Return the chunks with buffers of gradients, which are summed over replicas."""
        config, settings = self.config, self.chunks[0].config
        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.optimizer.grad_reduce_in_fp32,
            overlap_grad_reduce=overlaps(config).grad_reduce,
            overlap_param_gather=overlaps(config).param_gather,
            use_distributed_optimizer=config.optimizer.distributed,
        )
        wrapped = [
            DistributedDataParallel(config=settings, ddp_config=reduction, module=chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        settings.finalize_model_grads_func = self._finalize if self.has_adapters else finalize_model_grads
        if reduction.overlap_grad_reduce:  # not before the last micro-batch
            functions = [one.no_sync for one in wrapped]
            settings.no_sync_func = functions if len(functions) > 1 else functions[0]
        return wrapped

    def _finalize(self, *args: Any, **settings: Any) -> None:
        finalize_model_grads(*args, **settings)
        lora.sum_gradients_of_experts(self.chunks)

    @property
    def token_share(self) -> tuple[int, int]:
        """(rank, size) among the ranks that split tokens between layers with sequence parallelism."""
        return (self.ranks.tp_rank, self.ranks.tp_size) if self.config.parallel.sequence_parallel else (0, 1)

    @property
    def sample_share(self) -> tuple[int, int]:
        """(rank, size) among the context-parallel ranks, which split samples."""
        return self.ranks.cp_rank, self.ranks.cp_size

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield all parameters of this rank."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def trained_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this rank that updates change: all, or those of adapters."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if not self.has_adapters or lora.is_adapter(name):
                    yield parameter

    def held(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and optimizer state that are on this rank, by kind."""
        buffers = self._gradient_buffers()
        masters = list(self._masters())  # whose gradients are copies in fp32 where the buffers have 16 bits
        kinds = {
            "weights": [parameter.data for parameter in self.parameters()],
            "gradients": [*(buffer.grad_data for buffer in buffers), *(p.grad for p in masters if p.grad is not None)],
            "optimizer": self._optimizer_state(),
        }
        storages = {
            kind: {t.untyped_storage().data_ptr(): t.untyped_storage() for t in ts} for kind, ts in kinds.items()
        }
        return {kind: sum(storage.nbytes() for storage in found.values()) for kind, found in storages.items()}

    def _gradient_buffers(self) -> list[Any]:
        wrapped = [one for one in self.wrapped if isinstance(one, DistributedDataParallel)]
        return [buffer for one in wrapped for buffer in (*one.buffers, *one.expert_parallel_buffers)]

    def before_change(self) -> None:
        """Let a copy of the state that is under way go first. Called before weights or optimizer change or move."""
        self.state_copy.before_change()

    def copy_state(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin a copy of parts of the state into host memory, (target, source); see :class:`HostCopy`.

        Whoever reads the copy calls ``state_copy.finish()``; the policy lets it go first before it changes anything.
        """
        self.state_copy.finish()
        self.state_copy = HostCopy(pairs)

    def offload(self, parts: Collection[str] | None = None, *, keep_weights: bool = False) -> int:
        """Give the memory of optimizer, gradients and weights to the engines, and return the bytes that this freed.

        `parts` names those that go (default: memory.offload_parts); what needs them later brings them back. The
        optimizer's state goes too if it stays in host memory anyway, for a start, a resume or a save has brought it
        back. With `keep_weights` the weights stay.
        """
        self.before_change()
        memory = self.config.memory
        parts = memory.offload_parts if parts is None else parts
        freed = self._offload_state() if "optimizer" in parts or memory.offload_optimizer else 0
        if "gradients" in parts and not self.gradient_offload.is_offloaded:
            freed += self.gradient_offload.offload((), [buffer.grad_data for buffer in self._gradient_buffers()])
        if "weights" in parts and not keep_weights and not self.weight_offload.is_offloaded:
            freed += self.weight_offload.offload([parameter.data for parameter in self.parameters()])
        return freed

    def restore(self) -> None:
        """Bring everything back to this rank."""
        for buffer in (self.weight_offload, self.gradient_offload, self.state_offload):
            buffer.restore()

    def restore_for_update(self) -> None:
        """Bring back what an update needs until the optimizer steps: its state only if that stays on this rank."""
        if overlaps(self.config).param_gather or self.config.memory.offload_optimizer:
            self.before_change()
        if not self.config.memory.offload_optimizer:
            self.restore()
            return
        self._offload_state()
        self.weight_offload.restore()
        self.gradient_offload.restore()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Keep the optimizer's state on this rank within the block."""
        self.before_change()
        self.state_offload.restore()
        yield
        if self.config.memory.offload_optimizer:
            self._offload_state()

    def _offload_state(self) -> int:
        """Offload the optimizer's moments and fp32 masters, but not weights that are their own masters.

        Return the bytes that this freed.
        """
        return 0 if self.state_offload.is_offloaded else self.state_offload.offload(self._optimizer_state())

    def _optimizer_state(self) -> list[torch.Tensor]:
        """Return moments and masters, in the same order every time."""
        optimizers = self._optimizers()
        own = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}
        moments = (t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor))
        return [t for t in (*self._masters(), *moments) if t.untyped_storage().data_ptr() not in own and t.ndim]

    def _optimizers(self) -> list[Any]:
        parts = getattr(self.optimizer, "chained_optimizers", ())
        return [part.optimizer for part in parts if part.optimizer is not None]

    def _masters(self) -> Iterator[torch.Tensor]:
        """Yield what the optimizer moves: fp32 masters, or weights that are their own masters."""
        return (p for o in self._optimizers() for group in o.param_groups for p in group["params"])

    def settle(self) -> None:
        """Have whole weights on this rank, also where they were offloaded or are gathered only in the next update.

        Collective.
        """
        self.weight_offload.restore()
        if overlaps(self.config).param_gather and self.optimizer is not None:
            self.before_change()
            for wrapped in self.wrapped:
                wrapped.start_param_sync(force_sync=True)

    @property
    def has_adapters(self) -> bool:
        """True if adapters are trained, and all other weights stay as they are."""
        return self.config.adapter.type is not None

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Have the model compute without its adapters within the block."""
        return lora.turned_off(self.chunks)

    def adapter_matrices(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole matrix in fp32) of every adapter, on every rank. Collective."""
        self.settle()
        yield from matrices.whole_matrices(self.chunks, self.arch, self.config.adapter, lambda parameter: parameter)

    def _adapter_shapes(self) -> dict[str, tuple[int, int]]:
        return shapes(self.arch, self.config.adapter.rank, self.config.adapter.targets)

    def adapter_parts(self, memory: Memory | None = None) -> Iterator[Sequence[Part]]:
        """Yield all adapters, matrix by matrix, in the model's dtype. Collective."""
        dtype = DTYPES[self.config.model.dtype]
        sizes = (math.prod(shape) for shape in self._adapter_shapes().values())
        matrices = ((name, whole.to(dtype)) for name, whole in self.adapter_matrices())
        stream = stream_of(matrices, max(sizes, default=0) * dtype.itemsize)
        yield from stream(memory or Scratch(self.ranks.device))

    def base_parts(self, memory: Memory | None = None) -> Iterator[Sequence[Part]]:
        """Yield all weights as :meth:`parts` does, without adapters in them. Collective."""
        with self.without_adapters():
            yield from self.parts(memory)

    def fingerprint(self) -> str:
        """Return the fingerprint of the model's own weights, without adapters, on every rank. Collective."""
        found = Fingerprint(self.ranks.rank, self.ranks.world_size)
        for parts in self.base_parts():
            for part in parts:
                found.add(part)
        return shared_fingerprint(found, self.ranks)

    def parts(self, memory: Memory | None = None) -> Iterator[Sequence[Part]]:
        """Yield all weights, as :class:`gspo_hpc.policy.provider.Provider` gives them. Collective."""
        self.settle()
        yield from self.provider.stream(self.chunks, memory)

    def expert_sums(self) -> Floats | None:
        """Return the sums [layers, experts, 4] of the experts' weights as engines get them; None without experts.

        NaN where there are none; see :mod:`gspo_hpc.ops.expert_sums`. Collective.
        """
        self.settle()
        found = self.provider.expert_sums(self.chunks, DTYPES[engine_dtype(self.config)])
        return None if found is None else found.numpy()

    def constants(self) -> Constants | None:
        """Return the numbers beside its weights by which the model computes; None if they are not known."""
        return self.provider.constants(self.chunks)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every Hugging Face tensor with its name; use it before asking for the next. Collective."""
        for parts in self.parts():
            for part in parts:
                yield from part.tensors()

    def load(self, folder: str | Path, *, begins: bool = True) -> None:
        """Load weights from a Hugging Face folder; raise ValueError if they are not those of this model.

        With `begins` adapters get the values that a run begins with; else they are left for a checkpoint. Collective.
        """
        self.before_change()
        self.provider.load(self.chunks, folder)
        if self.has_adapters:
            self.base = self.fingerprint()
            adapter = self.config.adapter
            if not begins:
                return
            if adapter.path is None:
                matrices.fill(self.chunks, matrices.first_values(self.config.run.seed))
                return
            found = peft_folder.read(adapter, self._adapter_shapes(), folder)
            self.first_adapters = peft_folder.fingerprint(found)
            matrices.fill(self.chunks, lambda name, shape: found[name])

    def make_optimizer(self) -> None:
        """Make Adam and its schedule, once the weights are loaded: 16-bit models copy them into fp32 masters."""
        options = self.config.optimizer
        dtype = DTYPES[self.config.model.dtype]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=options.min_lr,
                weight_decay=options.weight_decay,
                adam_beta1=options.adam_beta1,
                adam_beta2=options.adam_beta2,
                adam_eps=options.adam_eps,
                clip_grad=options.clip_grad,
                use_distributed_optimizer=options.distributed,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                fp16=dtype == torch.float16,
                initial_loss_scale=options.initial_loss_scale,
                loss_scale_window=options.loss_scale_window,
                overlap_param_gather=overlaps(self.config).param_gather,
            ),
            self.wrapped,
            use_gloo_process_groups=False,
        )
        self.chunks[0].config.grad_scale_func = self.optimizer.scale_loss  # one config of all chunks
        for chained in self.optimizer.chained_optimizers:
            if isinstance(chained.optimizer, torch.optim.Adam | torch.optim.AdamW):  # where Megatron finds no fused one
                for group in chained.optimizer.param_groups:
                    group["fused"] = True
        total = self.config.run.max_steps or 1
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.lr if options.lr_decay_style == "constant" else options.min_lr,
            lr_warmup_steps=options.lr_warmup_steps,
            lr_decay_steps=max(total, options.lr_warmup_steps + 1),
            lr_decay_style=options.lr_decay_style,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=total,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,  # config.changes decides what may change between attempts
        )
        self.scheduler.step(0)
