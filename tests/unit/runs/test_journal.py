"""The rollout journal: nothing that was appended is lost, nothing that was damaged is believed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.turns import TurnRecord
from gspo_hpc.runs.journal import Journal, places, read_journals, read_place, read_turns, retire

ROOT = Path(__file__).parents[3]
PRINT = "policy-a"


def make_group(slot: int, text: str = "1 + 1", seed: int = 3) -> Group:
    tokens = np.array([slot, 2**31 - 1, -1], dtype=np.int32)
    logprobs = np.array([-0.1, np.nan, -np.inf], dtype=np.float32)
    completion = Completion(tokens, logprobs, f"line\nbreak {text}", "stop", seed, reward=0.1, old_logprobs=logprobs)
    few = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    many = np.array([[[256, 65535]]], dtype=np.uint16)
    prompt = Prompt(slot, tokens, text, {"answer": "ä\u2028"})
    turns = replace(completion, logprobs=logprobs[1:], old_logprobs=None, environment=np.array([0, 1, 0], np.uint8))
    return Group(slot, prompt, (replace(completion, experts=few), completion, turns), many)


def lines(groups: dict[int, Group]) -> dict[int, str]:
    return {slot: group.to_json() for slot, group in groups.items()}


def write(folder: Path, writer: int, groups: list[Group], fingerprint: str = PRINT) -> Path:
    journal = Journal(folder, writer, fingerprint=fingerprint, rollout=12)
    for group in groups:
        journal.append([group])
    journal.close()
    return journal.path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[int, str]]:
    folder = tmp_path_factory.mktemp("written") / "000012"
    groups = [make_group(slot) for slot in range(3)]
    path = write(folder, 0, groups)
    return path, path.read_bytes(), {group.slot: group.to_json() for group in groups}


def test_experts_keep_their_shape_and_width(written: tuple[Path, bytes, dict[int, str]]) -> None:
    group = read_journals(written[0].parent, PRINT)[0]
    expected = make_group(0)
    for array, wanted in (
        (group.prompt_experts, expected.prompt_experts),
        (group.completions[0].experts, expected.completions[0].experts),
    ):
        assert array is not None and wanted is not None
        assert array.dtype == wanted.dtype and array.shape == wanted.shape and np.array_equal(array, wanted)
    assert group.completions[1].experts is None


def test_all_writers_come_back_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts" / "000012"
    assert read_journals(folder, PRINT) == {}
    write(folder, 0, [make_group(4), make_group(0)])
    journal = Journal(folder, 11, fingerprint=PRINT, rollout=12)
    journal.append([make_group(1), make_group(2)])
    journal.append([])
    journal.close()
    journal.close()
    expected = {slot: make_group(slot).to_json() for slot in (4, 0, 1, 2)}
    assert lines(read_journals(folder, PRINT)) == expected


def test_of_a_slot_twice_the_first_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, [make_group(1, "first"), make_group(1, "second")])
    assert read_journals(tmp_path / "a", PRINT)[1].prompt.text == "first"
    write(tmp_path / "b", 10, [make_group(1, "tenth writer")])
    write(tmp_path / "b", 2, [make_group(1, "second writer")])
    assert read_journals(tmp_path / "b", PRINT)[1].prompt.text == "second writer"


def test_another_policys_groups_do_not_count_and_are_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [make_group(0), make_group(1)], "policy-b")
    assert read_journals(tmp_path, PRINT) == {}
    assert set(read_journals(tmp_path, "policy-b")) == {0, 1}
    write(tmp_path, 1, [make_group(2)])
    assert set(read_journals(tmp_path, PRINT)) == {2}
    write(tmp_path, 0, [make_group(5)])
    assert set(read_journals(tmp_path, PRINT)) == {2, 5}
    assert read_journals(tmp_path, "policy-b") == {}
    assert path.read_bytes().count(b"\n") == 2


def test_a_line_of_another_policy_is_not_believed_under_our_header(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", 0, [make_group(0)])
    theirs = write(tmp_path / "b", 0, [make_group(1)], "policy-b")
    ours.write_bytes(ours.read_bytes() + theirs.read_bytes().split(b"\n")[1] + b"\n")
    assert set(read_journals(tmp_path / "a", PRINT)) == {0}


def test_a_torn_journal_is_continued(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [make_group(0), make_group(1)])
    whole = path.read_bytes()
    second = whole.rindex(b"\n", 0, -1) + 1
    for size in (0, 5, whole.index(b"\n"), whole.index(b"\n") + 1, second - 1, second, second + 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        before = set(read_journals(tmp_path, PRINT))
        write(tmp_path, 0, [make_group(7)])
        assert set(read_journals(tmp_path, PRINT)) == before | {7}
        assert before == ({0} if size >= second else set())


def test_truncated_at_every_byte_it_loses_at_most_the_torn_group(
    written: tuple[Path, bytes, dict[int, str]], tmp_path: Path
) -> None:
    _, whole, expected = written
    path = tmp_path / "rank-0000.journal"
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    path.write_bytes(whole)
    for size in range(len(whole), -1, -1):
        os.truncate(path, size)
        complete = max(0, sum(end < size for end in ends) - 1)  # less the header
        got = lines(read_journals(tmp_path, PRINT))
        assert got == {slot: expected[slot] for slot in range(complete)}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_never_yields_a_wrong_group(
    written: tuple[Path, bytes, dict[int, str]], tmp_path: Path, data: st.DataObject
) -> None:
    _, whole, expected = written
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        hit = whole[:at].count(b"\n")  # 0: the header; a line break also joins the next line
        lost = {0, 1, 2} if hit == 0 else {hit - 1, hit} if whole[at] == ord("\n") else {hit - 1}
    else:
        end = data.draw(st.integers(at, min(len(whole), at + 64)))
        damaged = bytearray(whole[:at] + data.draw(st.binary(max_size=8)) + whole[end:])
        lost = {0, 1, 2}
    (tmp_path / "rank-0000.journal").write_bytes(damaged)
    got = lines(read_journals(tmp_path, PRINT))
    assert all(expected[slot] == line for slot, line in got.items())
    assert set(got) >= {0, 1, 2} - lost


def test_a_flipped_bit_in_any_byte_of_a_line_is_noticed(
    written: tuple[Path, bytes, dict[int, str]], tmp_path: Path
) -> None:
    _, whole, _ = written
    begin = whole.index(b"\n") + 1
    path = tmp_path / "rank-0000.journal"
    for at in range(begin, whole.index(b"\n", begin)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        assert set(read_journals(tmp_path, PRINT)) == {1, 2}


KILLED = """
import os, sys
from pathlib import Path
from gspo_hpc.runs.journal import Journal
sys.path.insert(0, str(Path("tests/unit").resolve()))
from tests.unit.runs.test_journal import make_group
journal = Journal(Path(sys.argv[1]), 0, fingerprint="policy-a", rollout=12)
for slot in range(10000):
    journal.append([make_group(slot)])
    print(slot, flush=True)
