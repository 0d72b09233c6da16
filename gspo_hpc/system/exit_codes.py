"""Exit codes of the command line, of the batch step of a Slurm job and of a rank."""

from __future__ import annotations

DONE = 0
FAILED = 1
REFUSED = 2  # a mistake in what was asked for: nothing was started, or nothing that could be saved
INCOMPLETE = 3  # of plan: no rule is broken, but the config is not known to be one that a run can be started from
REQUEUE = 75  # stopped and saved: the same command goes on from there (EX_TEMPFAIL of sysexits.h)
RESTART = 76  # of a rank: stopped and saved because memory runs short; the launcher starts it again
INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
OUTPUT_CLOSED = 141  # as a shell reports a process that SIGPIPE ended: the reader of the output wanted no more
KILLED = 137  # as a shell reports a process that SIGKILL ended, as the kernel does when memory runs out
