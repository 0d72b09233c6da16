"""Checkpoints are whole or absent: killed at every system call, damaged in every way, saved again, retained."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from gspo_hpc.runs import commit as commits
from gspo_hpc.runs.commit import (
    begin,
    clean_staging,
    commit,
    list_committed,
    newest_whole,
    read_extra,
    retain,
    staging_path,
    verify,
)
from gspo_hpc.system.direct_io import Writer
from gspo_hpc.system.progress import marks

ROOT = Path(__file__).parents[3]


def save(root: Path, step: int, mark: str = "") -> Path:
    staging = begin(root, step)
    (staging / "megatron").mkdir()
    with Writer(staging / "megatron" / "shard-0") as shard:
        shard.write(f"{step}{mark}".encode() * 1000)
    assert shard.entry is not None
    (staging / "megatron" / "shard-1").write_bytes(b"")
    (staging / "cursor.json").write_text(f'{{"step": {step}}}')
    return commit(staging, step, {"mark": mark}, {"megatron/shard-0": shard.entry})


def content(path: Path) -> str:
    return (path / "megatron" / "shard-0").read_text()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_is_whole_private_and_described(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    path = save(root, 10, "m")
    assert path == root / "000010" and verify(path) == [] and names(root) == ["000010"]
    assert newest_whole(root) == (path, []) and list_committed(root) == [path]
    written = (path / "MANIFEST.json").read_bytes()  # these names are in the docs, and in checkpoints that others keep
    assert (path / "COMMITTED").read_text() == hashlib.sha256(written).hexdigest() + "\n"
    manifest = json.loads(written)
    assert manifest["step"] == 10 and manifest["extra"] == {"mark": "m"}
    assert sorted(manifest["files"]) == ["cursor.json", "megatron/shard-0", "megatron/shard-1"]
    shard = (path / "megatron" / "shard-0").read_bytes()
    expected = {"size": len(shard), "sha256": hashlib.sha256(shard).hexdigest()}
    assert manifest["files"]["megatron/shard-0"] == expected
    modes = {oct(p.stat().st_mode & 0o777) for p in path.rglob("*") if p.is_file()}
    assert modes == {"0o600"} and (path / "megatron").stat().st_mode & 0o777 == 0o700


def test_begin_gives_an_empty_directory_where_all_ranks_look_for_it(tmp_path: Path) -> None:
    staging = begin(tmp_path, 3)
    (staging / "left-by-a-killed-save").touch()
    assert begin(tmp_path, 3) == staging == staging_path(tmp_path, 3)
    assert list(staging.iterdir()) == [] and list_committed(tmp_path) == []
    assert newest_whole(tmp_path) == (None, [])


def test_everything_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def log_fsync(fd: int) -> None:
        fsync(fd)
        events.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))

    def log_rename(source: Any, target: Any) -> None:
        events.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "rename", log_rename)
    final = save(tmp_path, 10)
    staging = staging_path(tmp_path, 10)
    moved = events.index(("rename", str(final)))
    marked = events.index(("rename", str(staging / "COMMITTED")))
    payload = ["megatron/shard-0", "megatron/shard-1", "cursor.json", "megatron"]
    for name in payload:
        assert ("sync", str(staging / name)) in events[:marked], name
    described = events.index(("rename", str(staging / "MANIFEST.json")))
    assert described < marked < moved
    assert any(what == "sync" and path.endswith(".tmp") for what, path in events[:described])
    assert ("sync", str(staging)) in events[described:marked]
    assert ("sync", str(staging)) in events[marked:moved]
    assert ("sync", str(tmp_path)) in events[moved:]


@pytest.mark.parametrize("size", [1, 3])
def test_a_file_of_another_size_than_its_writer_says_is_not_committed(tmp_path: Path, size: int) -> None:
    """A file that was cut or has grown since is found: the hash that the writer knows is of what it wrote."""
    staging = begin(tmp_path, 10)
    (staging / "shard-0").write_bytes(b"ab")
    with pytest.raises(OSError, match=rf"has 2 bytes, {size} were written"):
        commit(staging, 10, {}, {"shard-0": {"size": size, "sha256": "0" * 64}})
    assert list_committed(tmp_path) == []


def test_a_damaged_checkpoint_is_aside_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that loses power after that does not find it under its old name, above the one that was resumed."""
    save(tmp_path, 10)
    (save(tmp_path, 20) / "COMMITTED").unlink()
    synced, fsync = list[tuple[str, list[str]]](), os.fsync

    def log_fsync(fd: int) -> None:
        fsync(fd)
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), names(tmp_path)))

    monkeypatch.setattr(os, "fsync", log_fsync)
    newest_whole(tmp_path, put_aside=True)
    assert synced == [(str(tmp_path), ["000010", "damaged-000020"])]