"""


def test_what_append_returned_from_survives_sigkill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(20):
        child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    said = 19 + len(child.stdout.read().splitlines())
    child.wait()
    got = read_journals(tmp_path, PRINT)
    assert len(got) >= said + 1
    assert lines(got) == {slot: make_group(slot).to_json() for slot in range(len(got))}


def test_append_syncs_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, 0, fingerprint=PRINT, rollout=0)
    sizes: list[int] = []
    fsync = os.fsync

    def log(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", log)
    journal.append([make_group(0), make_group(1)])
    journal.close()
    assert sizes == [journal.path.stat().st_size]


@pytest.mark.parametrize(
    ("lost", "kept"),
    # Without the first, the others may be those of a conversation that an earlier rollout began.
    [([], [0, 1, 2, 3, 4]), ([1], [0]), ([1, 2], [0]), ([3], [0, 1, 2]), ([0], [1, 2, 3, 4]), ([4], [0, 1, 2, 3])],
)
def test_turns_behind_a_damaged_one_do_not_count(lost: list[int], kept: list[int], tmp_path: Path) -> None:
    """Put together without it, a conversation would go on behind answers to a message that nobody knows."""
    journal = Journal(tmp_path, 0, fingerprint=PRINT, rollout=0)
    tokens, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
    for number in range(5):
        journal.append_turns(
            [TurnRecord(7, 1, number, 0, tokens, logprobs, f"message {number}", "stop", 0, None, "yes", 0.0, False)]
        )
    journal.close()
    path = tmp_path / "rank-0000.turns"
    header, *written = path.read_bytes().splitlines(keepends=True)
    for number in lost:
        written[number] = b"0" + written[number][1:] if written[number][:1] != b"0" else b"1" + written[number][1:]
    path.write_bytes(header + b"".join(written))
    assert [turn.turn for turn in read_turns(tmp_path, PRINT).get((7, 1), [])] == kept


@pytest.mark.parametrize("link", ["folder", "folder above"])
def test_no_journal_is_written_outside_of_the_run(link: str, tmp_path: Path) -> None:
    """A run directory may be of another's making, with a link in it that leads anywhere."""
    outside = tmp_path / "outside"
    (outside / "000012").mkdir(parents=True)
    place = tmp_path / "run" / "rollouts"
    place.parent.mkdir()
    if link == "folder":
        place.mkdir()
        (place / "000012").symlink_to(outside / "000012")
    else:
        place.symlink_to(outside)
    with pytest.raises(ValueError, match="is a link, and a run writes into its own directory: remove the link"):
        Journal(place / "000012", 0, fingerprint=PRINT, rollout=12)
    assert not any((outside / "000012").iterdir())


