"""Commands of the ranks that train to those that generate, and their answers, in the store of the job.

The first training rank writes commands, numbered from 1, and the first generating rank reads them in this order. Each
hands on to the others of its role what it has read; so the store is asked by two ranks, however many there are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from gspo_hpc.rollout.notices import POLL_SECONDS

WEIGHTS, GENERATE, EXPLAIN, END = "take weights", "sample groups", "name the cause of a gap", "end"  # kinds of commands

Values = dict[str, Any]  # plain values


class Commands:
    """The commands and answers of one attempt."""

    def __init__(self, job_store: dist.Store) -> None:
        self._store = dist.PrefixStore("commands", job_store)
        self.count = 0  # of those that this rank has written or read

    def post(self, kind: str, values: Mapping[str, Any]) -> int:
        """Write a command, and return its number."""
        self.count += 1
        self._store.set(f"command/{self.count}", json.dumps({"kind": kind, **values}))
        return self.count

    def wait(self) -> tuple[int, Values]:
        """Return the next command with its number, once it is there."""
        self.count += 1
        while (found := self._find(f"command/{self.count}")) is None:
            time.sleep(POLL_SECONDS)
        return self.count, found

    def next_kind(self) -> str | None:
        """Return the kind of the command that :meth:`wait` returns next; None if it is not there yet."""
        found = self._find(f"command/{self.count + 1}")
        return None if found is None else str(found["kind"])

    def answer(self, number: int, values: Mapping[str, Any]) -> None:
        """Answer a command."""
        self._store.set(f"answer/{number}", json.dumps(dict(values)))

    def wait_for_answer(self, number: int, look: Callable[[], None]) -> Values:
        """Return the answer to a command, once it is there, and remove both: a store keeps what nobody removes.

        `look` is called between two looks at the store.
        """
        while (found := self.find_answer(number)) is None:
            look()
            time.sleep(POLL_SECONDS)
        for name in ("command", "answer", "read", "more"):  # it was read before it was answered
            self._store.delete_key(f"{name}/{number}")
        return found

    def find_answer(self, number: int) -> Values | None:
        """Return the answer to a command; None if it is not there."""
        return self._find(f"answer/{number}")

    def acknowledge(self, number: int) -> None:
        """Say that a command was read, after all before it were carried out."""
        self._store.set(f"read/{number}", "{}")

    def wait_until_read(self, number: int, look: Callable[[], None]) -> None:
        """Return once a command was read; `look` is called between two looks at the store."""
        while self._find(f"read/{number}") is None:
            look()
            time.sleep(POLL_SECONDS)

    def tell(self, number: int, values: Mapping[str, Any]) -> None:
        """Add to a command what was not known when it was written."""
        self._store.set(f"more/{number}", json.dumps(dict(values)))

    def hear(self, number: int) -> Values:
        """Return what was added to a command, once it is there."""
        while (found := self._find(f"more/{number}")) is None:
            time.sleep(POLL_SECONDS)
        return found

    def _find(self, key: str) -> Values | None:
        if not self._store.check([key]):
            return None
        found: Values = json.loads(self._store.get(key))
        return found
