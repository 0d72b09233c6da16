"""Ranks that are threads of one process, with a gloo group of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gspo_hpc.exchange.transport import Transport

T = TypeVar("T")


def on_ranks(count: int, work: Callable[[Transport], T]) -> list[T]:
    """Return what `work` returns on each of several ranks, which are threads here."""
    store, found = dist.HashStore(), {}
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            group: Any = dist.ProcessGroupGloo(store, number, count, timedelta(seconds=20))
            found[number] = work(Transport(group))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(count)]
