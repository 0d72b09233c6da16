"""The model that is trained, with its gradients, optimizer and schedule.

Floor 3. What is done with it is :mod:`gspo_hpc.pipeline`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
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

from gspo_hpc import moe, provider
from gspo_hpc.config import Config
from gspo_hpc.model import DTYPES
from gspo_hpc.model_config import Architecture
from gspo_hpc.offload import Lender
from gspo_hpc.process_groups import Ranks


class Policy:
    """The model that is trained, with its gradients, optimizer and schedule."""

    def __init__(self, arch: Architecture, config: Config, ranks: Ranks) -> None:
        self.arch = arch
        self.config = config
        self.ranks = ranks
        self.provider = provider.of(arch, config)
        self.chunks = self.provider.build(ranks.device)  # one, or several with a virtual pipeline
        self.routing = moe.routing(self.chunks)
        settings = self.chunks[0].config
        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.optimizer.grad_reduce_in_fp32,
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            overlap_param_gather=config.parallel.overlap_param_gather,
            use_distributed_optimizer=config.optimizer.distributed,
        )
        self.wrapped = [
            DistributedDataParallel(config=settings, ddp_config=reduction, module=chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        settings.finalize_model_grads_func = finalize_model_grads
        if reduction.overlap_grad_reduce:  # not before the last micro-batch
            functions = [wrapped.no_sync for wrapped in self.wrapped]
            settings.no_sync_func = functions if len(functions) > 1 else functions[0]
        self.passes: Counter[str] = Counter()  # over the weights, by kind: "update", "logprobs"
        self.flops: Counter[str] = Counter()  # of this rank, by the same kinds
        self.stop_requested: Callable[[], bool] = lambda: False  # asked before every micro-batch
        self.abandons = False  # whether the pass under way is left
        self.lent_weights, self.lent_gradients, self.lent_state = Lender(), Lender(), Lender()
        self.optimizer: Any = None
        self.scheduler: Any = None

    @property
    def token_share(self) -> tuple[int, int]:
        """(rank, size) of the tensor-parallel ranks that split tokens between layers: those of sequence parallelism."""
        return (self.ranks.tp_rank, self.ranks.tp_size) if self.config.parallel.sequence_parallel else (0, 1)

    @property
    def sample_share(self) -> tuple[int, int]:
        """(rank, size) of the context-parallel ranks, which split samples."""
        return self.ranks.cp_rank, self.ranks.cp_size

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All of this rank."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def held(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state that are on this rank."""
        buffers = [b for w in self.wrapped for b in (*w.buffers, *w.expert_parallel_buffers)]
        kinds = {
            "weights": [parameter.data for parameter in self.parameters()],
            "gradients": [buffer.grad_data for buffer in buffers],
            "optimizer": self._optimizer_state(),
        }
        storages = {
            kind: {t.untyped_storage().data_ptr(): t.untyped_storage() for t in ts} for kind, ts in kinds.items()
        }
        return {kind: sum(storage.nbytes() for storage in found.values()) for kind, found in storages.items()}

    def lend(self) -> int:
        """Give the memory of weights, gradients and optimizer to the engines, until they are needed: bytes that this
        has freed. What needs them fetches them."""
        if self.lent_weights.asleep:
            return 0
        buffers = [b for w in self.wrapped for b in (*w.buffers, *w.expert_parallel_buffers)]
        freed = self._put_state_aside()
        if not self.lent_gradients.asleep:
            freed += self.lent_gradients.sleep((), [buffer.grad_data for buffer in buffers])
        return freed + self.lent_weights.sleep([parameter.data for parameter in self.parameters()])

    def fetch(self) -> None:
        """Have everything on this rank."""
        for lender in (self.lent_weights, self.lent_gradients, self.lent_state):
            lender.wake()

    def fetch_for_update(self) -> None:
        """Have what an update needs until the optimizer steps: its state only where that stays on this rank."""
        if not self.config.memory.offload_optimizer:
            self.fetch()
            return
        self._put_state_aside()
        self.lent_weights.wake()
        self.lent_gradients.wake()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Have the optimizer's state on this rank."""
        self.lent_state.wake()
        yield
        if self.config.memory.offload_optimizer:
            self._put_state_aside()

    def _put_state_aside(self) -> int:
        """The optimizer's moments and fp32 masters, but not weights that are their own masters: bytes that this has
        freed."""
        return 0 if self.lent_state.asleep else self.lent_state.sleep(self._optimizer_state())

    def _optimizer_state(self) -> list[torch.Tensor]:
        """Moments and masters, in the same order every time."""
        parts = getattr(self.optimizer, "chained_optimizers", ())
        optimizers = [part.optimizer for part in parts if part.optimizer is not None]
        own = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}
        masters = (p for o in optimizers for group in o.param_groups for p in group["params"])
        moments = (t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor))
        return [t for t in (*masters, *moments) if t.untyped_storage().data_ptr() not in own and t.ndim]

    def settle(self) -> None:
        """Have whole weights on this rank, where they are lent, or else gathered as the next update needs them.
        Collective."""
        self.lent_weights.wake()
        if self.config.parallel.overlap_param_gather:
            for wrapped in self.wrapped:
                wrapped.start_param_sync(force_sync=True)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, as :class:`gspo_hpc.provider.Provider` gives them."""
        self.settle()
        yield from self.provider.stream(self.chunks)

    def load(self, folder: str | Path) -> None:
        """Weights from a Hugging Face folder. ValueError where they are not those of this model."""
        self.provider.load(self.chunks, folder)

    def make_optimizer(self) -> None:
        """Adam and its schedule; call it once the weights are loaded (16-bit models copy them into fp32 masters)."""
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
                overlap_param_gather=self.config.parallel.overlap_param_gather,
            ),
            self.wrapped,
            use_gloo_process_groups=False,
        )
        self.chunks[0].config.grad_scale_func = self.optimizer.scale_loss  # one config of all chunks
        if self.ranks.device.type == "cpu":  # Megatron falls back to torch's Adam there, which has a fused kernel
            for chained in self.optimizer.chained_optimizers:
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
            override_opt_param_scheduler=True,  # what may change between attempts is decided by config_file
        )
        self.scheduler.step(0)
