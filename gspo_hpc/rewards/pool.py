"""Graders at work: a pool of processes that grades completions while generation goes on.

Floor 2; the only file that imports pebble. One call is one grader on one completion, with its own time limit. Whatever
a grader does (raise, hang, exit, crash, return nonsense) becomes the failure text of that completion; its process is
replaced. Results come once for each submitted key, in the order in which they finish.

Workers are spawned, not forked: the trainer has threads. They never see torch unless a grader imports it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import multiprocessing
import numbers
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from gspo_hpc.config import Reward, RewardFunction
from gspo_hpc.rewards import check, load, part_names
from gspo_hpc.rewards.functions import Grader

LOAD_SECONDS = 60.0  # a new process, and the imports of a grader's file
CLOSE_SECONDS = 10.0
ORPHAN_SECONDS = 2.0  # after its time limit, a grader whose pool did not end it is ended by the kernel
RETRIES = 3  # of a call whose process was ended from outside, and of the pool without any call finishing
LARGEST = 1e30  # rewards beyond are a mistake; within, no mean or variance overflows
TEXT = 300  # characters kept of what a grader says


@dataclass(frozen=True)
class RewardResult:
    """What the graders say of one completion: `value` is the weighted sum, 0 if any of them failed."""

    value: float
    parts: dict[str, float]  # by grader (see part_names), unweighted; without those that failed
    failure: str | None  # which graders failed, and why


@dataclass
class _Open:
    """A completion that is being graded."""

    texts: tuple[str, int, str, Mapping[str, Any]]  # completion, response length, prompt, fields
    values: dict[int, float] = field(default_factory=dict)  # by term
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Call:
    key: Hashable
    term: int
    tries: int = 0


class RewardPool:
    """Graders in processes of their own. A context manager: leaving it ends all of them, within seconds.

    `failures` counts failed calls by grader, `restarts` how often the whole pool was set up anew. For one thread.
    """

    def __init__(self, reward: Reward) -> None:
        """Start the processes and load the graders. Raises ValueError if a grader cannot be loaded."""
        check(reward)
        self._reward = reward
        self._names = part_names(reward)
        self._open: dict[Hashable, _Open] = {}
        self._calls: dict[int, _Call] = {}  # calls that have no outcome yet, by number, oldest first
        self._outcomes: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        self._next_call = 0
        self._closed = False
        self._broken = False
        self._last_sign = time.monotonic()  # of life: a finished call, or a new pool
        self._fruitless = 0  # pools in a row in which no call finished
        self.failures: Counter[str] = Counter()
        self.restarts = 0
        self._pool = self._new_pool()
        try:
            self._await_load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """Completions submitted whose result was not polled yet."""
        return len(self._open)

    def submit(
        self, key: Hashable, completion: str, response_length: int, prompt: str, fields: Mapping[str, Any]
    ) -> None:
        """Have one completion graded; `key` names it in :meth:`poll` and must not be pending."""
        assert not self._closed, "the pool is closed"
        assert key not in self._open, f"{key!r} is being graded already"
        self._open[key] = _Open((completion, response_length, prompt, fields))
        if len(self._open) == 1:
            self._last_sign = time.monotonic()
        for term in range(len(self._names)):
            self._schedule(_Call(key, term))

    def poll(self, timeout: float | None = 0.0) -> list[tuple[Any, RewardResult]]:
        """Keys and results that are there, each once. Waits up to `timeout` seconds (None: as long as it takes) for
        the first; an empty list means none came in that time, or none is pending."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        done: list[tuple[Any, RewardResult]] = []
        while self._open:
            try:
                number, future = self._outcomes.get_nowait()
            except queue.Empty:
                done += self._keep_alive()
                wait = min(1.0, deadline - time.monotonic())
                if done or wait <= 0:
                    break
                try:
                    number, future = self._outcomes.get(timeout=wait)
                except queue.Empty:
                    continue
            call = self._calls.get(number)
            if call is None:  # of a pool that was given up; the call was made again
                continue
            finished = self._take(number, call, future)
            if finished is not None:
                done.append((call.key, finished))
        return done

    def close(self) -> None:
        """End all processes, with whatever they are doing. Results that were not polled are lost."""
        self._closed = True
        self._open.clear()
        self._calls.clear()
        _give_up(self._pool)

    def _take(self, number: int, call: _Call, future: Future[Any]) -> RewardResult | None:
        """Note the outcome of one call; the result of its completion if that was the last."""
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            self._broken = True
            return None
        del self._calls[number]
        from_outside = isinstance(error, ProcessExpired) and error.exitcode == -signal.SIGTERM
        if from_outside and call.tries < RETRIES:  # we end processes only after their calls: nothing a grader did
            self._schedule(_Call(call.key, call.term, call.tries + 1))
            return None
        self._last_sign, self._fruitless = time.monotonic(), 0
        value, failure = future.result() if error is None else (None, self._cause(error))
        return self._note(call, value, failure)

    def _note(self, call: _Call, value: float | None, failure: str | None) -> RewardResult | None:
        entry, name = self._open[call.key], self._names[call.term]
        if failure is None:
            assert value is not None
            entry.values[call.term] = value
        else:
            entry.failures[call.term] = f"{name}: {failure}"
            self.failures[name] += 1
        if len(entry.values) + len(entry.failures) < len(self._names):
            return None
        del self._open[call.key]
        parts = {name: entry.values[term] for term, name in enumerate(self._names) if term in entry.values}
        failure = "; ".join(entry.failures[term] for term in sorted(entry.failures)) or None
        total = 0.0
        if failure is None:  # summed in the order of the config, whatever came first
            weights = [term.weight for term in self._reward.functions]
            total = math.fsum(weight * entry.values[term] for term, weight in enumerate(weights))
            if not abs(total) <= LARGEST:
                total, failure = 0.0, f"the weighted sum {total} is beyond {LARGEST:g}"
        return RewardResult(total, parts, failure)

    def _cause(self, error: BaseException) -> str:
        overtime = f"gave no answer within {self._reward.timeout:g} s (reward.timeout)"
        if isinstance(error, TimeoutError):
            return overtime
        if isinstance(error, ProcessExpired):
            code = error.exitcode or 0
            if code == -signal.SIGALRM:
                return overtime
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return f"ended its process ({ended})" + (": out of memory?" if code == -signal.SIGKILL else "")
        return _text(error)

    def _schedule(self, call: _Call) -> None:
        number = self._next_call
        self._next_call += 1
        self._calls[number] = call
        limit = self._reward.timeout
        args = (call.term, limit, *self._open[call.key].texts)
        try:
            future = self._pool.schedule(_grade, args=args, timeout=limit)
        except RuntimeError:  # the pool fell over; poll sets up another, with all calls
            self._broken = True
            return
        future.add_done_callback(functools.partial(self._on_done, number))

    def _on_done(self, number: int, future: Future[Any]) -> None:
        self._outcomes.put((number, future))  # pebble calls this from a thread of its own

    def _keep_alive(self) -> list[tuple[Hashable, RewardResult]]:
        """Set up another pool, with all calls that have no outcome, if this one is broken or gives no sign of life.

        A pool breaks when a process dies at a moment that leaves pebble in doubt about what it was doing. Calls that
        break one pool after another fail; what that finishes is returned.
        """
        stalled = time.monotonic() - self._last_sign > self._reward.timeout + LOAD_SECONDS
        if not self._broken and not stalled:
            return []
        _give_up(self._pool)
        self.restarts += 1
        self._fruitless += 1
        self._broken = False
        self._last_sign = time.monotonic()
        calls = list(self._calls.values())
        self._calls.clear()
        self._pool = self._new_pool()
        # Calls start in order: if no pool finishes any, one of the first is the reason.
        doomed = self._reward.workers if self._fruitless > RETRIES else 0
        failed = [(call.key, self._note(call, None, "its process could not be kept alive")) for call in calls[:doomed]]
        for call in calls[doomed:]:
            self._schedule(call)
        return [(key, result) for key, result in failed if result is not None]

    def _new_pool(self) -> ProcessPool:
        reward = self._reward
        return ProcessPool(
            max_workers=reward.workers,
            initializer=_start_worker,
            initargs=(reward.functions,),
            context=multiprocessing.get_context("spawn"),
        )

    def _await_load(self) -> None:
        """Wait until a process has loaded all graders."""
        try:
            errors = self._pool.schedule(_load_errors).result(timeout=LOAD_SECONDS)
        except TimeoutError:
            raise ValueError(f"reward.functions: the graders were not loaded within {LOAD_SECONDS:g} s") from None
        except (BrokenProcessPool, ProcessExpired) as error:
            raise ValueError(f"reward.functions: a grader's file ended its process on loading: {error}") from None
        failed = [f"{name}: {error}" for name, error in zip(self._names, errors, strict=True) if error is not None]
        if failed:
            raise ValueError("reward.functions: " + "\n  ".join(failed))


