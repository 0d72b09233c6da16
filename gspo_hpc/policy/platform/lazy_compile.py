"""Compilation of Megatron's small functions when they are first called, not when Megatron is imported.

Megatron decorates some of its functions with torch.compile. The decoration alone imports torch's whole compiler, a good
part of the processor time that a rank takes to start (docs/benchmarks.md, ``tools/bench/imports.py``). A rank on a CPU
calls none of these functions, and most configs of GPUs only a few.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_compile = torch.compile


@contextlib.contextmanager
def compiled_at_first_call() -> Iterator[None]:
    """Import modules inside this block whose functions are compiled when they are called for the first time."""
    torch.compile = _later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = _compile


def _later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Return what torch.compile returns: the function, compiled, or a decorator. Nothing is compiled yet."""
    if function is None:
        return functools.partial(_later, **options)
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # inside another function that is being compiled, as a part of it
            return function(*arguments, **named)
        if not compiled:
            compiled.append(_compile(function, **options))
        return compiled[0](*arguments, **named)

    return call
