"""Attention on packed samples, in plain torch: causal within a sample, with no view of other samples.

Shapes: T packed tokens, L of them on this context-parallel rank, S samples, Hq query heads, Hk key/value heads (Hq a
multiple of Hk), D head size, B lanes of a call with N queries and K keys each.

The segment table (see ``gspo_hpc.ops.batch``) is cut into *lanes*: a lane is a run of tokens that see each other
causally, after a prefix that all of them see. A prompt is a lane whose prefix is the shared prefix of all prompts, if
there is one. A completion is a lane whose prefix is that and its prompt, wherever they are. A completion right behind a
prompt that no other completion uses forms one lane with it. Lanes of similar size are gathered into one SDPA call, and
padded there and nowhere else. Without prefixes no mask is needed (padding comes last, and the future is invisible);
with prefixes the mask is boolean and bounded in size, because long completions are computed in slices.

With context parallelism, a rank computes only some queries of every lane, against the keys and values of all.

Isolation does not depend on masks alone: the padding of a lane is filled with the lane's own tokens, so a call's row
holds nothing of other samples. On the CPU the result is the same bit for bit from run to run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SMALL = 16  # lanes up to this many tokens share a call
STEP = 1.5  # larger lanes share a call if their lengths differ by at most this factor
MASK_ELEMENTS = 1 << 22  # limit of one call's mask


@dataclass(frozen=True)
class Lane:
    """A run of tokens, start : start + length, that see all of the prefix, and themselves causally."""

    start: int
    length: int
    prefix: tuple[tuple[int, int], ...] = ()  # pieces of at least one token: (start, length)

    @property
    def seen(self) -> int:
        """Number of tokens in the prefix."""
        return sum(length for _, length in self.prefix)


@dataclass(frozen=True)
class Call:
    """One SDPA call on B lanes padded to N queries and K keys."""

    queries: Tensor  # [B, N] int64, into the packed tokens
    keys: Tensor  # [B, K] int64
    mask: Tensor | None  # [B, 1, N, K] bool, True where visible; None: causal, N = K


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float, share: tuple[int, int] = (0, 1)) -> Tensor:
    """Return the attention's output [L, Hq, D] of packed tokens.

    q is [L, Hq, D], k and v are [T, Hk, D], segments [S, 5] int32 on the CPU. All tokens see the shared prefix, which
    sees itself causally. A prompt's tokens see the prompt causally; a completion's tokens see all of its prompt, and
    themselves causally. With S = 0 (an empty micro-batch) the one token sees only itself. Differentiable in q, k and v.

    `share` is (rank, size) of a context-parallel group; q then holds the tokens of :func:`own_tokens`. Further rows of
    q, k and v are padding: no token sees them, and their output is zero.
    """
    table = segments.contiguous().numpy()
    calls, order = _plan(table.tobytes(), share, q.device)
    if q.is_cuda:  # of torch's kernels for fp32, only the one that keeps all scores takes heads in groups
        k, v = (ungrouped(one, q.shape[1]) for one in (k, v))
    parts = []
    for call in calls:
        out = scaled_dot_product_attention(
            _gather(q, call.queries),
            _gather(k, call.keys),
            _gather(v, call.keys),
            attn_mask=call.mask,
            is_causal=call.mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        parts.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    out = torch.cat(parts).index_select(0, order) if parts else q[:0]
    padding = q.shape[0] - out.shape[0]
    return torch.cat((out, out.new_zeros(padding, *out.shape[1:]))) if padding else out


def ungrouped(heads: Tensor, count: int) -> Tensor:
    """Return keys or values [T, Hk, D] as [T, count, D], each head repeated for the query heads that share it."""
    return heads if heads.shape[1] == count else heads.repeat_interleave(count // heads.shape[1], dim=1)


def num_tokens(segments: Tensor) -> int:
    """Return the number of tokens T that a segment table describes; 1 for an empty table."""
    return max(
        (max(start + length, front + prompt) for front, prompt, start, length, _ in segments.tolist()), default=1
    )


def seen_keys(segments: Tensor) -> int:
    """Return the number of keys that the queries of a micro-batch see, summed over queries; 0 for an empty one."""
    if not len(segments):
        return 0
    found = lanes(segments.tolist(), num_tokens(segments))
    return sum(lane.length * lane.seen + lane.length * (lane.length + 1) // 2 for lane in found)


def own_tokens(segments: Tensor, rank: int, size: int) -> np.ndarray:
    """Return the tokens [L] of one context-parallel rank, int64, in their order in the micro-batch.

    Every lane is cut into 2 x size pieces of nearly equal length. A rank gets one piece from the lane's front and the
    one equally far from its end: late tokens see more keys than early ones, so all ranks have about the same work. The
    assignment changes from lane to lane, so that lanes with fewer tokens than pieces do not all go to one rank.
    """
    found = lanes_of(segments, (rank, size))
    parts = [np.arange(lane.start, lane.start + lane.length) for lane in found]
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def gathered_places(segments: Tensor, size: int, length: int, device: torch.device) -> Tensor:
    """Return where each token of a micro-batch is after a gather over context-parallel ranks, [T] int64.

    The gather joins the tokens of `size` ranks, each padded to `length` tokens.
    """
    return _places(segments.contiguous().numpy().tobytes(), size, length, device)


@functools.lru_cache(maxsize=4)
def _places(table: bytes, size: int, length: int, device: torch.device) -> Tensor:
    segments = _segments(table)
    place = torch.empty(num_tokens(segments), dtype=torch.int64)
    for rank in range(size):
        own = torch.from_numpy(own_tokens(segments, rank, size))
        place[own] = rank * length + torch.arange(len(own))
    return place.to(device)


def _segments(table: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(table, dtype=np.int32).reshape(-1, 5).copy())


def _share(found: list[Lane], rank: int, size: int) -> list[Lane]:
    """Return a rank's pieces of the lanes. A piece is a lane whose prefix includes the part of its lane before it."""
    if size == 1:
        return found
    pieces = []
    for number, lane in enumerate(found):
        turn = (rank + number) % size
        for chunk in (turn, 2 * size - 1 - turn):
            begin, end = lane.length * chunk // (2 * size), lane.length * (chunk + 1) // (2 * size)
            if begin < end:
                before = ((lane.start, begin),) if begin else ()
                pieces.append(Lane(lane.start + begin, end - begin, (*lane.prefix, *before)))
    return pieces


