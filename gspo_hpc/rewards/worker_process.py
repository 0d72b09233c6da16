"""Work of a process of the reward pool: it loads the graders once, then makes one call after the other."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.schema import Judges, Reward, Sandbox
from gspo_hpc.rewards import spawning
from gspo_hpc.rewards.calls import Loaded, Sampled, Verdict, error_text, loaded, raised
from gspo_hpc.rewards.registry import time_limit
from gspo_hpc.system.processes import end_children_with_this_process
from gspo_hpc.system.text import GIB

if TYPE_CHECKING:
    from gspo_hpc.runs.spending import Patience

    Account = tuple[Path, Judges, Patience]

OUT_OF_MEMORY = 112  # exit code of a process whose grader needed more memory than it may use
ORPHAN_SECONDS = 2.0  # after its time limit, the kernel ends a grader that its pool did not end

_graders: list[Loaded | None] = []  # by term
_errors: list[str | None] = []  # by term: why it could not be loaded


def limit_memory(gigabytes: float) -> None:
    """Let this process, and each that it starts, use no more memory than this, as far as it is not limited already.

    The limit is on memory that can be written to. Addresses that are only reserved do not count, nor files that are
    mapped, such as libraries.
    """
    limit = int(gigabytes * GIB)
    given = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if given != resource.RLIM_INFINITY:
        limit = min(limit, given)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def account_of(path: Path, judges: Judges, reward: Reward) -> Account:
    """Return what the processes of a pool that begins now need to note requests in the file `path`."""
    from gspo_hpc.runs.spending import Patience  # here: most graders ask nobody

    longest = max(time_limit(reward, term)[0] for term in range(len(reward.functions)))
    return path, judges, Patience.from_now(path.parent, longest)


def start(reward: Reward, processes: int, sandbox: Sandbox, account: Account | None) -> None:
    """Load the graders, as one of so many processes. Never raises, because pebble would take that for a broken pool.

    `account`: the file for the requests of graders that note them, the budget, and how long others are waited for.
    """
    end_children_with_this_process()
    spawning.begun()
    limit_memory(reward.memory_gb)
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's warnings are for the trainer
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a grader inside C code, such as a slow regular expression
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # a grader's prints must not reach the console and the logs of a run
        os.dup2(nothing, standard)
    os.environ["OMP_NUM_THREADS"] = "1"  # the cores belong to training and generation
    spending = None
    for place, term in enumerate(reward.functions):
        try:
            if account is not None and spending is None:
                from gspo_hpc.runs.spending import Spending  # here: most graders ask nobody

                spending = Spending(*account)
            seconds = time_limit(reward, place)[0]
            _graders.append(loaded(term, time_limit=seconds, processes=processes, sandbox=sandbox, spending=spending))
            _errors.append(None)
        except MemoryError:
            _graders.append(None)
            _errors.append(f"the function cannot be loaded: {out_of_memory(reward.memory_gb)}")
        except BaseException as error:  # a user's file may raise anything, SystemExit too
            _graders.append(None)
            _errors.append(f"the function cannot be loaded: {error_text(error)}")


def out_of_memory(memory_gb: float) -> str:
    """Return what is said of a grader that needs more memory than it may use."""
    return f"needed more memory than {memory_gb:g} GB (reward.memory_gb)"


def load_errors() -> list[str | None]:
    """Return by term why its function could not be loaded, None where it was."""
    return _errors


def grade(
    term: int, limit: float, group: Sequence[Sampled], index: int | None, prompt: str, fields: dict[str, Any]
) -> list[Verdict]:
    """Return a grader's verdict on one completion of a group, or on all where `index` is None.

    `limit` is in seconds.
    """
    function = _graders[term]
    count = len(group) if index is None else 1
    if function is None:
        return [Verdict(None, _errors[term], "failed")] * count
    # The pool ends a call that takes too long; where the trainer is gone, this timer does.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit + ORPHAN_SECONDS)
    began = time.monotonic()
    try:
        if index is None:
            verdicts = function.call_batched(group, prompt, fields)
        else:
            verdicts = [function.call(group, index, prompt, fields)]
    except MemoryError:  # calls before this one may have used it up, so the process ends
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # SystemExit too: a grader that exits costs its sample
        verdicts = [raised(error)] * count
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    seconds = time.monotonic() - began
    return [verdict._replace(seconds=seconds) for verdict in verdicts]
