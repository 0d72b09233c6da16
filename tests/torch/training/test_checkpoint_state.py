"""A rollout in use in a checkpoint: every rank writes the groups that it holds, and any number of ranks reads them.

Catches a group that is lost or read twice where the number of ranks changes, a file whose hash is not its own, and an
attempt that judges the gap between engine and trainer by that of weights that went bad before it. Of a checkpoint of
another's making, it catches a file that ends a rank with a traceback, or has it train on another prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config.derived import gap_limits
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.prompts import NONE_RETIRED, Position
from gspo_hpc.data.records import Group
from gspo_hpc.data.retired import Retirement
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.runs import commit
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training import sync
from gspo_hpc.training.agreement.gap import Baseline, Gap, excess
from gspo_hpc.training.agreement.watch import GapMismatch, RolloutGapMonitor
from gspo_hpc.training.checkpoint_state import CheckpointState, read_layout
from gspo_hpc.training.progress import Progress, Rollout
from gspo_hpc.training.reference import refuse_other_teacher
from gspo_hpc.training.sync import EngineWeights, Synced
from tests.torch.exchange.ranks import on_ranks
from tests.torch.exchange.test_exchange import make_groups

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


@pytest.mark.parametrize("extra", [{}, {"layout": None}, {"layout": {}}, {"layout": {"ranks": "two"}}, {"layout": [2]}])
def test_a_manifest_without_the_layout_is_refused_in_words(extra: dict[str, Any], tmp_path: Path) -> None:
    staging = commit.begin(tmp_path, 3)
    (staging / "shard").write_bytes(b"weights")
    whole = commit.commit(staging, 3, extra)
    assert commit.verify(whole) == []
    with pytest.raises(ValueError, match="does not say with which layout") as error:
        read_layout(whole)
    assert str(whole / commit.MANIFEST) in str(error.value) and f"move {whole} away" in str(error.value)


def test_the_layout_is_that_of_the_ranks_that_wrote(tmp_path: Path) -> None:
    staging = commit.begin(tmp_path, 3)
    (staging / "shard").write_bytes(b"weights")
    config = from_dict({"cluster": {"platform": "cpu", "gpus_per_node": 2}})
    assert read_layout(commit.commit(staging, 3, {"layout": config.layout})) == config.layout


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_any_number_of_ranks_reads_what_others_wrote(readers: int, tmp_path: Path) -> None:
    groups = make_groups(5)
    names = written(tmp_path, 5, groups)
    assert names == ["rollout.jsonl", "rollout-00002.jsonl", "rollout-00003.jsonl", "rollout-00004.jsonl"]

    def work(link: Transport) -> list[str]:
        exchange = Exchange(link)
        state = CheckpointState.read(tmp_path, exchange)
        assert (state.cursor, state.record) == (CURSOR, {"step": 3})
        assert exchange.gather_table(state.groups).table.slots == [0, 1, 2, 3, 4]
        return [group.to_json() for group in state.groups]

    parts = on_ranks(readers, work)
    assert sorted(line for part in parts for line in part) == sorted(group.to_json() for group in groups)
    assert readers == 1 or max(map(len, parts)) < 5


def test_a_run_goes_on_with_the_teacher_that_it_began_with(tmp_path: Path) -> None:
    CheckpointState(CURSOR, [], None, teacher="0f").write(tmp_path)
    found = CheckpointState.read(tmp_path)
    assert found.teacher == "0f" and Progress(found.cursor, teacher="0f").checkpoint_state({}).teacher == "0f"
    refuse_other_teacher(found.teacher, "0f", "models/teacher")
    with pytest.raises(ValueError, match="algorithm.teacher models/teacher has other weights than those that this run"):
        refuse_other_teacher(found.teacher, "1f", "models/teacher")


def test_what_is_retired_is_in_the_checkpoint_from_the_first_update_of_a_rollout_on(tmp_path: Path) -> None:
    """It belongs to the position: until then the rollout is sampled again, and decides again."""
    before = NONE_RETIRED.with_more([Retirement(4, 0, 1.0)])
    after = Position(1, 2, before.entered(1, 0).with_more([Retirement(2, 1, 0.9), Retirement(0, 1, 1.0)]))
    progress = Progress(Cursor(step=2, rollout=1), retired=before)
    groups = Exchange().gather_table(make_groups(1))
    progress.begin_rollout(Rollout(groups, after, {}, 3), groups, 0.0)
    assert progress.start == Position(0, 0, before) and progress.checkpoint_state({}).retired == before
    progress.advance(groups, None, 2)
    progress.checkpoint_state({}).write(tmp_path)
    found = CheckpointState.read(tmp_path)
    assert found.retired == after.retired and Progress(found.cursor, retired=found.retired).start == after
    assert CheckpointState.read(written_without(tmp_path)).retired == NONE_RETIRED, "of a version that knew of none"


def written_without(folder: Path) -> Path:
    """The folder without the file of what is retired."""
    (folder / "retired.json").unlink()
    return folder


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    written(tmp_path, 2, make_groups(1))
    (tmp_path / "rollout-00001.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"rollout-00001.jsonl cannot be read: KeyError"):
        CheckpointState.read(tmp_path)


DEEP = "[" * 3000 + "]" * 3000
WHOLE = {
    "cursor.json": json.dumps(CURSOR.to_dict()),
    "record.json": '{"step": 3, "loss": NaN, "gap": Infinity}',
    "baseline.json": '{"probe": null, "update": Infinity}',
    "ahead.json": '{"4": ["0f", 3]}',
    "adaptive_weights.json": '{"kl_beta": 0.1, "entropy_coef": 0.0}',
    "teacher.json": '{"fingerprint": "0f"}',
    "retired.json": '{"prompts": [[1, 0, 1.0]], "known": [[1, 1]]}',
    "pass_rates.json": '{"prompts": [0, 7], "rates": [0.5, 1.0]}',
    "sources.json": "[[8, 1, 0, [[1, 1]]]]",
    "carried.json": '[[7, 1, true, [1, "0f", "rank-0000.spare", 0, 9]]]',
}
MALFORMED = {
    **{name: ("7", DEEP, f'{{"a": {DEEP}}}', '"x"', "[[Infinity]]", "[Infinity]", "{") for name in WHOLE},
    "cursor.json": ('{"step": Infinity}', '{"step": 1e999}', '{"step": NaN}', DEEP, "[]", '{"step": []}'),
    "retired.json": ('{"prompts": [[Infinity, 0, 1.0]], "known": []}', '{"prompts": [[1, 0, NaN]], "known": []}', DEEP),
    "pass_rates.json": ('{"prompts": [Infinity], "rates": [1.0]}', '{"prompts": [1], "rates": [1e999]}', DEEP, "{}"),
    "sources.json": ("[[Infinity, 1, 0, []]]", "[[8, 1, -5, []]]", "[[8, -1, 0, []]]", "[[-8, 1, 0, []]]", DEEP),
    "carried.json": (
        *("[[Infinity, 1, true, null]]", "[[-1, 1, true, null]]", f"[[{DEEP}, 1, true, null]]", DEEP),
        *(f'[[7, 1, true, [1, "0f", "rank-0000.spare", {place}]]]' for place in ("-5, 9", "0, -9", "Infinity, 9")),
    ),
}
BEYOND = {
    "retired.json": ('{"prompts": [[8, 0, 1.0]], "known": []}', '{"prompts": [[-1, 0, 1.0]], "known": []}'),
    "pass_rates.json": ('{"prompts": [8], "rates": [0.5]}', '{"prompts": [-8], "rates": [0.5]}'),
    "carried.json": ("[[8, 1, true, null]]", "[[99999999, 1, false, null]]"),
}


def of_another(folder: Path) -> Path:
    """The files of a checkpoint that another wrote, each of which can be read."""
    CheckpointState(CURSOR, [], None).write_groups(folder, 0)
    for name, text in WHOLE.items():
        (folder / name).write_text(text)
    return folder


def test_metrics_and_gaps_that_are_not_finite_are_read(tmp_path: Path) -> None:
    """Our own checkpoints have them: a step whose gradient was skipped may have a loss of NaN."""
    state = CheckpointState.read(of_another(tmp_path), num_prompts=8)
    assert state.record is not None and math.isnan(state.record["loss"]) and state.baseline.update == math.inf
    assert (len(state.retired), len(state.rates), len(state.sources), len(state.carried)) == (1, 2, 1, 1)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts], ids=lambda text: text[:40]
)
def test_what_another_wrote_is_refused_in_a_line_that_names_the_file(name: str, text: str, tmp_path: Path) -> None:
    (of_another(tmp_path) / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} cannot be read: ") as caught:
        CheckpointState.read(tmp_path, num_prompts=8)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 400


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BEYOND.items() for text in texts])
def test_a_prompt_that_the_data_does_not_have_is_refused(name: str, text: str, tmp_path: Path) -> None:
    """It ended the rank that looked it up, or another prompt was trained on without a word."""
    (of_another(tmp_path) / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} (cannot be read|names prompt -?[0-9]+, and the data has 8)"):
        CheckpointState.read(tmp_path, num_prompts=8)


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


def test_groups_are_read_one_at_a_time(tmp_path: Path) -> None:
    """With choices of experts a file has gigabytes, and its text would be there beside the groups, twice."""
    groups = make_groups(40, samples=4, length=20_000)
    largest = max(len(group.to_json()) for group in groups)
    CheckpointState(CURSOR, groups, None).write(tmp_path)
    CheckpointState(CURSOR, groups, None).write_groups(tmp_path, 0)
    tracemalloc.start()
    try:
        state = CheckpointState.read(tmp_path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(state.groups) == len(groups) and peak - held < 6 * largest


HALF = from_dict({"model": {"dtype": "bfloat16"}})
FIRST, BAD = Gap(0.1, 0.01, 0.01, 0.003, 0.125), Gap(0.3, 0.04, 0.04, 0.02)
UPDATES = {"good": 0.004, "bad": 0.03}  # mean gaps


class Run:
    """What an attempt judges gaps with, in the loop's order, from where a checkpoint left it."""

    def __init__(self, state: CheckpointState | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.progress = Progress() if state is None else Progress(state.cursor, baseline=state.baseline)
        self.firsts: list[Gap | None] = []
        self._gap = FIRST
        policy: Any = SimpleNamespace(config=HALF, ranks=SimpleNamespace(device=None))
        worker: Any = SimpleNamespace(engine=None)
        clock: Any = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), monitor=None)
        weight_sync: Any = SimpleNamespace(policy=policy, run=self._run)
        self._weights = EngineWeights(weight_sync, worker, clock, self.progress.baseline)
        self._watch = RolloutGapMonitor(HALF, self.progress.baseline)
        monkeypatch.setattr(sync, "any_rank", lambda value, device: value)

    def _run(self, engine: Any, first: Gap | None) -> tuple[Synced, None]:
        self.firsts.append(first)
        return Synced("", self._gap), None

    def sync(self, gap: Gap) -> str | None:
        """Sync new weights, and return what is wrong with their gap."""
        self._gap = gap
        self._weights.mark_updated()
        self._weights.sync()
        return excess(gap, gap_limits(HALF), self.firsts[-1])

    def update(self, mean: float) -> None:
        """Judge an update whose prompts were all in the prefix cache."""
        self._watch.judge(
            {"logprob_gap": (1000.0 * mean, 1000.0), "logprob_gap/cached_256": (1000.0 * mean, 1000.0)}, 0
        )