# Damage ---------------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("megatron/shard-0", flip, "megatron/shard-0 was changed"),
    ("megatron/shard-0", cut, "megatron/shard-0 has 1999 bytes instead of 2000"),
    ("megatron/shard-0", os.unlink, "megatron/shard-0 is missing"),
    ("megatron/shard-1", os.unlink, "megatron/shard-1 is missing"),
    ("cursor.json", flip, "cursor.json was changed"),
    ("megatron", shutil.rmtree, "megatron/shard-0 is missing; megatron/shard-1 is missing"),
    ("MANIFEST.json", flip, "MANIFEST.json or COMMITTED was changed"),
    ("MANIFEST.json", cut, "MANIFEST.json or COMMITTED was changed"),
    ("MANIFEST.json", os.unlink, "MANIFEST.json is missing"),
    ("COMMITTED", flip, "MANIFEST.json or COMMITTED was changed"),
    ("COMMITTED", lambda path: path.write_text(f"{path.read_text()}\n"), "MANIFEST.json or COMMITTED was changed"),
    ("COMMITTED", os.unlink, "COMMITTED is missing"),
]


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGE)
def test_damage_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], object], told: str
) -> None:
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    damage(newer / name)
    assert verify(newer) and verify(older) == []
    best, remarks = newest_whole(tmp_path)
    assert best == older
    assert len(remarks) == 1 and remarks[0].startswith("checkpoint 20 is damaged and not used: ") and told in remarks[0]
    assert names(tmp_path) == ["000010", "000020"]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize(("name", "damage", "told"), DAMAGE)
def test_processes_that_share_the_work_find_the_same(
    tmp_path: Path, name: str, damage: Callable[[Path], object], told: str, parts: int
) -> None:
    """Also where there are fewer files than processes; what concerns the whole checkpoint, each of them tells."""
    path = save(tmp_path, 10)
    assert [verify(path, part, parts) for part in range(parts)] == [[]] * parts
    damage(path / name)
    found = [problem for part in range(parts) for problem in verify(path, part, parts)]
    assert sorted(set(found)) == sorted(verify(path)) and all(text in found for text in verify(path))


def test_processes_that_share_the_work_read_every_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = save(tmp_path, 10), list[str]()
    hashed = commits._hash_in_steps
    monkeypatch.setattr(commits, "_hash_in_steps", lambda file: read.append(file.name) or hashed(file))
    for part in range(2):
        verify(path, part, 2)
    assert sorted(read) == ["cursor.json", "shard-0", "shard-1"]


