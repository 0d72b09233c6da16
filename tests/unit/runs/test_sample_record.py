"""The record of samples is read back as it was written, in any state that a kill leaves, and is cut exactly.

It takes about a second. The tests would catch a torn member that hides the steps before it, a cut that keeps a step too
much or too few, a step in two files that is shown in two, and a foreign line that ends the reading.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.runs import sample_record
from gspo_hpc.runs.sample_record import End, RecordedGroup, RecordedSample


def sample(index: int, **changes: Any) -> RecordedSample:
    values: dict[str, Any] = {
        **{
            "index": index,
            "text": "12 \u4f60\n",
            "reward": 1.0,
            "reward_parts": {"number_match": 1.0},
            "failure": None,
        },
        **{"excluded": False, "advantage": 0.5, "truncated": False, "weights_version": 4, "seed": 7},
        **{"tokens": [5, 6], "token_texts": ["12", " \u4f60\n"], "rollout_logprobs": [-0.1, -1.25]},
        **{"old_logprobs": None, "logprobs": [-0.1, -1.5], "reference_logprobs": None, "ratios": [1.0, 0.7788008]},
    }
    return RecordedSample(**values | changes)


def group(step: int, slot: int, **changes: Any) -> RecordedGroup:
    values: dict[str, Any] = {
        **{"step": step, "rollout": step // 2, "update": step % 2, "slot": slot, "prompt_index": 3},
        **{"prompt": "What is 7 + 5?", "prompt_length": 6, "fields": {"answer": 12}, "samples": [sample(0), sample(1)]},
    }
    return RecordedGroup(**values | changes)


def write(folder: Path, rank: int, *members: list[RecordedGroup | End]) -> Path:
    path = sample_record.path_of(folder, rank)
    for rows in members:
        sample_record.append(path, sample_record.packed(rows))
    return path


def test_groups_of_all_ranks_come_back_by_step_and_slot(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    write(folder, 3, [group(1, 2)], [group(5, 0), group(5, 3)])
    write(folder, 0, [group(1, 1)], [group(9, 0)])
    found = list(sample_record.steps(folder))
    assert [(one.step, [part.slot for part in one.groups]) for one in found] == [(1, [1, 2]), (5, [0, 3]), (9, [0])]
    assert found[0].groups == [group(1, 1), group(1, 2)]
    assert found[0].groups[0].samples[0].length == 2
    assert sample_record.end(folder) is None
    assert sample_record.size(folder) == sum(path.stat().st_size for path in folder.iterdir())


def test_files_are_private_and_any_tool_reads_them(tmp_path: Path) -> None:
    path = write(tmp_path / "record", 0, [group(1, 0)], [group(2, 0)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["samples"][0]["ratios"] == [1.0, 0.7788008]


def test_the_same_rows_are_the_same_bytes() -> None:
    """So a run that is resumed writes the record of the run that was left alone."""
    assert sample_record.packed([group(1, 0)]) == sample_record.packed([group(1, 0)])


def test_a_file_that_was_cut_anywhere_has_its_whole_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "record", 0, [group(1, 0)], [group(2, 0)])
    whole = path.read_bytes()
    first = len(sample_record.packed([group(1, 0)]))
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        steps = [one.step for one in sample_record.steps(path.parent)]
        assert steps == ([1] if length >= first else []), length
        sample_record.cut(path.parent, 9)
        assert path.stat().st_size == (first if length >= first else 0)


@pytest.mark.parametrize(("after", "kept"), [(0, []), (1, [1]), (4, [1]), (5, [1, 5]), (99, [1, 5, 9])])
def test_a_cut_keeps_the_steps_up_to_the_checkpoint(after: int, kept: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "record"
    write(folder, 0, [group(1, 0)], [group(5, 0)], [group(9, 0)])
    write(folder, 1, [group(5, 1)])
    write(folder, 2, [group(1, 2), group(1, 3)], [End(9, 1.0)])
    sample_record.cut(folder, after)
    assert [one.step for one in sample_record.steps(folder)] == kept
    assert (sample_record.end(folder) is not None) == (after >= 9)
    write(folder, 0, [group(after + 1, 0)])  # and the record goes on
    assert [one.step for one in sample_record.steps(folder)] == [*kept, after + 1]


def test_where_the_record_ended_for_its_size(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    write(folder, 0, [group(1, 0)], [End(4, 0.5)], [group(9, 0)], [End(10, 1.5)])
    assert sample_record.end(folder) == End(10, 1.5)
    assert [one.step for one in sample_record.steps(folder)] == [1, 9]


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "record", 0, [group(1, 0)])
    before = path.read_bytes()
    real = os.write

    def write_a_part(fd: int, data: Any) -> int:
        real(fd, bytes(data)[:9])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", write_a_part)
    with pytest.raises(OSError, match="the disk is full or over its quota; free some space"):
        write(tmp_path / "record", 0, [group(2, 0)])
    assert path.read_bytes() == before


FOREIGN: list[Any] = [
    {},
    [],
    {"step": 3},
    {"step": "3", "full": "yes"},
    {"step": None, "full": True},
    {"step": 3, "samples": 4},
]


@pytest.mark.parametrize("row", FOREIGN)
def test_a_foreign_line_is_left_out(row: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "record", 0, [group(1, 0)])
    with path.open("ab") as file:
        file.write(gzip.compress((json.dumps(row) + "\n{not json\n").encode()))
    write(path.parent, 0, [group(4, 0)])
    assert [one.step for one in sample_record.steps(path.parent)] == [1, 4]
    assert sample_record.end(path.parent) is None


@pytest.mark.parametrize(
    "changes",
    [{"tokens": [1]}, {"ratios": [1.0]}, {"token_texts": [1, 2]}, {"rollout_logprobs": None}, {"reward": "1"}],
)
def test_a_sample_whose_lists_do_not_fit_is_left_out_with_its_group(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "record"
    write(folder, 0, [group(1, 0, samples=[sample(0, **changes)]), group(1, 1)])
    (found,) = sample_record.steps(folder)
    assert [one.slot for one in found.groups] == [1]


def test_what_is_no_file_of_ours_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    assert list(sample_record.steps(folder)) == [] and sample_record.size(folder) == 0
    sample_record.cut(folder, 3)
    write(folder, 0, [group(1, 0)])
    sample_record.path_of(folder, 1).write_bytes(b"no gzip at all")
    (folder / "notes.txt").write_text("x")
    assert [one.step for one in sample_record.steps(folder)] == [1]