def test_a_resumed_run_judges_gaps_as_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(run: Run) -> tuple[str | None, str]:
        wrong = run.sync(BAD)
        with pytest.raises(GapMismatch) as mismatch:
            run.update(UPDATES["bad"])
        return wrong, str(mismatch.value)

    run = Run(None, monkeypatch)
    assert run.sync(FIRST) is None
    run.update(UPDATES["good"])
    run.progress.checkpoint_state({}).write(tmp_path)
    whole = judged(run)
    assert "3.00e-03 at the first sync" in str(whole[0]) and "stale prefix cache" in whole[1]
    resumed = Run(CheckpointState.read(tmp_path), monkeypatch)
    assert resumed.progress.baseline == Baseline(FIRST, UPDATES["good"]) == run.progress.baseline
    assert judged(resumed) == whole


def test_a_checkpoint_of_a_version_that_saved_no_gaps_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first sync and update count, as they did."""
    CheckpointState(CURSOR, [], None).write(tmp_path)
    (tmp_path / "baseline.json").unlink()
    resumed = Run(CheckpointState.read(tmp_path), monkeypatch)
    assert resumed.sync(BAD) is None and resumed.progress.baseline.probe == BAD
    (tmp_path / "baseline.json").write_text('{"probe": {"highest": 1}}')
    with pytest.raises(ValueError, match=r"baseline.json cannot be read: TypeError"):
        CheckpointState.read(tmp_path)