def test_processes_that_share_the_work_read_about_equally_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their names, one process would read both of the large files."""
    staging = begin(tmp_path, 10)
    for name, size in {"a": 8000, "b": 10, "c": 7000, "d": 20}.items():
        (staging / name).write_bytes(bytes(size))
    path, read = commit(staging, 10), list[int]()
    hashed = commits._hash_in_steps
    monkeypatch.setattr(commits, "_hash_in_steps", lambda file: read.append(file.stat().st_size) or hashed(file))
    for part, sizes in enumerate(([20, 8000], [10, 7000])):
        read.clear()
        assert verify(path, part, 2) == [] and sorted(read) == sizes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda manifest: manifest.pop("files"), "lists no files"),
        (lambda manifest: manifest.update(files=[]), "lists no files"),
        (lambda manifest: manifest.update(files={"cursor.json": None}), "no size and SHA-256 of cursor.json"),
        (lambda manifest: manifest["files"]["cursor.json"].pop("size"), "no size and SHA-256 of cursor.json"),
        (lambda manifest: manifest["files"]["cursor.json"].pop("sha256"), "no size and SHA-256 of cursor.json"),
    ],
)
def test_a_manifest_of_another_form_is_damage(tmp_path: Path, change: Callable[[Any], object], told: str) -> None:
    """Its hash is that of COMMITTED, so it is as whoever committed it wrote it."""
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    manifest = json.loads((newer / "MANIFEST.json").read_text())
    change(manifest)
    seal(newer, json.dumps(manifest))
    best, remarks = newest_whole(tmp_path)
    assert best == older and len(remarks) == 1 and told in remarks[0]


@pytest.mark.parametrize("text", ["[]", "{}", '{"extra": null}', '{"extra": []}', "not JSON"])
def test_a_manifest_without_extra_is_refused_in_words(tmp_path: Path, text: str) -> None:
    seal(path := save(tmp_path, 10), text)
    assert any("MANIFEST.json" in problem for problem in verify(path))
    with pytest.raises(ValueError, match=r"MANIFEST\.json"):
        read_extra(path)


def seal(checkpoint: Path, manifest: str) -> None:
    """Give a checkpoint another manifest, with its hash."""
    (checkpoint / "MANIFEST.json").write_text(manifest)
    (checkpoint / "COMMITTED").write_text(hashlib.sha256(manifest.encode()).hexdigest() + "\n")


def test_the_damaged_one_is_put_aside_and_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for round_ in ("damaged-000020", "damaged-000020-2"):
        flip(save(tmp_path, 20) / "cursor.json")
        best, remarks = newest_whole(tmp_path, put_aside=True)
        assert best == tmp_path / "000010" and f"(now {round_})" in remarks[0]
        assert newest_whole(tmp_path) == (best, [])
    save(tmp_path, 15)
    retain(tmp_path, 1)
    assert [p.name for p in list_committed(tmp_path)] == ["000015"]
    assert (tmp_path / "damaged-000020").is_dir()


def test_of_several_faults_two_are_named_and_the_others_counted(tmp_path: Path) -> None:
    damaged = save(tmp_path, 20)
    flip(damaged / "cursor.json")
    flip(damaged / "megatron/shard-0")
    (damaged / "megatron/shard-1").unlink()
    assert newest_whole(tmp_path)[1][0].endswith("is another, and 1 more")


def test_when_all_are_damaged_there_is_none(tmp_path: Path) -> None:
    for step in (1, 2):
        cut(save(tmp_path, step) / "cursor.json")
    best, remarks = newest_whole(tmp_path)
    assert best is None and ["checkpoint 2" in remarks[0], "checkpoint 1" in remarks[1]] == [True, True]


def test_a_file_with_a_number_for_a_name_is_no_damaged_checkpoint(tmp_path: Path) -> None:
    saved = save(tmp_path, 10)
    (tmp_path / "20260101").write_text("somebody's note\n")
    assert newest_whole(tmp_path, put_aside=True) == (saved, [])
    assert names(tmp_path) == ["000010", "20260101"]


# Saving again, retention, sweeping ------------------------------------------------------------------------------------


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, "a")
    path = save(tmp_path, 10, "b")
    assert verify(path) == [] and content(path) == "10b" * 1000 and names(tmp_path) == ["000010"]


def test_an_old_one_between_two_renames_is_used_and_put_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    os.rename(save(tmp_path, 10, "a"), tmp_path / ".old-000010")
    best, _ = newest_whole(tmp_path)
    assert best is not None and content(best) == "10a" * 1000
    assert len(list_committed(tmp_path)) == 2
    clean_staging(tmp_path)
    assert names(tmp_path) == ["000005", "000010"] and newest_whole(tmp_path)[0] == tmp_path / "000010"
    shutil.copytree(tmp_path / "000010", tmp_path / ".old-000010")
    path = save(tmp_path, 10, "b")
    assert names(tmp_path) == ["000005", "000010"] and content(path) == "10b" * 1000


def test_retain_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 10, 100, 1_000_000, 20):
        save(tmp_path, step)
    retain(tmp_path, 9)
    assert len(list_committed(tmp_path)) == 5
    retain(tmp_path, 2)
    assert names(tmp_path) == ["000100", "1000000"]
    retain(tmp_path, 1)
    assert names(tmp_path) == ["1000000"]


def test_retain_counts_only_what_is_committed(tmp_path: Path) -> None:
    """A folder of a later step without its marker is no checkpoint: it takes no place of one that is."""
    for step in (5, 10):
        save(tmp_path, step)
    (tmp_path / "000020").mkdir()
    retain(tmp_path, 2)
    assert [path.name for path in list_committed(tmp_path)] == ["000005", "000010"]


def test_retain_works_beside_what_a_kill_left_of_another(tmp_path: Path) -> None:
    """A checkpoint of the same step was being deleted when the run was killed, and was saved again since."""
    left = staging_path(tmp_path, 10)
    for step in (10, 20):
        save(tmp_path, step)
    (left := left.parent / f"{left.name.removesuffix('000010')}000010-retired").mkdir()
    (left / "shard-0").touch()
    retain(tmp_path, 1)
    assert [path.name for path in list_committed(tmp_path)] == ["000020"] and left.is_dir()


def test_a_checkpoint_that_is_being_deleted_has_not_the_name_of_one_that_is_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in the deletion leaves no checkpoint, and a save of the same step has its folder to itself."""
    for step in (10, 20):
        save(tmp_path, step)
    monkeypatch.setattr(commits, "remove_tree", lambda path: None)
    retain(tmp_path, 1)
    (left,) = (path for path in tmp_path.iterdir() if path.name != "000020")
    assert left.name != staging_path(tmp_path, 10).name and left.name.endswith("000010-retired")
    assert [path.name for path in list_committed(tmp_path)] == ["000020"]


