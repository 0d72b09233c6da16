"""Observers that write files of a run: metrics, samples, evaluations, experts, tables of profiles, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.data.prompts import own_fields
from gspo_hpc.data.records import Group
from gspo_hpc.data.retired import Retirement
from gspo_hpc.evaluation import stored
from gspo_hpc.exchange.exchange import RolloutView
from gspo_hpc.runs import commit, journal, learning
from gspo_hpc.runs.directory import RunDir, write_atomically
from gspo_hpc.system.files import Entry
from gspo_hpc.training.checkpoint_state import CheckpointState, read_carried, read_cursor
from gspo_hpc.training.observers.base import StepObserver


def sample_rows(step: int, phase: str, groups: Sequence[Group], count: int) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl: the first completion of each of the first `count` groups."""
    return [
        {
            "step": step,
            "phase": phase,
            "prompt": group.prompt.text,
            "completion": group.completions[0].text,
            "reward": group.completions[0].reward,
            "reward_parts": group.completions[0].reward_parts,
            "outcomes": group.completions[0].outcomes,
            "failure": group.completions[0].failure,
            "answer": own_fields(group.prompt),
        }
        for group in groups[:count]
    ]


class MetricsFile(StepObserver):
    """The writer of metrics.jsonl, which is the truth: it comes before all other observers of steps."""

    def __init__(self, run: RunDir, last_step: int) -> None:
        self._run, self._last_step = run, last_step

    def step(self, record: dict[str, Any]) -> None:
        """Append the record; that of the last step gets what the run learnt, for all observers that come after."""
        record |= self._learnt(record)
        self._run.append_metrics(record)

    def _learnt(self, record: dict[str, Any]) -> dict[str, float]:
        if record["step"] != self._last_step:
            return {}
        found = learning.judge([*self._run.read_metrics(), record])
        return {} if found is None else {"learnt": found.share}


class SamplesFile(StepObserver):
    """The writer of samples.jsonl."""

    def __init__(self, run: RunDir, count: int) -> None:
        self._run, self._count = run, count

    def samples(self, step: int, phase: str, shown: RolloutView) -> None:
        """Append a few completions."""
        self._run.append_samples(sample_rows(step, phase, shown.groups, self._count))


class EvaluationFiles(StepObserver):
    """The writer of evaluations/NNNNNN.jsonl; where a step is evaluated again after a kill, its file is replaced."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the file of the step."""
        stored.write_into(self._run, step, rows)


class RetiredFile(StepObserver):
    """The writer of retired.jsonl."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def retired(self, step: int, epoch: int, prompts: Sequence[tuple[Retirement, int]]) -> None:
        """Append a line for every prompt."""
        self._run.append_retired(
            {"step": step, "rollout": one.rollout, "epoch": epoch, "row": row, "pass_rate": one.pass_rate}
            for one, row in prompts
        )


class ExpertsFile(StepObserver):
    """The writer of experts.json, which holds the latest update only: a mixture has thousands of experts."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def experts(self, step: int, tokens: Mapping[int, Sequence[int]]) -> None:
        """Replace the file."""
        content = {"step": step, "layers": {str(layer): list(row) for layer, row in tokens.items()}}
        write_atomically(self._run.experts, json.dumps(content, separators=(",", ":")) + "\n")


class ProfileTables(StepObserver):
    """The writer of the tables of profiled steps, beside their traces."""

    def profile(self, step: int, table: str, traces: Path) -> None:
        """Write the table."""
        write_atomically(traces / f"step-{step:06d}.txt", table + "\n")


def files_of_steps(run: RunDir, samples: int, last_step: int) -> list[StepObserver]:
    """Return the observers that write files about steps; that of metrics.jsonl, which is the truth, is the first."""
    files = [SamplesFile(run, samples), EvaluationFiles(run), RetiredFile(run), ExpertsFile(run), ProfileTables()]
    return [MetricsFile(run, last_step), *files]


class CheckpointCommit(StepObserver):
    """The commit of checkpoints, before which they do not count."""

    def __init__(self, run: RunDir, layout: Mapping[str, int], keep: int) -> None:
        self._run, self._layout, self._keep = run, layout, keep

    def checkpoint(self, staging: Path, known: Mapping[str, Entry], state: CheckpointState) -> None:
        """Add the run's state, commit, then drop checkpoints and journals that are no longer needed."""
        state.write(staging)
        commit.commit(staging, state.cursor.step, {"layout": self._layout}, known)
        commit.retain(self._run.checkpoints, self._keep)
        journal.retire(self._run.rollouts, self._oldest_needed(state))

    def _oldest_needed(self, state: CheckpointState) -> int:
        """Return the first rollout whose journals are needed: where they cannot be sampled again, by any checkpoint."""
        kept = commit.list_committed(self._run.checkpoints)
        try:
            carried = [one.place.rollout for path in kept for one in read_carried(path) if one.place is not None]
            if not state.ahead and not carried:
                return state.cursor.rollout
            return min([*carried, *(read_cursor(path).rollout for path in kept)], default=state.cursor.rollout)
        except ValueError:  # an older checkpoint is damaged; what it needs is not known
            return 0