def lanes_of(segments: Tensor, share: tuple[int, int]) -> list[Lane]:
    """Return the lanes of a context-parallel rank, which cover its tokens."""
    return _share(lanes(segments.tolist(), num_tokens(segments)), *share)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows [B, H, N, D] of `x` [T, H, D] at `index` [B, N]."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def lanes(table: list[list[int]], tokens: int) -> list[Lane]:
    """Return the lanes of a segment table; together they cover each of the `tokens` tokens exactly once."""
    if not table:
        return [Lane(i, 1) for i in range(tokens)]
    shared = table[0][4]
    front = ((0, shared),) if shared else ()
    found = [Lane(0, shared)] if shared else []
    for number, (prompt_start, prompt, start, length, _) in enumerate(table):
        first = number == 0 or table[number - 1][0] != prompt_start
        last = number + 1 == len(table) or table[number + 1][0] != prompt_start
        if first and last and start == prompt_start + prompt:
            found.append(Lane(prompt_start, prompt + length, front))
            continue
        if first:
            found.append(Lane(prompt_start, prompt, front))
        if length:
            found.append(Lane(start, length, (*front, (prompt_start, prompt))))
    return found


@functools.lru_cache(maxsize=4)  # every layer of a forward and backward pass asks for the same plan
def _plan(table: bytes, share: tuple[int, int], device: torch.device) -> tuple[list[Call], Tensor]:
    """Return a rank's calls for a segment table, and each token's index in their flattened, joined outputs, [L]."""
    segments = _segments(table)
    tokens = num_tokens(segments)
    whole = lanes(segments.tolist(), tokens)
    assert sum(lane.length for lane in whole) >= tokens, "a token is in no segment"
    buckets: dict[tuple[int, int], list[Lane]] = {}
    for lane in _share(whole, *share):
        buckets.setdefault((_size_class(lane.length), _size_class(lane.seen)), []).append(lane)
    order = np.full(tokens, -1, dtype=np.int64)
    calls: list[Call] = []
    done = 0
    for bucket in buckets.values():
        rows_at_once = max(1, MASK_ELEMENTS // max(1, max(_mask_elements(lane) for lane in bucket)))
        for begin in range(0, len(bucket), rows_at_once):
            chosen = bucket[begin : begin + rows_at_once]
            width = max(lane.length for lane in chosen)
            prefix = max(lane.seen for lane in chosen)
            slice_length = width
            if len(chosen) == 1 and prefix:
                slice_length = max(1, MASK_ELEMENTS // (prefix + width))
            for a in range(0, width, slice_length):
                b = min(width, a + slice_length)
                for row, lane in enumerate(chosen):
                    real = np.arange(a, min(b, lane.length))
                    assert (order[lane.start + real] == -1).all(), "a token is in two segments"
                    order[lane.start + real] = done + row * (b - a) + real - a
                calls.append(_call(chosen, a, b, prefix, device))
                done += len(chosen) * (b - a)
    own = own_tokens(segments, *share)
    if share[1] > 1:  # queries are this rank's tokens alone
        place = torch.zeros(tokens, dtype=torch.int64)
        place[torch.from_numpy(own)] = torch.arange(len(own))
        calls = [replace(call, queries=place.to(device)[call.queries]) for call in calls]
    return calls, torch.from_numpy(order[own]).to(device)


def _size_class(length: int) -> int:
    """Return the class of a length, the same for lengths within a factor of STEP; 0 only for 0."""
    return 0 if length == 0 else 1 + int(np.ceil(np.log(max(length, SMALL) / SMALL) / np.log(STEP) - 1e-9))


def _mask_elements(lane: Lane) -> int:
    return lane.length * (lane.seen + lane.length) if lane.prefix else 0


def _call(chosen: list[Lane], begin: int, end: int, prefix: int, device: torch.device) -> Call:
    """Return the call of queries begin : end of each lane, against its prefix, padded, and its tokens up to `end`."""
    length = np.array([lane.length for lane in chosen])[:, None]
    start = np.array([lane.start for lane in chosen])[:, None]
    visible = np.array([lane.seen for lane in chosen])[:, None]
    own = np.arange(end)[None, :]
    ahead = np.arange(prefix)[None, :]
    own_index = start + np.minimum(own, length - 1)
    keys = np.concatenate((np.stack([_prefix_index(lane, prefix) for lane in chosen]), own_index), axis=1)
    mask = None
    if prefix:
        seen = np.broadcast_to((ahead < visible)[:, None, :], (len(chosen), end - begin, prefix))
        causal = np.broadcast_to(own[0] <= np.arange(begin, end)[:, None], (len(chosen), end - begin, end))
        mask = torch.from_numpy(np.concatenate((seen, causal), axis=2)[:, None]).to(device)
    return Call(torch.from_numpy(own_index[:, begin:]).to(device), torch.from_numpy(keys).to(device), mask)


def _prefix_index(lane: Lane, width: int) -> np.ndarray:
    """Return where the tokens of a lane's prefix are, [width] int64, padded with the last of them."""
    index = [np.arange(start, start + length) for start, length in lane.prefix]
    return np.pad(np.concatenate(index), (0, width - lane.seen), mode="edge") if index else np.full(width, lane.start)