OTHERS = [
    *("[" * 3000 + "]" * 3000, "{}", "[]", "7", "NaN", '{"slot": Infinity}', '{"slot": []}', "{"),
    make_group(1).to_json().replace('"slot":1', '"slot":Infinity'),
    make_group(1).to_json().replace('"finish_reason":"stop","seed":3', '"finish_reason":"stop","seed":NaN'),
    make_group(1).to_json().replace('"tokens":"', '"tokens":"!'),
]


def of_another(path: Path, payloads: list[bytes]) -> None:
    """Lines with the right checksum in the place of those behind the header."""
    header = path.read_bytes().split(b"\n")[0]
    seed = zlib.crc32(PRINT.encode())
    lines = [b"%08x %s" % (zlib.crc32(payload, seed), payload) for payload in payloads]
    path.write_bytes(b"".join(line + b"\n" for line in [header, *lines]))


@pytest.mark.parametrize("payload", [*(one.encode() for one in OTHERS), b"\x80\x04N.", "ä".encode()], ids=range(13))
def test_a_whole_line_that_holds_no_group_is_a_damaged_one(payload: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "000012", 0, [make_group(0)])
    of_another(path, [payload, make_group(2).to_json().encode()])
    assert lines(read_journals(path.parent, PRINT)) == {2: make_group(2).to_json()}
    found = places(path, PRINT)
    assert [*found] == [2] and read_place(path, PRINT, *found[2]) is not None
    at = len(path.read_bytes().split(b"\n")[0]) + 1
    assert read_place(path, PRINT, at, found[2][0] - at) is None
    path.rename(path.with_suffix(".turns"))
    assert read_turns(path.parent, PRINT) == {}


@pytest.mark.parametrize("payload", ["[" * 3000 + "]" * 3000, "[]", "null", '{"version": NaN}', "{"])
def test_a_header_of_another_form_is_that_of_another_policy(payload: str, tmp_path: Path) -> None:
    path = write(tmp_path / "000012", 0, [make_group(0)])
    _, *rest = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([b"%08x %s" % (zlib.crc32(payload.encode()), payload.encode()), *rest]))
    assert read_journals(path.parent, PRINT) == {} and places(path, PRINT) == {}


def test_retire_deletes_only_older_rollouts(tmp_path: Path) -> None:
    retire(tmp_path / "none", 3)
    for number in (1, 2, 3, 10):
        write(tmp_path / f"{number:06d}", 0, [make_group(0)])
    (tmp_path / "notes").mkdir()
    retire(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000003", "000010", "notes"]
