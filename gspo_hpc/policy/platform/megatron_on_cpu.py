"""Megatron-Core on the CPU: the only module that knows that Megatron-Core was written for CUDA.

Megatron-Core allocates with ``device="cuda"``, asks ``torch.cuda`` for the current device, waits on streams and checks
``Tensor.type()`` for CUDA names. :func:`install` makes all of these answer with the CPU, once per process, before
anything of Megatron-Core runs. On a machine with GPUs nothing here is called. It must never run in a process of vLLM's
workers: these are started with ``spawn``, so they do not inherit it.

It says what stands in for each function on a CPU. Public functions of torch are replaced here, and those of Megatron
by :mod:`gspo_hpc.policy.compat`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gspo_hpc.policy import compat

_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "zeros_like",
    "ones_like",
    "empty_like",
    "as_tensor",
)
_installed = False
share_groups = True  # to be set before Megatron's groups are made; False where their collectives overlap


class _Stream:
    """A CUDA stream or event on a device with one order of execution: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    yield


def _on_cpu(device: Any) -> Any:
    """Return the CPU for anything that names a CUDA device, everything else unchanged."""
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)  # pinning is for copies to a GPU
        return original(*args, **kwargs)

    return make


def _nothing() -> Callable[..., None]:
    """Return a new function that does nothing: torch.compile's table of functions refuses the same one twice."""
    return lambda *args, **kwargs: None


def _gather(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap Megatron's gather so that pieces of different lengths travel padded: gloo gathers equal ones only."""

    def gather(
        mine: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(mine, group, output_split_sizes, *rest, **more)
        padded = mine.new_zeros(max(output_split_sizes), *mine.shape[1:])
        padded[: mine.shape[0]] = mine
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def _reduce_scatter(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap Megatron's reduce-scatter so that unequal pieces are all-reduced whole: gloo scatters equal ones only."""

    def reduce_scatter(
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(whole, group, input_split_sizes, *rest, **more)
        total = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    return reduce_scatter


def _shared(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what makes groups, so that all groups of the same ranks are one.

    Megatron makes about fifty groups, and each has a thread of gloo's that looks for messages a hundred times a second.
    Where this process uses them one after the other, one is enough.
    """
    made: dict[tuple[int, ...], Any] = {}

    def create(ranks: list[int], **options: Any) -> Any:
        if not share_groups:
            return original(ranks, **options)
        if not compat.has_groups():  # the first of a new layout, on every rank
            made.clear()
        if tuple(ranks) not in made:
            made[tuple(ranks)] = original(ranks, **options)
        return made[tuple(ranks)]

    return create


def _splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the sizes that Megatron moves to the CPU before it exchanges tokens, as numbers if it asks for them."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def install() -> None:
    """Let Megatron-Core run on the CPU in this process. Calling it again does nothing."""
    global _installed
    if _installed:
        return
    _installed = True

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    for name in (
        "synchronize",
        "empty_cache",
        "set_device",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
    ):
        setattr(cuda, name, _nothing())
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = _stream_context
    cuda.default_stream = lambda device=None: _Stream()
    cuda.current_stream = lambda device=None: _Stream()
    cuda.nvtx.range_push = _nothing()
    cuda.nvtx.range_pop = _nothing()
    compat.remember_factories()
    for name in _FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))

    compat.replace_cuda_random_states(_nothing())
    compat.wrap_group_maker(_shared)
    compat.wrap_exchanges_of_tokens(_gather, _reduce_scatter)
    compat.replace_move_to_cpu(_splits)

    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    original_type = tensor.type

    def type_of(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        # The optimizer asserts on "torch.cuda.FloatTensor" and its 16-bit relatives.
        return original_type(self).replace("torch.", "torch.cuda.", 1)

    tensor.type = type_of
