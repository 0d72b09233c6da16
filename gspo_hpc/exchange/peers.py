"""The ranks on the GPUs of one engine: which they are, and how they talk."""

from __future__ import annotations

import contextlib
import datetime
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gspo_hpc.config.derived import engines_per_node
from gspo_hpc.config.schema import Config

_met: Counter[tuple[int, ...]] = Counter()  # how often this rank has met the ranks of an engine: the same number on all


class EnginePeers:
    """The ranks on the GPUs of one engine, whose owner is the first of them. They talk from CPU to CPU."""

    def __init__(self, ranks: Sequence[int], timeout: datetime.timedelta, store: dist.Store) -> None:
        """Meet the others in the store of the job; wait for them for `timeout` at most, here and in every call."""
        self._size = len(ranks)
        self._said = (
            f"ranks {ranks[0]} to {ranks[-1]}, which share the GPUs of an engine, have lost each other (a rank waits "
            f"{timeout.total_seconds():g} s for the others)"
        )
        # torch names a group that only its own ranks make by its ranks and by how many groups there are. A second group
        # of the same ranks would find the addresses of the first one, where nobody listens any more.
        _met[tuple(ranks)] += 1
        prefix = f"engine_peers/{ranks[0]}-{ranks[-1]}/{_met[tuple(ranks)]}"
        with self._named():
            met_at = dist.PrefixStore(prefix, store)
            self._group: Any = dist.ProcessGroupGloo(met_at, ranks.index(dist.get_rank()), self._size, timeout)

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all, in order. Collective."""
        with self._named():
            lengths = torch.zeros(self._size, dtype=torch.int64)
            lengths[self._group.rank()] = len(payload)
            self._group.allreduce([lengths]).wait()
            mine = torch.zeros(int(lengths.max()), dtype=torch.uint8)
            if payload:  # torch makes no tensor of an empty buffer
                mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            every = [torch.empty_like(mine) for _ in range(self._size)]
            self._group.allgather([every], [mine]).wait()
        return [one[:length].numpy().tobytes() for one, length in zip(every, lengths.tolist(), strict=True)]

    def wait(self) -> None:
        """Return when all have come here. Collective."""
        with self._named():
            self._group.allreduce([torch.zeros(1)]).wait()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say in gloo's errors, which name an address at most, who waited for whom."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{self._said}: {error}") from error


def engine_peers(
    config: Config, rank: int, local_rank: int, timeout: datetime.timedelta, store: Callable[[], dist.Store]
) -> EnginePeers | None:
    """Return the peers of this rank if an engine has several GPUs, and uses this rank's. Collective among them.

    `rank` is its number in the default group, `local_rank` among those of its role on the node; `store` returns the
    store of that group.
    """
    size = config.rollout.tensor_parallel_size
    place = engine_place(config, local_rank)
    if size == 1 or place is None:
        return None
    first = rank - place
    return EnginePeers(range(first, first + size), timeout, store())


def engine_place(config: Config, local_rank: int) -> int | None:
    """Return the place of a rank among those on its engine's GPUs, 0 for the owner; None where there is no engine.

    Engines on GPUs of their own lie side by side, each with the reward models that are set apart behind it; those that
    share GPUs with training are spread over a node.
    """
    size, gpus = config.rollout.tensor_parallel_size, config.cluster.gpus_per_node
    per_node = engines_per_node(config)
    spacing = config.gpus_per_engine if config.rollout.mode == "server" else gpus // per_node
    engine, place = divmod(local_rank, spacing)
    return place if engine < per_node and place < size else None
