"""Sums of parts on the rank that adds them up: as tests/gloo does with real ranks, here of 16 bits.

It costs nothing. Catches sums that are rounded to 16 bits after every rank, and means that are not.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gspo_hpc.policy.platform.deterministic_collectives import _add


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_parts_are_added_one_after_the_other_and_rounded_once(dtype: torch.dtype) -> None:
    parts = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(1000, dtype=wide)
    for part in parts:
        total += part.to(wide)
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / 7)):
        found = _add(parts, op)
        assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
    assert torch.equal(parts, torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)), "untouched"
