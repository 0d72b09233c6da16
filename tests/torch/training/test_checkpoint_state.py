"""A rollout in use in a checkpoint: every rank writes the groups that it holds, and any number of ranks reads them.

Catches a group that is lost or read twice where the number of ranks changes, and a file whose hash is not its own.
"""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import pytest

from gspo_hpc.data.records import Group
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.checkpoint_state import CheckpointState
from tests.torch.exchange.test_exchange import make_groups, on_ranks

CURSOR = Cursor(step=3, rollout=1, update=1)


def written(folder: Path, ranks: int, groups: list[Group]) -> list[str]:
    """The files that `ranks` ranks write, of which rank 0 holds no group and the last one the first two."""
    names = []
    for rank in range(ranks):
        own = [group for group in groups if ranks - 1 - group.slot // 2 == rank]
        state = CheckpointState(CURSOR, own, {"step": 3})
        if rank == 0:
            state.write(folder)
        for name, entry in state.write_groups(folder, rank).items():
            content = (folder / name).read_bytes()
            assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            names.append(name)
    return names


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_any_number_of_ranks_reads_what_others_wrote(readers: int, tmp_path: Path) -> None:
    groups = make_groups(5)
    names = written(tmp_path, 5, groups)
    assert names == ["rollout.jsonl", "rollout-00002.jsonl", "rollout-00003.jsonl", "rollout-00004.jsonl"]

    def work(link: Transport) -> list[str]:
        exchange = Exchange(link)
        state = CheckpointState.read(tmp_path, exchange)
        assert (state.cursor, state.record) == (CURSOR, {"step": 3})
        assert exchange.shard(state.groups).table.slots == [0, 1, 2, 3, 4]
        return [group.to_json() for group in state.groups]

    parts = on_ranks(readers, work)
    assert sorted(line for part in parts for line in part) == sorted(group.to_json() for group in groups)
    assert readers == 1 or max(map(len, parts)) < 5


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    written(tmp_path, 2, make_groups(1))
    (tmp_path / "rollout-00001.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"rollout-00001.jsonl cannot be read: KeyError"):
        CheckpointState.read(tmp_path)


def test_groups_are_written_one_at_a_time(tmp_path: Path) -> None:
    """A rank holds gigabytes of them, and training goes on beside the save."""
    groups = make_groups(40, samples=4, length=20_000)
    largest = max(len(group.to_json()) for group in groups)
    tracemalloc.start()
    try:
        (entry,) = CheckpointState(CURSOR, groups, None).write_groups(tmp_path, 0).values()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert entry["size"] > 15 * largest and peak < 6 * largest
