"""A counterpart of torch.distributed for ranks that are threads."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch


class Mail:
    """Messages wait until their receiver asks for them, in the order in which they were sent."""

    isend, irecv = "isend", "irecv"

    def __init__(self, seconds: float = 10.0) -> None:
        """Take the seconds after which a rank that waits for another one raises TimeoutError."""
        self._seconds = seconds
        self._sent: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()

    def P2POp(self, kind: str, tensor: torch.Tensor, group: Any, group_peer: int, tag: int) -> Any:  # noqa: N802
        return kind, tensor, group.rank(), group_peer, tag

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        """Send at once, and return what waits for the others."""
        coming = []
        for kind, tensor, me, peer, tag in operations:
            if kind == self.isend:
                self._box(me, peer, tag).put(tensor.clone())
            else:
                box = self._box(peer, me, tag)
                coming.append(SimpleNamespace(wait=lambda to=tensor, box=box: self._get(box, to)))
        return coming

    def get_process_group_ranks(self, group: Any) -> list[int]:
        return list(group.ranks)

    def get_group_rank(self, group: Any, rank: int) -> int:
        return rank

    def _get(self, box: queue.Queue[torch.Tensor], to: torch.Tensor) -> None:
        try:
            to.copy_(box.get(timeout=self._seconds))
        except queue.Empty:  # which torch's writer takes for the end of its own queue
            raise TimeoutError("a rank waits for another one for ever") from None

    def _box(self, source: int, target: int, tag: int) -> queue.Queue[torch.Tensor]:
        with self._lock:
            return self._sent[source, target, tag]


def as_ranks(size: int, work: Callable[[int], object]) -> None:
    """Do the work of each rank in a thread, and raise the first error of any."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
