"""Everything that this room uses of torch.distributed beyond its public interface: what tells the time in collectives.

No other file of this room names an attribute of torch with a leading underscore or replaces one of its functions.
``tests/torch/training/test_compat.py`` lists the versions that these names were checked against.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch


def wrap_wait(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method by which this process waits for a collective of gloo's.

    Relies on ``torch.distributed.Work.wait`` being what every blocking collective calls in Python (read in torch 2.13);
    torch has no hook there. On an upgrade check that ``distributed_c10d.all_reduce`` still ends with ``work.wait()``.
    """
    work: Any = torch.distributed.Work
    work.wait = wrapper(work.wait)


def nccl_records() -> list[dict[str, Any]]:
    """Return what NCCL's flight recorder knows of the collectives of this process; nothing without NCCL.

    Relies on ``torch._C._distributed_c10d._dump_nccl_trace_json(includeCollectives, onlyActive)``, which only builds
    with NCCL have, and on "record_id", "time_created_ns" (of the system's clock) and "duration_ms" of its entries
    (since torch 2.5; not run on a GPU yet). The similar ``_dump_fr_trace_json`` is another recorder, which NCCL does
    not write to.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    found: list[dict[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return found
