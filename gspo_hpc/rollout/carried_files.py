"""The files from which a rollout takes the groups that it was given, as one rank reads them."""

from __future__ import annotations

from pathlib import Path

from gspo_hpc.data.carried import Place
from gspo_hpc.data.records import Group
from gspo_hpc.runs import journal
from gspo_hpc.system.files import wait_until_visible


class CarriedFiles:
    """The journals of earlier rollouts. A group that cannot be read is told, and is to be sampled anew."""

    def __init__(self, rollouts: Path) -> None:
        """`rollouts`: the folder of journals."""
        self._rollouts = rollouts
        self._lost = set[Path]()  # files that are not seen here, or are too short: each is waited for once

    def read(self, place: Place) -> Group | None:
        """Return the group at a place; None if its line is damaged, or its file is not there."""
        path = self._rollouts / f"{place.rollout:06d}" / place.file
        group = None
        if path not in self._lost:
            try:
                wait_until_visible(path, place.offset + place.length)
                group = journal.read_place(path, place.fingerprint, place.offset, place.length)
            except TimeoutError:
                self._lost.add(path)
        if group is None:
            print(f"{path}: a group that was carried cannot be read; it is sampled anew", flush=True)
        return group
