"""The function of vLLM that this folder replaces; see :mod:`gspo_hpc.engine.compat` for the rules of such modules."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch


def multiply_whole_batches() -> None:
    """Have the CPU compute adapters of one version with one product for all tokens of a batch.

    The CPU build copies both matrices for every token, which takes minutes for a prompt of a model of 135 million
    parameters in 16 bits. With room for one version, all tokens are of that version or of none. Products are rounded
    like the trainer's. Call this before the model is made.

    Relies on ``PunicaWrapperCPU.add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices)``, on the
    stacks' shapes [places, 1, rows, columns], and on ``no_lora`` being set for every batch (0.32; a version without
    them keeps its own code). On an upgrade check whether the build is fast by itself, then delete this.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        of_several = PunicaWrapperCPU.add_lora_linear
        if of_several.__module__ == __name__:
            return  # patched before

        def add_lora_linear(
            self: Any,
            y: torch.Tensor,
            x: torch.Tensor,
            lora_a_stacked: Sequence[torch.Tensor],
            lora_b_stacked: Sequence[torch.Tensor],
            scale: float,
            output_slices: Sequence[int],
            **more: Any,
        ) -> None:
            if lora_a_stacked[0].shape[0] != 1:
                of_several(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **more)
            elif not self.no_lora:
                rows, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
                slices = rows.split(list(output_slices), -1)
                for output, a, b in zip(slices, lora_a_stacked, lora_b_stacked, strict=True):
                    low = torch.nn.functional.linear(inputs, a[0, 0])
                    output += torch.nn.functional.linear(low * scale, b[0, 0])

        PunicaWrapperCPU.add_lora_linear = add_lora_linear
