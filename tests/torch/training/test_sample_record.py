"""What the observer records of a step: every number of the record, its size, and how it goes on after a kill.

It takes some seconds, most of them for torch. The tests would catch a ratio of the wrong policies, a record that
exceeds its size or is recorded on some of the ranks only, and one that goes on after it was full.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.ops import hf_folder
from gspo_hpc.runs import sample_record
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.sample_record import RecordedSample
from gspo_hpc.training.observers.base import TrainedGroups
from gspo_hpc.training.observers.record import SampleRecord, TokenTexts
from gspo_hpc.training.recipe import Recipe


def config(folder: Path, mb: float = 1.0) -> Config:
    return from_dict({"model": {"path": str(folder)}, "tracking": {"record_interval": 1, "record_mb": mb}})


def completion(tokens: list[int], **changes: Any) -> Completion:
    engine = np.linspace(-0.5, -1.5, len(tokens)).astype(np.float32)
    return Completion(np.array(tokens, np.int32), engine, "7", "stop", 3, **changes)


def group(slot: int, *completions: Completion) -> Group:
    return Group(slot, Prompt(11, np.arange(4, dtype=np.int32), "3 + 4 =", {"answer": 7}), completions)


def trained(step: int, groups: list[Group], logprobs: dict[tuple[int, int], Any] | None = None) -> TrainedGroups:
    found = {key: np.array(values, np.float32) for key, values in (logprobs or {}).items()}
    return TrainedGroups(step, 2, 1, step - 1, groups, found)


def samples(run: RunDir) -> list[RecordedSample]:
    return [one for step in sample_record.steps(run.record) for part in step.groups for one in part.samples]


def test_every_number_of_a_sample(tiny_folder: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    old, new = np.array([-0.5, -1.0], np.float32), np.array([-0.25, np.nan], np.float32)
    parts = {"number_match": 1.0, "length": 0.25}
    first = completion([5, 6], old_logprobs=old, reward=1.25, reward_parts=parts, advantage=0.75)
    second = replace(completion([7, 8], advantage=-0.75), finish_reason="length", excluded=True, failure="it hung")
    third = completion([9], advantage=0.0)
    record = SampleRecord(run, config(tiny_folder / "model"), Transport(), print)
    record.trained(trained(4, [group(6, first, second, third)], {(6, 0): new, (6, 1): [-0.6, -1.6]}))
    one, two, three = samples(run)
    assert (one.tokens, one.length, one.weights_version) == ([5, 6], 2, 3)
    assert one.rollout_logprobs == [-0.5, -1.5] and one.old_logprobs == [-0.5, -1.0] and one.logprobs == [-0.25, None]
    assert one.ratios == [1.2840254, None] and one.reference_logprobs is None  # exp(-0.25 + 0.5)
    assert (one.reward, one.reward_parts, one.advantage) == (1.25, parts, 0.75)
    assert (two.truncated, two.excluded, two.failure, two.old_logprobs) == (True, True, "it hung", None)
    assert two.ratios == [1.0, 1.0], "without old log-probs the policy that is updated sampled"
    assert three.logprobs is None and three.ratios is None
    (step,) = sample_record.steps(run.record)
    (only,) = step.groups
    assert (step.step, only.rollout, only.update, only.slot, only.prompt_index) == (4, 2, 1, 6, 11)
    assert (only.prompt, only.prompt_length, only.fields) == ("3 + 4 =", 4, {"answer": 7})


def test_float32_is_read_back_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    engine = -np.random.default_rng(0).random(500).astype(np.float32) * 20
    one = replace(completion([5] * 500), logprobs=engine)
    SampleRecord(run, config(tiny_folder / "model"), Transport(), print).trained(trained(1, [group(0, one)]))
    assert np.array_equal(np.array(samples(run)[0].rollout_logprobs, np.float32), engine)


def test_tokens_have_the_texts_that_make_the_completion(tiny_folder: Path) -> None:
    tokenizer = hf_folder.tokenizer(tiny_folder / "model")
    tokens = tokenizer("12 + 7 = 19", add_special_tokens=False)["input_ids"]
    texts = TokenTexts(str(tiny_folder / "model"))
    assert "".join(texts[token] for token in tokens) == tokenizer.decode(tokens)
    assert texts[10**6] == "", "a token beyond the vocabulary has no text"


class Vocabulary:
    """A tokenizer of SentencePiece's kind, which drops the space of a first word, and of one that splits characters."""

    def convert_ids_to_tokens(self, token: int) -> str:
        return ["\u2581over", "\u00e4\u00bd", "a"][token]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return ["over", "\ufffd", "a"][tokens[0]]


def test_spaces_and_parts_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_folder, "tokenizer", lambda path: Vocabulary())
    texts = TokenTexts("")
    assert [texts[token] for token in range(3)] == [" over", "\u00e4\u00bd", "a"]


def some(step: int, tokens: int = 400) -> TrainedGroups:
    rng = np.random.default_rng(step)
    one = replace(completion([5] * tokens), logprobs=-rng.random(tokens).astype(np.float32))
    return trained(step, [group(0, one)], {(0, 0): -rng.random(tokens)})


