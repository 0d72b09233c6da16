"""Imports of optional packages that Megatron tries and a rank has no use for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def left_out(*names: str) -> Iterator[None]:
    """Have imports of these modules fail inside this block, as if they were not installed, unless they are loaded.

    Megatron imports W&B and TensorBoard for its own trackers, over three hundred modules in every rank
    (docs/benchmarks.md, ``tools/bench/imports.py``). Who needs them after the block imports them as ever.
    """
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
