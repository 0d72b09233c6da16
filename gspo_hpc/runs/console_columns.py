"""The columns of the console's table, which training writes and ``gspo-hpc logs --columns`` explains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column of the table. Lower `rank` survives longer on a narrow terminal."""

    title: str
    width: int
    rank: int
    meaning: str  # with the names of metrics.jsonl


COLUMNS = (
    Column("step", 6, 0, "the optimizer step, and the last one of the run"),  # wider where the steps need it
    Column("reward", 7, 1, "mean reward of the completions of this update (reward); ! where all groups had equal ones"),
    Column("teacher", 8, 1, "divergence from the teacher in nats a token, of runs that have one (reference_kl)"),
    Column("length", 7, 3, "mean tokens of a completion (response_length)"),
    Column("clip", 6, 4, "share of ratios that were clipped (clip_fraction); ! where that is half of them or more"),
    Column("gap", 8, 5, "largest difference of a token's log-prob between engine and trainer (logprob_gap_max)"),
    Column("grad", 8, 10, "norm of the gradient before it is clipped (grad_norm)"),
    Column("entropy", 8, 11, "mean entropy of the policy's tokens, in nats (entropy)"),
    Column("generate", 9, 6, "seconds of generation, with the wait for rewards (seconds/generate)"),
    Column("logprobs", 9, 9, "seconds of old and reference log-probs (seconds/old_logprobs, seconds/reference)"),
    Column("update", 7, 7, "seconds of forward, backward and optimizer (seconds/update)"),
    Column("sync", 5, 8, "seconds in which engines got the new weights (seconds/sync)"),
    Column("seconds", 8, 12, "seconds of the step; the first step of a rollout carries its generation (seconds)"),
    Column("tok/s", 7, 4, "sampled tokens a second, the rollout's time shared out over its updates"),
    Column("left", 7, 2, "time to the last step, from the median of the latest rollouts"),
)


def of_run(*, teacher: bool, rewards: bool) -> tuple[Column, ...]:
    """Return the columns of a run that has a teacher or not, and in which rewards decide or not."""
    absent = {name for name, there in (("teacher", teacher), ("reward", rewards)) if not there}
    return tuple(column for column in COLUMNS if column.title not in absent)
