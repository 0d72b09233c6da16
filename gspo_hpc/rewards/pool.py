"""Graders at work: a pool of processes that grades completions while generation goes on.

Floor 2; the only file that imports pebble. One call is one grader on one completion, with its own time limit. Whatever
a grader does (raise, hang, exit, crash, return nonsense) becomes the failure text of that completion; its process is
replaced. Results come once for each submitted key, in the order in which they finish.

Every worker is a pebble pool of one process with one call at a time. In a pool that several calls share, pebble may
take the death of a process for that of the call it answered just before, and drop that answer: a sample would pay for
its neighbour. Workers are spawned, not forked: the trainer has threads. They see no torch unless a grader imports it.
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
from collections import Counter, deque
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
RETRIES = 3  # of a call whose process was ended: by a signal from outside, perhaps, as when Slurm ends a step
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


@dataclass(frozen=True, eq=False)
class _Call:
    key: Hashable
    term: int
    tries: int = 0


@dataclass(eq=False)
class _Lane:
    """One process, and the call it has."""

    pool: ProcessPool
    call: _Call | None = None
    since: float = 0.0  # when it got the call
    broken: bool = False


class RewardPool:
    """Graders in processes of their own. A context manager: leaving it ends all of them, within seconds.

    `failures` counts failed calls by grader, `restarts` how often a worker was set up anew without a verdict on its
    call. For one thread.
    """

    def __init__(self, reward: Reward) -> None:
        """Start the processes and load the graders. Raises ValueError if a grader cannot be loaded."""
        check(reward)
        self._reward = reward
        self._names = part_names(reward)
        self._open: dict[Hashable, _Open] = {}
        self._live: set[_Call] = set()  # calls whose outcome is still wanted
        self._waiting: deque[tuple[_Call, tuple[Any, ...]]] = deque()  # calls no worker has yet, with their arguments
        self._outcomes: queue.SimpleQueue[tuple[_Call, Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of `_waiting` and the lanes: pebble's threads hand out the next call
        self._closed = False
        self.failures: Counter[str] = Counter()
        self.restarts = 0
        self._lanes = [self._new_lane() for _ in range(reward.workers)]
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
        for term in range(len(self._names)):
            self._queue(_Call(key, term))
        self._hand_out()

    def poll(self, timeout: float | None = 0.0) -> list[tuple[Any, RewardResult]]:
        """Keys and results that are there, each once. Waits up to `timeout` seconds (None: as long as it takes) for
        the first; an empty list means none came in that time, or none is pending."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        done: list[tuple[Any, RewardResult]] = []
        while self._open:
            try:
                call, future = self._outcomes.get_nowait()
            except queue.Empty:
                done += self._mend()
                wait = min(1.0, deadline - time.monotonic())
                if done or wait <= 0:
                    break
                try:
                    call, future = self._outcomes.get(timeout=wait)
                except queue.Empty:
                    continue
            if call in self._live:  # else it was made again meanwhile
                finished = self._take(call, future)
                if finished is not None:
                    done.append((call.key, finished))
        return done

    def close(self) -> None:
        """End all processes, with whatever they are doing. Results that were not polled are lost."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self._open.clear()
        self._live.clear()
        _give_up([lane.pool for lane in self._lanes])

    def _take(self, call: _Call, future: Future[Any]) -> RewardResult | None:
        """Note the outcome of one call; the result of its completion if that was the last."""
        error = future.exception()
        if isinstance(error, ProcessExpired) and (error.exitcode or 0) < 0 and error.exitcode != -signal.SIGALRM:
            # Whoever ends a job sends its signals to every process of it, and this trainer may outlive its graders for
            # long enough to note a failure that never was. What a grader does to itself it does again.
            return self._again(call, self._cause(error))
        self._live.discard(call)
        value, failure = future.result() if error is None else (None, self._cause(error))
        return self._note(call, value, failure)

    def _again(self, call: _Call, cause: str = "ended its process without an answer") -> RewardResult | None:
        """Make a call anew that came to no end; after the last try it has failed."""
        self._live.discard(call)
        if call.tries == RETRIES:
            return self._note(call, None, f"{cause}, {RETRIES + 1} times")
        self._queue(_Call(call.key, call.term, call.tries + 1))
        self._hand_out()
        return None

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

    def _queue(self, call: _Call) -> None:
        self._live.add(call)
        self._waiting.append((call, (call.term, self._reward.timeout, *self._open[call.key].texts)))

    def _hand_out(self) -> None:
        for lane in self._lanes:
            self._advance(lane)

    def _advance(self, lane: _Lane) -> None:
        """Give a free worker the next call."""
        with self._lock:
            if lane.call is not None or lane.broken or self._closed or not self._waiting:
                return
            call, args = self._waiting.popleft()
            lane.call, lane.since = call, time.monotonic()
        try:
            future = lane.pool.schedule(_grade, args=args, timeout=self._reward.timeout)
        except RuntimeError:  # its process died while it had nothing to do
            lane.broken = True
            return
        future.add_done_callback(functools.partial(self._on_done, lane, call))

    def _on_done(self, lane: _Lane, call: _Call, future: Future[Any]) -> None:
        """In a thread of pebble's: keep the outcome, and the worker busy."""
        if isinstance(future.exception(), BrokenProcessPool):
            lane.broken = True  # mended by poll
            return
        with self._lock:
            if lane.call is call:
                lane.call = None
        self._outcomes.put((call, future))
        self._advance(lane)

    def _mend(self) -> list[tuple[Hashable, RewardResult]]:
        """Replace workers that are broken, or give no sign of life though their call's time is long over; make their
        calls again. Returns what thereby failed for the last time."""
        failed = []
        for place, lane in enumerate(self._lanes):
            overdue = time.monotonic() - lane.since > self._reward.timeout + LOAD_SECONDS
            with self._lock:
                call = lane.call
                if not lane.broken and (call is None or (lane.pool.active and not overdue)):
                    continue
                lane.call, lane.broken = None, True
            self.restarts += 1
            _give_up([lane.pool])
            self._lanes[place] = self._new_lane()
            if call in self._live:
                assert call is not None
                result = self._again(call)
                failed += [] if result is None else [(call.key, result)]
        if failed or self._waiting:
            self._hand_out()
        return failed

    def _new_lane(self) -> _Lane:
        return _Lane(
            ProcessPool(
                max_workers=1,
                initializer=_start_worker,
                initargs=(self._reward.functions,),
                context=multiprocessing.get_context("spawn"),
            )
        )

    def _await_load(self) -> None:
        """Wait until every process has loaded all graders."""
        try:
            futures = [lane.pool.schedule(_load_errors) for lane in self._lanes]
            errors = [future.result(timeout=LOAD_SECONDS) for future in futures][0]
        except TimeoutError:
            raise ValueError(f"reward.functions: the graders were not loaded within {LOAD_SECONDS:g} s") from None
        except (BrokenProcessPool, ProcessExpired) as error:
            raise ValueError(f"reward.functions: a grader's file ended its process on loading: {error}") from None
        failed = [f"{name}: {error}" for name, error in zip(self._names, errors, strict=True) if error is not None]
        if failed:
            raise ValueError("reward.functions: " + "\n  ".join(failed))


def _give_up(pools: list[ProcessPool]) -> None:
    """End pools' processes. Not waited for without end: a broken pool may keep its own threads waiting."""

    def end(pool: ProcessPool) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            pool.join()

    threads = [threading.Thread(target=end, args=(pool,), name="end-grader", daemon=True) for pool in pools]
    for pool, thread in zip(pools, threads, strict=True):
        pool.stop()
        thread.start()
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


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
        except BaseException as error:  # a user's file may raise anything, SystemExit too
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
    except BaseException as error:  # SystemExit too: a grader that exits costs its sample
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
    except Exception:  # an error whose text raises
        message = ""
    line = " ".join(message[: 2 * TEXT].encode("utf-8", "backslashreplace").decode().split())[:TEXT]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
