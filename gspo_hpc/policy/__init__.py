"""Megatron-Core: process groups, the model, its optimizer and schedule."""

import sys

import torch

from gspo_hpc.policy.platform.lazy_compile import compiled_at_first_call
from gspo_hpc.policy.platform.left_out import left_out

if not torch.cuda.is_available():
    # Where Transformer Engine is installed, Megatron takes its optimizer and its kernels for gradients on any platform,
    # and they want pointers into a GPU. An import of it fails from here on, as if it were not there.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]

with compiled_at_first_call(), left_out("wandb", "torch.utils.tensorboard"):  # before any other module imports it
    import megatron.core  # noqa: F401
