"""The gap between engine and trainer by where tokens stand: behind how long a cached prefix, and at which position.

A stale prefix cache shows behind cached prefixes only; wrong rotary embeddings show more with every position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_hpc.algorithms.terms.aggregation import Samples

CACHED = (0, 256, 2048)  # tokens of the prompt that came from the cache, at most
POSITIONS = (256, 1024, 4096, 16384)  # tokens before this one and the token itself, at most
_SAMPLE = 2**32  # above every position: the step from one sample to the next in keys that sort tokens


def _names(what: str, bounds: tuple[int, ...]) -> tuple[str, ...]:
    return (*(f"logprob_gap/{what}_{bound}" for bound in bounds), f"logprob_gap/{what}_more")


CACHED_NAMES, POSITION_NAMES = _names("cached", CACHED), _names("position", POSITIONS)
NAMES = (*CACHED_NAMES, *POSITION_NAMES)


def sums_by_bucket(
    size: Tensor, samples: Samples, cached: Tensor | None, positions: Tensor, predicting: Tensor
) -> Tensor:
    """Return pairs (sum of |gap|, tokens) [len(NAMES), 2] over the tokens that count, in the order of NAMES.

    `size` [R] is |gap|, and 0 for other tokens; `cached` [S] is what of a sample's prompt came from the cache, nothing
    where it is None. `positions` [T] are those of the micro-batch, and `predicting` [R] is the place in it of the token
    that predicts each token, one position before it.
    """
    table = size.new_zeros(len(NAMES), 2)
    if cached is None:
        table[0] = torch.stack((size.sum(), samples.here.sum()))
    else:
        pairs = torch.stack((samples.sums_here(size), samples.here), dim=1)
        table.index_add_(0, torch.bucketize(cached, cached.new_tensor(CACHED)), pairs)
    if samples.runs is not None:
        if size.numel():
            table[len(CACHED_NAMES) :] = _by_runs(size, samples, samples.runs, positions, predicting)
        return table
    pairs = torch.stack((size, samples.mask.to(size.dtype)), dim=1)
    place = torch.bucketize(positions[predicting], positions.new_tensor(POSITIONS), right=True)
    return table.index_add_(0, len(CACHED_NAMES) + place, pairs)


def _by_runs(size: Tensor, samples: Samples, tokens: Tensor, positions: Tensor, predicting: Tensor) -> Tensor:
    """Return the pairs by position [len(POSITIONS) + 1, 2] from the number of each sample's tokens here [S].

    Positions grow within a sample, so its tokens in one bucket follow each other. Adding up such runs takes a CPU a
    tenth of the time of looking for the bucket of each token.
    """
    ends = tokens.cumsum(0)
    starts = ends - tokens
    places = (at.clamp(0, len(predicting) - 1) for at in (starts, ends - 1))  # of an empty sample: any
    first, last = (positions[predicting[at]] for at in places)
    bounds = torch.tensor((*POSITIONS, _SAMPLE))
    if bool(((last - first == tokens - 1) | (tokens == 0)).all()):  # without gaps: arithmetic is enough
        before = torch.minimum((bounds - first[:, None]).clamp(min=0), tokens[:, None])
    else:
        keys = torch.add(positions[predicting], samples.ids, alpha=_SAMPLE)
        wanted = torch.arange(samples.count)[:, None] * _SAMPLE + bounds
        before = torch.searchsorted(keys, wanted) - starts[:, None]
    runs = before.diff(dim=1, prepend=before.new_zeros(samples.count, 1)).flatten()
    sums = torch.segment_reduce(size, "sum", lengths=runs, unsafe=True)
    counts = (
        runs.to(size.dtype)
        if samples.all_count
        else torch.segment_reduce(samples.mask.to(size.dtype), "sum", lengths=runs, unsafe=True)
    )
    return torch.stack((sums, counts), dim=1).view(samples.count, -1, 2).sum(0)
