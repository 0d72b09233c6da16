"""Generation with reward models beside the engines, on the ranks that generate.

A group is written down when it is sampled, and in another file once it has its scores. The ranks that train read the
second one alone, so a call that is killed while it scores samples nothing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gspo_hpc.data.records import Group
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.worker import Generated, Interrupted, RolloutWorker
from gspo_hpc.runs import journal
from gspo_hpc.training.sampling.scored import read_by_owners


def generate(
    worker: RolloutWorker, request: Request, folder: Path, fingerprint: str, scored: journal.Journal | None
) -> Generated:
    """Sample and grade what is missing of a call, and have reward models score all of its groups. Collective.

    Each group goes to `scored` once it has its whole rewards; ranks that own no engine have none. Raises as
    :meth:`RolloutWorker.generate` does.
    """
    assert worker.models is not None
    own, done = _sampled(worker, request.slots, folder, fingerprint)
    rest = replace(request, slots=[slot for slot in request.slots if slot not in done])
    writer = None
    if worker.engine is not None and rest.slots:
        writer = journal.Journal(folder, worker.ranks.rank, fingerprint=fingerprint, rollout=request.rollout)
    try:
        generated = worker.generate(rest, writer)
    finally:
        if writer is not None:
            writer.close()
    whole, ended = worker.models.score(
        own | generated.own, lambda group: None if scored is None else scored.append([group])
    )
    if not ended:
        raise Interrupted
    return replace(generated, own=whole)


def _sampled(
    worker: RolloutWorker, slots: Sequence[int], folder: Path, fingerprint: str
) -> tuple[dict[int, Group], set[int]]:
    """Return this rank's share of the groups that an earlier attempt sampled, by slot, and the slots of all."""
    asked = set(slots)

    def listed() -> list[str]:
        return read_by_owners([path.name for path in journal.journals(folder)], worker.config)

    def read(name: str) -> dict[int, Group]:
        found = journal.read_journal(folder / name, fingerprint) if name else {}
        return {slot: group for slot, group in found.items() if slot in asked}

    return worker.ranks.exchange.partition_files(listed, read)
