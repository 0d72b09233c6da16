"""Readers of metrics.jsonl in every state that attempts leave it in. Takes seconds.

It would catch a record that a tracker gets twice or never, or in another order, after a kill between two lines, within
a line, or between a line and its arrival.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.runs.directory import RunDir
from gspo_hpc.trackers.protocol import Record, Sent
from gspo_hpc.trackers.reader import MetricsReader

# What happens to a run: a step is logged, a kill leaves a part of a line, the run is resumed from an earlier step, the
# reader looks, or the process of the reader is replaced.
EVENTS = st.lists(st.sampled_from(["step", "step", "torn", "resume", "read", "kill"]), max_size=40)


class Store:
    """A tracker whose place is a list; `partial` tells that it keeps numbers one by one."""

    def __init__(self, partial: bool) -> None:
        self.points: list[tuple[int, str, float]] = []
        self.samples: list[tuple[int, str]] = []
        self.partial = partial

    @property
    def sent(self) -> Sent:
        last = max((step for step, _, _ in self.points), default=-1)
        keys = frozenset(key for step, key, _ in self.points if step == last)
        return Sent(last, keys if self.partial else None)

    def log(self, record: Record, most: int | None = None) -> None:
        """Take a record, or the first of its numbers only, as where a kill comes within it."""
        values = list(record.curves.items())
        self.points += [(record.step, key, value) for key, value in values[: most if self.partial else None]]
        self.samples += [(record.step, row["prompt"]) for row in record.samples]


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, partial=st.booleans())
def test_each_number_arrives_once_and_in_order(events: list[str], partial: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, store = RunDir(folder), Store(partial)
        reader = MetricsReader(run, store.sent)
        step = reached = -1
        for event in events:
            match event:
                case "step":
                    step, reached = step + 1, max(reached, step + 1)
                    run.append_samples([{"step": step - 1, "phase": "train", "prompt": f"p{step}"}])
                    run.append_metrics({"step": step, "a": step / 2, "b": step / 3, "note": "text", "c": None})
                case "torn":
                    for path in (run.metrics, run.samples):
                        with path.open("a") as file:
                            file.write('{"step": 99, "a')
                case "resume":
                    step = max(-1, step - 2)
                    run.truncate_metrics(step)
                case "read":
                    for record in reader.read():
                        store.log(record)
                case "kill":
                    for number, record in enumerate(reader.read()):
                        if number:  # the second is cut off by the kill, and those behind it are lost
                            store.log(record, most=1)
                            break
                        store.log(record)
                    reader = MetricsReader(run, store.sent)
        for again in range(step + 1, reached + 1):  # the run comes as far as it was
            run.append_metrics({"step": again, "a": again / 2, "b": again / 3})
        while found := reader.read():
            for record in found:
                store.log(record)
        last = reached
        assert store.points == [(n, key, n / by) for n in range(last + 1) for key, by in (("a", 2), ("b", 3))]
        if not partial:
            assert store.samples == [(n, f"p{n}") for n in range(last + 1)]


def test_numbers_keep_their_kind_and_old_records_their_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "time": 7.5, "skipped": true, "n": 3}\n[]\n')
    first, second = MetricsReader(run, Sent()).read()
    assert first.curves == {"eval/accuracy": 0.5} and first.time > 1e9  # written before records of step 0 had one
    assert second.time == 7.5 and json.dumps(second.curves) == '{"skipped": 1, "n": 3}'


def test_a_reader_takes_pieces_of_a_long_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text("".join(f'{{"step": {step}, "x": 1.0}}\n' for step in range(1000)))
    reader = MetricsReader(run, Sent(9))
    pieces = [[record.step for record in piece] for piece in iter(reader.read, [])]
    assert sum(pieces, []) == list(range(10, 1000)) and max(map(len, pieces)) < 500
