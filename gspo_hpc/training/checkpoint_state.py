"""The part of a checkpoint beside the policy: position, rollout in use, the step's record, gaps to compare with."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gspo_hpc.algorithms.terms.adaptive import AdaptiveWeights
from gspo_hpc.data.carried import Carried
from gspo_hpc.data.prompts import NO_RATES, NONE_RETIRED, SourcePosition, source_positions
from gspo_hpc.data.records import Group
from gspo_hpc.data.retired import PassRates, Retired
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.runs import commit
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.system.files import Entry, write_atomically
from gspo_hpc.system.text import MALFORMED, parse_json, shortened
from gspo_hpc.training.agreement.gap import Baseline

CURSOR, ROLLOUT, RECORD = "cursor.json", "rollout.jsonl", "record.json"  # files of a checkpoint
BASELINE, AHEAD, WEIGHTS, TEACHER = "baseline.json", "ahead.json", "adaptive_weights.json", "teacher.json"
RETIRED, PASS_RATES, SOURCES, CARRIED = "retired.json", "pass_rates.json", "sources.json", "carried.json"

T = TypeVar("T")


class SampledBy(NamedTuple):
    """The weights that have sampled a rollout, or sample it."""

    fingerprint: str
    version: int  # the number of steps that had made them


@dataclass(frozen=True)
class CheckpointState:
    """The state that a resumed attempt needs besides weights, optimizer and schedule."""

    cursor: Cursor
    groups: Sequence[Group]  # of the rollout that is not used up: those that this rank holds
    record: dict[str, Any] | None  # of the checkpoint's step, which is not logged yet when it is saved
    baseline: Baseline = field(default_factory=Baseline)  # empty in checkpoints of versions that did not save it
    # The weights of the rollout in use and of later ones that are sampled, by their number; their groups are in the
    # journals. Empty where engines are not ahead of training.
    ahead: Mapping[int, SampledBy] = field(default_factory=dict)
    weights: AdaptiveWeights | None = None  # of the objective; None where they are fixed
    teacher: str | None = None  # the fingerprint of the teacher's weights, which are not saved
    retired: Retired = NONE_RETIRED  # prompts that the next rollout leaves out
    rates: PassRates = NO_RATES  # by which the next rollout's prompts are drawn, where there is a curriculum
    sources: tuple[SourcePosition, ...] = ()  # where the next rollout's prompts begin, of each of several sources
    carried: tuple[Carried, ...] = ()  # groups that the next rollout goes on with

    def write(self, staging: Path) -> None:
        """Write what all ranks have alike into a checkpoint that is not committed yet."""
        write_atomically(staging / CURSOR, json.dumps(self.cursor.to_dict(), indent=1))
        write_atomically(staging / RECORD, json.dumps(self.record))
        write_atomically(staging / BASELINE, json.dumps(self.baseline.to_dict(), indent=1))
        if self.ahead:
            write_atomically(staging / AHEAD, json.dumps(self.ahead))
        if self.weights is not None:
            write_atomically(staging / WEIGHTS, json.dumps(self.weights.to_dict()))
        if self.teacher is not None:
            write_atomically(staging / TEACHER, json.dumps({"fingerprint": self.teacher}))
        if self.retired:
            write_atomically(staging / RETIRED, json.dumps(self.retired.to_dict()))
        if self.rates:
            write_atomically(staging / PASS_RATES, json.dumps(self.rates.to_dict()))
        if self.sources:
            write_atomically(staging / SOURCES, json.dumps(self.sources))
        if self.carried:
            write_atomically(staging / CARRIED, json.dumps(self.carried))

    def write_groups(self, staging: Path, rank: int) -> dict[str, Entry]:
        """Write this rank's groups into a file of its own; return its size and hash. Ranks without groups write none.

        Rank 0 writes one in any case. One group at a time is held as text.
        """
        if rank and not self.groups:
            return {}
        path = staging / ROLLOUT
        path = path.with_stem(f"{path.stem}-{rank:05d}") if rank else path
        digest, size = hashlib.sha256(), 0

        def lines() -> Iterator[bytes]:
            nonlocal size
            for group in self.groups:
                line = f"{group.to_json()}\n".encode()
                digest.update(line)
                size += len(line)
                yield line

        write_atomically(path, lines())
        return {path.name: {"size": size, "sha256": digest.hexdigest()}}

    @classmethod
    def read(
        cls, checkpoint: Path, exchange: Exchange | None = None, num_prompts: int | None = None
    ) -> CheckpointState:
        """Return the state of a committed checkpoint, with this rank's share of the groups, whoever wrote them.

        Raises ValueError, with the file's name, for other content, and where it names a prompt beyond the `num_prompts`
        of the data. Collective.
        """
        cursor = read_cursor(checkpoint)
        record = _parsed(checkpoint / RECORD, _record, finite=False)  # a metric may be NaN
        path = checkpoint / BASELINE
        baseline = (
            _parsed(path, Baseline.from_dict, finite=False) if path.exists() else Baseline()
        )  # gaps may be infinite
        path = checkpoint / AHEAD
        ahead = _parsed(path, _sampled_by) if path.exists() else {}
        path = checkpoint / WEIGHTS
        found = _parsed(path, AdaptiveWeights.from_dict) if path.exists() else None
        path = checkpoint / TEACHER
        teacher = _parsed(path, lambda raw: str(raw["fingerprint"])) if path.exists() else None
        path = checkpoint / RETIRED
        retired = _parsed(path, Retired.from_dict) if path.exists() else NONE_RETIRED
        path = checkpoint / PASS_RATES
        rates = _parsed(path, PassRates.from_dict) if path.exists() else NO_RATES
        path = checkpoint / SOURCES
        sources = _parsed(path, source_positions) if path.exists() else ()
        carried = read_carried(checkpoint)
        if num_prompts is not None:
            _refuse_beyond(checkpoint / RETIRED, (one.prompt for one in retired.prompts), num_prompts)
            _refuse_beyond(checkpoint / PASS_RATES, rates.rates, num_prompts)
            _refuse_beyond(checkpoint / CARRIED, (one.prompt for one in carried), num_prompts)
        groups, _ = (exchange or Exchange()).partition_files(
            lambda: sorted(path.name for path in checkpoint.glob(f"{Path(ROLLOUT).stem}*.jsonl")),
            lambda name: _groups(checkpoint / name),
        )
        return cls(
            cursor, list(groups.values()), record, baseline, ahead, found, teacher, retired, rates, sources, carried
        )


def read_cursor(checkpoint: Path) -> Cursor:
    """Return the position that a committed checkpoint holds; ValueError, with the file's name, for other content."""
    return _parsed(checkpoint / CURSOR, Cursor.from_dict)