def _give_up(pool: ProcessPool) -> None:
    """End a pool's processes. Not waited for without end: a broken pool may keep its own threads waiting."""

    def end() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            pool.join()

    pool.stop()
    thread = threading.Thread(target=end, name="end-graders", daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)


# What follows runs in the grader processes.

_graders: list[tuple[Grader, bool, dict[str, Any]] | None] = []  # by term: function, whether told the length, arguments
_errors: list[str | None] = []  # by term, of loading


def _start_worker(functions: tuple[RewardFunction, ...]) -> None:
    """Load the graders. Never raises: pebble would take that for a broken pool."""
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's warnings are for the trainer
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a grader that sits in C code, as a bad regex does
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # a grader's prints have no place in the console and the logs of a run
        os.dup2(nothing, standard)
    os.environ["OMP_NUM_THREADS"] = "1"  # the cores belong to training and generation
    for term in functions:
        try:
            grader = load(term.function)
            told = "response_length" in inspect.signature(grader).parameters
            _graders.append((grader, told, term.args))
            _errors.append(None)
        except BaseException as error:  # noqa: BLE001 (a user's file may raise anything, SystemExit too)
            _graders.append(None)
            _errors.append(f"cannot be loaded: {_text(error)}")


def _load_errors() -> list[str | None]:
    return _errors


def _grade(
    term: int, limit: float, completion: str, response_length: int, prompt: str, fields: dict[str, Any]
) -> tuple[float | None, str | None]:
    """A grader's value, or why there is none."""
    loaded = _graders[term]
    if loaded is None:
        return None, _errors[term]
    grader, told, args = loaded
    extra = {"response_length": response_length} if told else {}
    # The pool ends what takes too long; if the trainer is gone, nobody else would.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit + ORPHAN_SECONDS)
    try:
        return _number(grader(completion, prompt=prompt, fields=fields, **extra, **args))
    except BaseException as error:  # noqa: BLE001 (SystemExit too: a grader that exits costs its sample)
        return None, f"raised {_text(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _number(value: Any) -> tuple[float | None, str | None]:
    if getattr(value, "shape", None) == ():  # a numpy scalar, or a tensor of no dimensions
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None, f"returned {type(value).__name__}, not a number"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        return None, f"returned {number}: a finite number up to {LARGEST:g} is needed"
    return number, None


def _text(error: BaseException) -> str:
    """Type and message of an error on one line, of bounded length, printable anywhere."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 (an error whose text raises)
        message = ""
    line = " ".join(message[: 2 * TEXT].encode("utf-8", "backslashreplace").decode().split())[:TEXT]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
