"""Attention on packed samples in one call of a variable-length kernel: no padding, no masks.

Shapes and lanes are those of :mod:`gspo_hpc.ops.attention`; Lq and Lk are the queries and keys of all N lanes together.
A lane is a sequence of its own to the kernel: its queries are the lane's tokens, its keys those of its prefix and its
own, and the last query sees the last key. Keys and values of a prefix are gathered once for each lane that sees it,
which costs memory, but keys and values have few heads. The kernel is torch's (FlashAttention, 16 bit, on GPUs from
Ampere on), or another one with the same signature.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.attention
from torch import Tensor

from gspo_hpc.ops.attention import lanes_of, num_tokens, own_tokens


@dataclass(frozen=True)
class Sequences:
    """N lanes as the arguments of a variable-length kernel."""

    queries: Tensor  # [Lq] int64, into this rank's tokens
    keys: Tensor  # [Lk] int64, into all tokens
    cu_queries: Tensor  # [N + 1] int32: queries of lane i are cu_queries[i] : cu_queries[i + 1]
    cu_keys: Tensor  # [N + 1] int32
    max_queries: int
    max_keys: int
    places: Tensor  # [Lq] int64: where each of this rank's tokens is among `queries`


# (q [Lq, Hq, D], k and v [Lk, Hk, D], sequences, scale) -> [Lq, Hq, D]; query i of n sees keys up to i - n from the end
Kernel = Callable[[Tensor, Tensor, Tensor, Sequences, float], Tensor]


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, lanes: Sequences, scale: float) -> Tensor:
    """Compute attention by torch.nn.attention.varlen."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 lacks it, and takes such heads anyway
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, lanes.cu_queries, lanes.cu_keys, lanes.max_queries, lanes.max_keys, **options)
    assert isinstance(out, Tensor)
    return out


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if torch has a kernel for this: on GPUs from Ampere on, in 16 bit, from torch 2.11 on."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):  # FlashAttention refuses them when it is called
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys()


_NEWER = {  # than FlashAttention 2, by the major compute capability that they are made for; the fastest first
    9: (("FA3", "flash_attn_interface"), ("FA4", "flash_attn.cute")),
    10: (("FA4", "flash_attn.cute"),),
}


def newest_kernel(major: int) -> str | None:
    """Return torch's name of the newest FlashAttention that is installed and made for GPUs of this compute capability.

    None stands for version 2, which torch has built in.
    """
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):  # an older torch
        return None
    return next((name for name, module in _NEWER.get(major, ()) if _is_installed(module)), None)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package around it
        return False


@functools.cache
def use_newest_kernel(device: torch.device) -> str | None:
    """Have torch use the newest FlashAttention on this GPU, in this process, and return its name."""
    name = newest_kernel(torch.cuda.get_device_capability(device)[0])
    if name is not None:
        try:
            torch.nn.attention.activate_flash_attention_impl(name)
        except (ImportError, RuntimeError) as error:  # one that does not match this torch
            print(f"{name} is installed, and does not work here ({error}): attention uses FlashAttention 2", flush=True)
            return None
    return name


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    scale: float,
    share: tuple[int, int] = (0, 1),
    kernel: Kernel = torch_kernel,
) -> Tensor:
    """Return the output [L, Hq, D] like :func:`gspo_hpc.ops.attention.attend`, by a variable-length `kernel`."""
    lanes = sequences(segments.contiguous().numpy().tobytes(), share, q.device)
    out = q[:0]
    if len(lanes.queries):
        mine, theirs = q.index_select(0, lanes.queries), (k.index_select(0, lanes.keys), v.index_select(0, lanes.keys))
        out = kernel(mine, *theirs, lanes, scale).index_select(0, lanes.places)
    padding = q.shape[0] - out.shape[0]
    return torch.cat((out, out.new_zeros(padding, *out.shape[1:]))) if padding else out


@functools.lru_cache(maxsize=4)  # every layer of a forward and backward pass asks for the same
def sequences(table: bytes, share: tuple[int, int], device: torch.device) -> Sequences:
    """Return a rank's lanes of a segment table as sequences."""
    segments = torch.from_numpy(np.frombuffer(table, dtype=np.int32).reshape(-1, 5).copy())
    own = own_tokens(segments, *share)
    place = np.full(num_tokens(segments), -1, dtype=np.int64)
    place[own] = np.arange(len(own))
    queries, keys, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [(0, 0)]
    for lane in lanes_of(segments, share):
        mine = np.arange(lane.start, lane.start + lane.length)
        seen = [np.arange(start, start + length) for start, length in lane.prefix]
        queries.append(place[mine])
        keys += [*seen, mine]
        sizes.append((lane.length, lane.seen + lane.length))
    order = np.concatenate(queries)
    assert (np.sort(order) == np.arange(len(own))).all(), "a token is in two segments, or in none"
    places = np.empty(len(own), dtype=np.int64)
    places[order] = np.arange(len(order))
    ends = np.cumsum(np.array(sizes, dtype=np.int64), axis=0).astype(np.int32)
    longest = np.array(sizes).max(0)
    return Sequences(
        torch.from_numpy(order).to(device),
        torch.from_numpy(np.concatenate(keys)).to(device),
        torch.from_numpy(ends[:, 0].copy()).to(device),
        torch.from_numpy(ends[:, 1].copy()).to(device),
        int(longest[0]),
        int(longest[1]),
        torch.from_numpy(places).to(device),
    )