def read_carried(checkpoint: Path) -> tuple[Carried, ...]:
    """Return the groups that the next rollout goes on with; ValueError, with the file's name, for other content."""
    path = checkpoint / CARRIED
    return _parsed(path, lambda raw: tuple(map(Carried.from_list, raw))) if path.exists() else ()


def read_layout(checkpoint: Path) -> dict[str, int]:
    """Return how the ranks that wrote a committed checkpoint shared the model; ValueError where it does not say so."""
    layout = commit.read_extra(checkpoint).get("layout")
    if not isinstance(layout, dict) or not layout or not all(type(size) is int for size in layout.values()):
        raise ValueError(
            f"{checkpoint / commit.MANIFEST} does not say with which layout it was written (extra.layout is "
            f"{shortened(json.dumps(layout), 80)}); move {checkpoint} away to resume from the checkpoint before it"
        )
    return layout


def _refuse_beyond(path: Path, prompts: Iterable[int], count: int) -> None:
    """Raise ValueError for a prompt that is not in the data: a negative number would name another one."""
    if (beyond := next((one for one in prompts if not 0 <= one < count), None)) is not None:
        raise ValueError(
            f"{path} names prompt {beyond}, and the data has {count:,}, numbered from 0; move {path.parent} away to "
            "resume from the checkpoint before it"
        )


def _sampled_by(raw: Mapping[str, Any]) -> dict[int, SampledBy]:
    return {int(rollout): SampledBy(str(name), int(version)) for rollout, (name, version) in raw.items()}


def _groups(path: Path) -> dict[int, Group]:
    with _named(path), path.open(encoding="utf-8") as file:  # one line at a time: each has a whole group
        return {group.slot: group for group in map(Group.from_json, file)}


def _record(raw: Any) -> dict[str, Any] | None:
    if raw is not None and not (isinstance(raw, dict) and type(raw.get("step")) is int):
        raise ValueError("this is no record of a step")
    return raw


def _parsed(path: Path, parse: Callable[[Any], T], *, finite: bool = True) -> T:
    with _named(path):
        return parse(parse_json(path.read_text("utf-8"), finite=finite))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise ValueError, with the file's name, for content that cannot be read."""
    try:
        yield
    except MALFORMED as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
