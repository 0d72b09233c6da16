"""A pool of processes that runs reward functions ("graders") while generation goes on.

This is the only file that imports pebble. A call is one grader on one completion, with its own time limit. Whatever a
grader does (raise, hang, exit, crash, return nonsense) becomes the failure text of that completion, and its process is
replaced. Results come once for each submitted key, in the order in which they finish.

Every worker is a pebble pool of one process with one call at a time. In a pool that several calls share, pebble may
attribute the death of a process to the call that it answered just before, and drop that answer, so a sample would pay
for its neighbour. Workers are spawned, not forked, because the trainer has threads. They import no torch unless a
grader does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from gspo_hpc.config.schema import Judges, Reward, Rows, Sandbox
from gspo_hpc.rewards import spawning, worker_process
from gspo_hpc.rewards.calls import Sampled, Verdict, error_text
from gspo_hpc.rewards.registry import (
    FunctionWeights,
    asks_endpoints,
    asks_for_group,
    check,
    clipped,
    is_batched,
    part_names,
    terms_with,
    time_limit,
)
from gspo_hpc.rewards.results import Call, OpenCompletion, OpenGroup, RewardResult, weighted

LOAD_SECONDS = 60.0  # time limit for a new process and the imports of a grader's file
CLOSE_SECONDS = 10.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds before a failed call is repeated; the delay doubles each time
RETRIES = 3  # for a call whose process ended, perhaps by a signal from outside, as when Slurm ends a step


@dataclass(eq=False)
class _Worker:
    """One process, and the call that it has."""

    pool: ProcessPool
    call: Call | None = None
    since: float = 0.0  # when it got the call, on the monotonic clock
    broken: bool = False


class RewardPool:
    """Graders in processes of their own. Leaving the context manager ends all of them within seconds.

    `failures` counts failed calls by grader; `restarts` counts workers that were replaced without an answer to their
    call. Only one thread may use it.
    """

    def __init__(
        self,
        reward: Reward,
        pools: int = 1,
        sandbox: Sandbox | None = None,
        sources: Sequence[Rows] = (),
        judges: Judges | None = None,
        spending: Path | None = None,
    ) -> None:
        """Start the processes of one of so many `pools`, load the graders; raise ValueError if one cannot be loaded.

        `sandbox`: the settings of the sandbox that graders may ask for. Of prompts of `sources`, which their field
        data_source names, grade those that their source has. `judges`: the budget of requests to endpoints; `spending`:
        the file of the run in which these are noted, without one they count for this pool alone.
        """
        check(reward)
        self._own_account: tempfile.TemporaryDirectory[str] | None = None
        self._account: worker_process.Account | None = None
        if asks_endpoints(reward):
            if spending is None:
                self._own_account = tempfile.TemporaryDirectory(prefix="gspo-judges-")
                spending = Path(self._own_account.name, "rank-0000.requests")
            self._account = worker_process.account_of(spending, judges or Judges(), reward)
        self._reward, self._pools, self._sandbox = reward, pools, sandbox or Sandbox()
        self._names = part_names(reward)
        self._weights = FunctionWeights(reward, sources)
        self._open: dict[Hashable, OpenCompletion] = {}
        self._live: set[Call] = set()  # calls whose outcome is still needed
        self._batched = terms_with(reward, is_batched)
        self._whole_groups = terms_with(reward, asks_for_group)
        self._delayed: list[tuple[float, Call]] = []  # calls that are repeated, from these times on
        self._waiting: deque[tuple[Call, tuple[Any, ...]]] = deque()  # calls that no worker has yet, with arguments
        self._outcomes: queue.SimpleQueue[tuple[Call, Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # for `_waiting` and the workers: pebble's threads assign the next call
        self._closed = False
        self.failures: Counter[str] = Counter()
        self.restarts = 0
        self._workers = [self._new_worker() for _ in range(reward.workers)]
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
        """Number of submitted completions whose result was not polled yet."""
        return len(self._open)

    def grades(self, fields: Mapping[str, Any]) -> bool:
        """Return whether any function grades prompts with these fields; else reward models alone score for them."""
        return bool(self._weights.of(fields))

    def submit(
        self, key: Hashable, completion: str, response_length: int, prompt: str, fields: Mapping[str, Any]
    ) -> None:
        """Submit one completion for grading; `key` names it in :meth:`poll` and must not be pending."""
        self.submit_group([key], [Sampled(completion, response_length)], prompt, fields)

    def submit_group(
        self, keys: Sequence[Hashable], sampled: Sequence[Sampled], prompt: str, fields: Mapping[str, Any]
    ) -> None:
        """Submit completions of a prompt, each with its key. Their results come one by one."""
        assert not self._closed, "the pool is closed"
        weights = self._weights.of(fields)
        group = OpenGroup(keys, sampled, prompt, fields, weights)
        for index, key in enumerate(keys):
            assert key not in self._open, f"{key!r} is being graded already"
            self._open[key] = OpenCompletion(group, index)
        for term in weights:
            if term in self._batched:
                self._queue(Call(tuple(keys), term))
        for key in keys:
            for term in weights:
                if term not in self._batched:
                    self._queue(Call((key,), term))
        self._hand_out()

    def poll(self, timeout: float | None = 0.0) -> list[tuple[Any, RewardResult]]:
        """Return the results that are ready, with their keys, each once.

        Waits up to `timeout` seconds (None: without limit) for the first of them. The list is empty if none came in
        that time, or none is pending.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        done: list[tuple[Any, RewardResult]] = []
        while self._open:
            self._queue_delayed()
            try:
                call, future = self._outcomes.get_nowait()
            except queue.Empty:
                done += self._replace_broken()
                until = min([deadline, *(due for due, _ in self._delayed)])
                wait = min(1.0, until - time.monotonic())
                if wait <= 0 and until < deadline and not done:
                    continue
                if done or wait <= 0:
                    break
                try:
                    call, future = self._outcomes.get(timeout=wait)
                except queue.Empty:
                    continue
            if call in self._live:  # else it was made again meanwhile
                done += self._take(call, future)
        return done

    def drop(self) -> None:
        """Forget all that was submitted: no result of it comes any more, and calls that are made end as they may."""
        with self._lock:
            self._waiting.clear()
        self._delayed.clear()
        self._open.clear()
        self._live.clear()

    def close(self) -> None:
        """End all processes, whatever they are doing. Results that were not polled are lost."""
        with self._lock:
            self._closed = True
        self.drop()
        _give_up([worker.pool for worker in self._workers])
        if self._own_account is not None:
            self._own_account.cleanup()

    def _take(self, call: Call, future: Future[Any]) -> list[tuple[Hashable, RewardResult]]:
        """Note the outcome of one call, and return the results of completions of which that was the last call."""
        error = future.exception()
        if isinstance(error, ProcessExpired) and (error.exitcode or 0) < 0 and error.exitcode != -signal.SIGALRM:
            # A job that ends signals every process, and this trainer may outlive its graders long enough to note a
            # failure that was none. A grader that kills itself does so again.
            return self._again(call, self._cause(error, call.term).failure or "")
        if _is_out_of_memory(error) and call.tries == 0:  # the calls before it may have used the memory up
            return self._again(call)
        self._live.discard(call)
        verdicts = future.result() if error is None else [self._cause(error, call.term)] * len(call.keys)
        if call.failed < self._reward.functions[call.term].retries and any(map(_may_pass, verdicts)):
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0**call.failed)
            repeated = replace(call, failed=call.failed + 1)
            self._delayed.append((time.monotonic() + delay, repeated))
            return []
        return self._note(call, verdicts)

    def _again(
        self, call: Call, cause: str = "ended its process without an answer"
    ) -> list[tuple[Hashable, RewardResult]]:
        """Repeat a call that ended without an answer; after the last try it has failed."""
        self._live.discard(call)
        if call.tries == RETRIES:
            return self._note(call, [Verdict(None, f"{cause}, {RETRIES + 1} times", "failed")] * len(call.keys))
        self._queue(replace(call, tries=call.tries + 1))
        self._hand_out()
        return []

    def _queue_delayed(self) -> None:
        """Queue the calls whose time to be repeated has come."""
        now = time.monotonic()
        due = [call for when, call in self._delayed if when <= now]
        if due:
            self._delayed = [(when, call) for when, call in self._delayed if when > now]
            for call in due:
                self._queue(call)
            self._hand_out()

    def _note(self, call: Call, verdicts: Sequence[Verdict]) -> list[tuple[Hashable, RewardResult]]:
        noted = [(key, self._note_one(key, call.term, one)) for key, one in zip(call.keys, verdicts, strict=True)]
        return [(key, result) for key, result in noted if result is not None]

    def _note_one(self, key: Hashable, term: int, verdict: Verdict) -> RewardResult | None:
        entry, name = self._open[key], self._names[term]
        value, failure, outcome, _, entry.seconds[term], entry.turn = verdict
        if outcome is not None:
            entry.outcomes[term] = outcome
        if failure is None:
            assert value is not None
            entry.values[term] = clipped(value, self._reward.functions[term])
        else:
            entry.failures[term] = f"{name}: {failure}"
            self.failures[name] += 1
        if len(entry.values) + len(entry.failures) < len(entry.group.weights):
            return None
        del self._open[key]
        parts = {name: entry.values[term] for term, name in enumerate(self._names) if term in entry.values}
        failure = "; ".join(entry.failures[term] for term in sorted(entry.failures)) or None
        total = 0.0
        if failure is None:
            total, failure = weighted(entry.values, entry.group.weights)
        outcomes = {name: entry.outcomes[term] for term, name in enumerate(self._names) if term in entry.outcomes}
        seconds = {self._names[term]: taken for term, taken in entry.seconds.items()}
        return RewardResult(total, parts, failure, outcomes, seconds, entry.turn)

    def _cause(self, error: BaseException, term: int) -> Verdict:
        seconds, setting = time_limit(self._reward, term)
        overtime = Verdict(None, f"gave no answer within {seconds:g} s ({setting})", "timed_out", seconds=seconds)
        if isinstance(error, TimeoutError):
            return overtime
        if isinstance(error, ProcessExpired):
            code = error.exitcode or 0
            if _is_out_of_memory(error):
                return Verdict(None, worker_process.out_of_memory(self._reward.memory_gb), "failed")
            if code == -signal.SIGALRM:
                return overtime
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            memory = ": out of memory?" if code == -signal.SIGKILL else ""
            return Verdict(None, f"ended its process ({ended}){memory}", "failed")
        return Verdict(None, error_text(error), "failed")

    def _queue(self, call: Call) -> None:
        self._live.add(call)
        opened = self._open[call.keys[0]]
        group = opened.group
        index = None if call.term in self._batched else opened.index
        sampled = group.sampled
        if index is not None and call.term not in self._whole_groups:
            sampled, index = [sampled[index]], 0  # a group may be large, and goes through a pipe
        seconds, _ = time_limit(self._reward, call.term)
        self._waiting.append((call, (call.term, seconds, sampled, index, group.prompt, group.fields)))

    def _hand_out(self) -> None:
        for worker in self._workers:
            self._advance(worker)

    def _advance(self, worker: _Worker) -> None:
        """Give a free worker the next call."""
        with self._lock:
            if worker.call is not None or worker.broken or self._closed or not self._waiting:
                return
            call, args = self._waiting.popleft()
            worker.call, worker.since = call, time.monotonic()
        try:
            future = worker.pool.schedule(worker_process.grade, args=args, timeout=args[1])
        except RuntimeError:  # its process died while it had nothing to do
            worker.broken = True
            return
        future.add_done_callback(functools.partial(self._on_done, worker, call))

    def _on_done(self, worker: _Worker, call: Call, future: Future[Any]) -> None:
        """Keep the outcome of a call, and give its worker the next one; runs in a thread of pebble's."""
        if isinstance(future.exception(), BrokenProcessPool):
            worker.broken = True  # poll replaces it
            return
        with self._lock:
            if worker.call is call:
                worker.call = None
        self._outcomes.put((call, future))
        self._advance(worker)

    def _replace_broken(self) -> list[tuple[Hashable, RewardResult]]:
        """Replace workers that are broken, or silent long after their call's time limit, and repeat their calls.

        Returns the results of completions whose last call failed that way.
        """
        failed = []
        for place, worker in enumerate(self._workers):
            with self._lock:
                call = worker.call
                limit = 0.0 if call is None else time_limit(self._reward, call.term)[0]
                overdue = time.monotonic() - worker.since > limit + LOAD_SECONDS
                if not worker.broken and (call is None or (worker.pool.active and not overdue)):
                    continue
                worker.call, worker.broken = None, True
            self.restarts += 1
            _give_up([worker.pool])
            self._workers[place] = self._new_worker()
            if call in self._live:
                assert call is not None
                failed += self._again(call)
        if failed or self._waiting:
            self._hand_out()
        return failed

    def _new_worker(self) -> _Worker:
        return _Worker(
            ProcessPool(
                max_workers=1,
                initializer=worker_process.start,
                initargs=(self._reward, self._pools * self._reward.workers, self._sandbox, self._account),
                context=spawning.context(),
            )
        )

    def _await_load(self) -> None:
        """Wait until every process has loaded all graders; raise ValueError where one cannot."""
        try:
            futures = [worker.pool.schedule(worker_process.load_errors) for worker in self._workers]
            errors = [future.result(timeout=LOAD_SECONDS) for future in futures][0]
        except TimeoutError:
            raise ValueError(
                f"reward.functions: the reward functions were not loaded within {LOAD_SECONDS:g} s"
            ) from None
        except (BrokenProcessPool, ProcessExpired) as error:
            raise ValueError(
                f"reward.functions: the process ended while it loaded the file of a reward function: {error}"
            ) from None
        failed = [f"{name}: {error}" for name, error in zip(self._names, errors, strict=True) if error is not None]
        if failed:
            raise ValueError("reward.functions: " + "\n  ".join(failed))


def _may_pass(verdict: Verdict) -> bool:
    """Return whether another call may end better than this one."""
    return verdict.failure is not None and verdict.may_pass


def _is_out_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, ProcessExpired) and error.exitcode == worker_process.OUT_OF_MEMORY


def _give_up(pools: list[ProcessPool]) -> None:
    """End the processes of `pools`, and wait a few seconds: the threads of a broken pool may wait forever."""

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