def test_the_record_stays_below_its_size_and_says_when_it_is_full(tiny_folder: Path, tmp_path: Path) -> None:
    run, notes = RunDir(tmp_path), list[str]()
    settings = config(tiny_folder / "model", mb=0.02)
    record = SampleRecord(run, settings, Transport(), notes.append)
    for step in range(1, 12):
        record.trained(some(step))
    recorded = [one.step for one in sample_record.steps(run.record)]
    assert 1 < len(recorded) < 10 and recorded == [*range(1, len(recorded) + 1)]
    assert sample_record.size(run.record) <= 20_000
    ended = sample_record.end(run.record)
    assert ended is not None and (ended.step, ended.limit_mb) == (recorded[-1] + 1, 0.02)
    (note,) = notes
    assert "full (tracking.record_mb 0.02)" in note and f"from step {ended.step} on" in note
    before = sample_record.size(run.record)
    again = SampleRecord(run, settings, Transport(), notes.append)  # a later attempt
    again.trained(trained(12, [group(0, completion([5]))]))  # which would fit
    assert sample_record.size(run.record) == before and len(notes) == 1
    larger = SampleRecord(run, config(tiny_folder / "model", mb=1.0), Transport(), notes.append)
    larger.trained(some(13))
    assert [one.step for one in sample_record.steps(run.record)] == [*recorded, 13]


def test_a_killed_run_records_every_step_once(tiny_folder: Path, tmp_path: Path) -> None:
    """Whatever was written after the checkpoint is cut, and written again: the files are those of the other run."""
    whole, killed = RunDir(tmp_path / "whole"), RunDir(tmp_path / "killed")
    settings = config(tiny_folder / "model", mb=0.02)
    for run in (whole, killed):
        run.path.mkdir()
        record = SampleRecord(run, settings, Transport(), print)
        for step in range(1, 12):
            record.trained(some(step))
    path = sample_record.path_of(killed.record, 0)
    path.write_bytes(path.read_bytes()[:-10])  # in the middle of a line
    for saved in (2, 4, 1):
        sample_record.cut(killed.record, saved)
        record = SampleRecord(killed, settings, Transport(), print)
        for step in range(saved + 1, 12):
            record.trained(some(step))
    assert path.read_bytes() == sample_record.path_of(whole.record, 0).read_bytes()


class Connected:
    """The end of one of several ranks in this process: sums meet at a barrier."""

    def __init__(self, rank: int, meeting: threading.Barrier, parts: dict[int, bytes]) -> None:
        self.rank, self.world_size, self._meeting, self._parts = rank, meeting.parties, meeting, parts

    def tree_all_reduce(self, mine: bytes, merge: Callable[[list[bytes]], bytes]) -> bytes:
        self._parts[self.rank] = mine
        self._meeting.wait(30)
        whole = merge([self._parts[rank] for rank in range(self.world_size)])
        self._meeting.wait(30)
        return whole


def test_a_step_is_recorded_on_all_ranks_or_on_none(tiny_folder: Path, tmp_path: Path) -> None:
    """The bound is that of the whole record. A rank without a group in a step takes part and writes nothing."""
    run, notes = RunDir(tmp_path), list[str]()
    meeting, parts = threading.Barrier(3), dict[int, bytes]()
    settings = config(tiny_folder / "model", mb=0.04)

    def work(rank: int) -> None:
        transport: Any = Connected(rank, meeting, parts)
        record = SampleRecord(run, settings, transport, notes.append)
        for step in range(1, 12):
            one = replace(some(step), groups=[replace(some(step).groups[0], slot=rank)] if rank else [])
            record.trained(one)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = {one.step: [part.slot for part in one.groups] for one in sample_record.steps(run.record)}
    assert 1 < len(found) < 10 and all(slots == [1, 2] for slots in found.values())
    assert sample_record.size(run.record) <= 40_000 and len(notes) == 1
    assert sorted(path.name for path in run.record.iterdir()) == [f"rank-0000{rank}.jsonl.gz" for rank in range(3)]


def test_which_steps_and_groups_are_recorded() -> None:
    from gspo_hpc.exchange.exchange import Exchange

    made = [group(slot, completion([5], advantage=float(slot == 9))) for slot in (4, 2, 9)]
    table = Exchange().gather_table(made).table

    def slots(step: int, **tracking: Any) -> list[int]:
        given: Any = {"objective": None, "passes": None, "num_rollout_prompts": 1, "updates_per_rollout": 1}
        return Recipe(config=from_dict({"tracking": tracking}), attempt=1, **given).recorded_slots(step, table)

    assert slots(10) == []
    assert [step for step in range(1, 12) if slots(step, record_interval=5)] == [1, 5, 10]
    assert slots(5, record_interval=5) == [9, 2], "what has an advantage comes first"
    assert slots(5, record_interval=5, record_groups=9) == [9, 2, 4]
