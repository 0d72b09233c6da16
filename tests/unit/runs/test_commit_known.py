"""The commit of a checkpoint whose writers know size and hash of their files (1 s).

It would catch files that are read a second time, and a checkpoint that counts as whole although a file that was written
is another one by now, or is not there.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.runs.commit import begin, commit, list_committed, verify


def test_what_its_writer_knows_of_a_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    staging = begin(tmp_path, 1)
    (staging / "shard").write_bytes(b"abc")
    (staging / "cursor.json").write_text("{}")
    read: list[str] = []
    digest = hashlib.file_digest

    def note(file: Any, name: Any) -> Any:
        read.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", note)
    path = commit(staging, 1, known={"shard": known})
    assert read == ["cursor.json", "MANIFEST.json"] and verify(path) == []


def test_a_file_of_another_size_than_was_written_is_not_committed(tmp_path: Path) -> None:
    staging = begin(tmp_path, 1)
    (staging / "shard").write_bytes(b"abc")
    with pytest.raises(OSError, match="shard has 3 bytes, 4 were written"):
        commit(staging, 1, known={"shard": {"size": 4, "sha256": ""}})
    assert list_committed(tmp_path) == []


def test_a_checkpoint_that_lacks_a_file_that_was_written_is_not_committed(tmp_path: Path) -> None:
    """A listing of a network's disk may lack what another node has just written, and a clean-up may have taken it.

    The checkpoint would count as whole, and nobody would know before a run resumes from it.
    """
    known = {f"megatron/shard-{n}": {"size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()} for n in range(3)}
    staging = begin(tmp_path, 1)
    (staging / "megatron").mkdir()
    (staging / "megatron" / "shard-1").write_bytes(b"abc")
    told = r"000001 lacks 2 of the 3 files that were written, megatron/shard-0 among them: is it on a disk that all"
    with pytest.raises(OSError, match=told):
        commit(staging, 1, known=known)
    assert list_committed(tmp_path) == []