def test_clean_staging_removes_only_what_a_kill_left(tmp_path: Path) -> None:
    clean_staging(tmp_path / "none")
    save(tmp_path, 10)
    (begin(tmp_path, 20) / "shard").write_text("half")
    (tmp_path / ".old-000010").mkdir()
    (tmp_path / ".tmp-000005-retired").mkdir()
    (tmp_path / "notes").mkdir()
    clean_staging(tmp_path)
    assert names(tmp_path) == ["000010", "notes"] and verify(tmp_path / "000010") == []


# Killed at every system call ------------------------------------------------------------------------------------------

CHILD = """
import os, shutil, sys
from pathlib import Path
sys.path.insert(0, str(Path("tests/unit").resolve()))
from tests.unit.runs import test_commit as t
from gspo_hpc.runs import commit

root = Path(sys.argv[1])
left = None
def step(*args):
    global left
    if left is not None:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
def dies(real):
    def call(*args, **kwargs):
        step()
        return real(*args, **kwargs)
    return call
for name in ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "chmod", "fchmod"):
    setattr(os, name, dies(getattr(os, name)))
commit.ThreadPoolExecutor = lambda threads: t.InOrder()  # so that point k is the same in every run
for k in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        work = root / str(k)
        shutil.copytree(root / "seed", work)
        left = k
        t.save(work, 20, "new")
        t.retain(work, 1)
        left = None
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(k, os.waitstatus_to_exitcode(status), flush=True)
    if status == 0:
        break
"""


class InOrder:
    """The part of a thread pool that commit uses, without threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def map(self, function: Callable[..., Any], *items: Any) -> list[Any]:
        return [function(*one) for one in zip(*items, strict=False)]


@pytest.mark.parametrize("resaved", [False, True])
def test_killed_at_every_system_call_the_newest_whole_one_always_loads(tmp_path: Path, resaved: bool) -> None:
    save(tmp_path / "seed", 10, "old")
    if resaved:
        save(tmp_path / "seed", 20, "old")
    command = [sys.executable, "-c", CHILD, str(tmp_path), "500"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert out.returncode == 0, out.stderr
    points = [tuple(map(int, line.split())) for line in out.stdout.splitlines()]
    assert [code for _, code in points] == [-signal.SIGKILL] * (len(points) - 1) + [0]
    assert len(points) > 40
    seen = []
    for k, code in points:
        work = tmp_path / str(k)
        best, remarks = newest_whole(work)
        assert best is not None and remarks == [], k
        assert all(verify(path) == [] for path in list_committed(work)), k
        step = "".join(c for c in best.name if c.isdigit())
        seen.append((step, content(best)[2:5]))
        clean_staging(work)
        assert [n for n in names(work) if not n.isdigit()] == []
        after, remarks = newest_whole(work)
        assert after is not None and (after.name, remarks) == (step, []) and content(after)[2:5] == seen[-1][1], k
        assert verify(save(work, 30)) == []  # and the run goes on
        if code == 0:
            assert seen[-1] == ("000020", "new") and names(work) == ["000020", "000030"]
    assert seen == sorted(seen, key=lambda s: s[1] == "new")  # once committed, it stays
    assert seen[0] == (("000020" if resaved else "000010"), "old")


def test_every_piece_of_a_file_that_is_verified_is_a_sign_of_life(tmp_path: Path) -> None:
    """The watcher takes a rank that hashes terabytes for hung without them."""
    staging = begin(tmp_path, 1)
    (staging / "shard").write_bytes(os.urandom(3 * 2**22 + 1))
    whole = commit(staging, 1)
    before = marks()[0]
    assert verify(whole) == []
    assert marks()[0] - before == 4
