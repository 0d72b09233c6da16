"""Training rank 0's connection to the ranks that generate, which is made anew when these start again.

When one of them is killed, the launcher ends the others and starts all of them again. They begin without weights and
without work: rank 0 has a copy of the weights that they had, and RemoteEngines knows what they were asked for. Other
training ranks take no part in it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gspo_hpc.config.derived import restarts_generators, role_of
from gspo_hpc.config.schema import Config
from gspo_hpc.exchange import generator_starts
from gspo_hpc.exchange.kept_weights import KeptWeights
from gspo_hpc.exchange.weight_broadcast import Entry, SentMemory, WeightBroadcast, entry_of
from gspo_hpc.ops.weight_parts import Part
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.notices import POLL_SECONDS, Notices
from gspo_hpc.rollout.recovery import engine_deaths
from gspo_hpc.training.bringup import generation_store
from gspo_hpc.training.serving.commands import WEIGHTS, Commands, Values

T = TypeVar("T")

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class GeneratorsStarted(Exception):
    """The ranks that generate have started again: what they were asked for has to be asked again."""


def weight_broadcast(config: Config, ranks: Ranks, member: int, members: int) -> WeightBroadcast:
    """Return a rank's place in the group in which weights travel; member 0 is training rank 0."""
    assert ranks.job_store is not None
    backend = "nccl" if config.cluster.platform == "cuda" else "gloo"
    return WeightBroadcast(dist.PrefixStore("weights", ranks.job_store), member, members, backend, ranks.timeout)


class Connection:
    """The commands, calls and weights of the newest start of the ranks that generate."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        """Take the place of training rank 0, which meets the others when it first sends weights."""
        self._config, self._ranks = config, ranks
        self._kept = KeptWeights() if restarts_generators(config) else None
        self._sent: tuple[Values, str] | None = None  # command and fingerprint of the newest weights that were sent
        self._ended: list[str] = []  # how engines and ranks of earlier starts died
        self._connect(1)

    def _connect(self, start: int) -> None:
        assert self._ranks.job_store is not None
        self._start, store = start, generator_starts.keys_of(self._ranks.job_store, start)
        self._own = replace(self._ranks, job_store=store)
        self.commands, self.calls = Commands(store), generation_store(store)
        self.notices = Notices(self.calls)
        self.num_calls = 0  # of generation, in this start
        self._broadcast: WeightBroadcast | None = None
        self._broken = False  # a rank was lost while weights were sent
        self._offer = 0  # number of the newest command to take weights
        self._answer: Values | None = None  # to it

    def check(self) -> None:
        """Raise GeneratorsStarted if the ranks that generate have started again, and their engines are up."""
        assert self._ranks.job_store is not None
        if self._kept is not None and len(generator_starts.ended(self._ranks.job_store)) >= self._start:
            raise GeneratorsStarted

    def renew(self) -> None:
        """Connect to the newest start of the ranks that generate."""
        assert self._ranks.job_store is not None
        deaths = generator_starts.ended(self._ranks.job_store)
        self._ended += [*engine_deaths(self.notices), *deaths[self._start - 1 :]]
        self._abort()
        self._connect(1 + len(deaths))

    def deaths(self) -> list[str]:
        """Return how engines, and ranks that generate, died in this attempt: one text each."""
        return [*self._ended, *engine_deaths(self.notices)]

    def offer(self, values: Values) -> None:
        """Have the ranks that generate take weights; return once they are ready for what :meth:`send` sends.

        Raises GeneratorsStarted.
        """
        self._answer = None
        self._offer = self.commands.post(WEIGHTS, values)
        self.commands.wait_until_read(self._offer, self.check)  # engines may still start
        self._meet()

    def announce(self, largest: int) -> None:
        """See WeightBroadcast."""
        self.attempt(lambda group: group.announce(largest))

    def send(self, buckets: Iterable[Sequence[Part]], memory: SentMemory) -> None:
        """Send all buckets, whose parts lie in the newest place of `memory`, each while the next one is gathered.

        Where ranks that generate start again, a copy of all is kept, and the loss of one ends nothing but the sending:
        other training ranks take part in gathering, to the last bucket.
        """
        assert self._broadcast is not None
        if self._kept is None:
            self._broadcast.send(buckets, memory)
            return
        self._kept.begin()
        for parts in buckets:
            place = memory.newest
            assert place is not None
            if place.is_cuda:
                torch.cuda.current_stream().synchronize()  # the thread that copies has a stream of its own
            entries = [entry_of(part, place) for part in parts]
            self._kept.add(entries, place)
            memory.occupy(_Sending(self, entries, place))
            del place, parts  # else they would keep the memory
        memory.release()
        self.attempt(lambda group: group.end())
        self._kept.finish()

    def leave(self, place: torch.Tensor) -> None:
        """Wait until nothing in `place` is left to be copied."""
        assert self._kept is not None
        self._kept.leave(place)

    def attempt(self, send: Callable[[WeightBroadcast], T]) -> T | None:
        """Return what `send` returns of the group; None if a rank in it was lost, which counts for all that follows."""
        assert self._broadcast is not None
        if self._broken:
            return None
        try:
            return send(self._broadcast)
        except RuntimeError as error:
            if self._kept is None:
                raise
            self._note_loss(str(error))
            return None

    def is_lost(self) -> bool:
        """Return whether a rank in the group was lost, so that nothing more is sent."""
        if not self._broken:
            try:
                self.check()
            except GeneratorsStarted:
                self._note_loss("they have started again")
        return self._broken

    def note_sent(self, values: Values, fingerprint: str) -> None:
        """Note the command and the fingerprint of the weights that were sent."""
        self._sent = values, fingerprint

    def confirm(self) -> Values:
        """Return the answer of the ranks that generate to the weights that were sent. Raises GeneratorsStarted."""
        assert self._sent is not None
        while self._broken:
            self.check()
            time.sleep(POLL_SECONDS)
        if self._answer is None:
            self.commands.tell(self._offer, {"fingerprint": self._sent[1]})
            self._answer = self.commands.wait_for_answer(self._offer, self.check)
        return self._answer

    def send_again(self) -> None:
        """Give ranks that have started again the weights that those before had, if any. Raises GeneratorsStarted."""
        if self._sent is None or self._kept is None:
            return
        # The weights that are trained are other ones by now: nothing more can be asked of the trainer about these.
        self.offer(self._sent[0] | {"explains": False})
        buckets = self._kept.buckets()
        self.announce(max((copy.numel() for _, copy in buckets), default=0))
        for entries, copy in buckets:
            _Sending(self, entries, copy.to(self._ranks.device)).wait()
        self.attempt(lambda group: group.end())
        self.confirm()

    def _meet(self) -> None:
        """Make the group in which weights travel, unless there is one. Raises GeneratorsStarted."""
        if self._broadcast is not None:
            return
        members = 1 + role_of(self._config, self._config.num_ranks - 1).count
        if self._kept is None:
            self._broadcast = weight_broadcast(self._config, self._own, 0, members)
            return
        store: Any = self._own.job_store  # torch's type stubs lack clone (2.13)
        own = replace(self._own, job_store=store.clone())  # a store answers one thread after another
        made: list[WeightBroadcast | Exception] = []

        def meet() -> None:  # for ever, if one of the others has died since it read the command
            try:
                _choose_gpu(self._ranks.device)
            except Exception as error:
                made.append(error)
                return
            try:
                with _errors_end_no_process():
                    made.append(weight_broadcast(self._config, own, 0, members))
            except RuntimeError as error:  # one of them has died: those that start again are waited for
                print(f"not all ranks that generate were met: {error}", flush=True)
            except Exception as error:
                made.append(error)

        threading.Thread(target=meet, name="meet", daemon=True).start()
        while not made:
            self.check()
            time.sleep(POLL_SECONDS / 10)
        if isinstance(made[0], Exception):
            raise made[0]
        self._broadcast = made[0]

    def _note_loss(self, why: str) -> None:
        print(f"weights do not reach all ranks that generate: {why}", flush=True)
        self._broken = True
        self._abort()

    def _abort(self) -> None:
        if self._broadcast is not None:
            with contextlib.suppress(RuntimeError):  # of a group that has ended by itself
                self._broadcast.abort()


def _choose_gpu(device: torch.device) -> None:
    """Choose a rank's GPU in a new thread, which has the node's first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextlib.contextmanager
def _errors_end_no_process() -> Iterator[None]:
    """Have groups of NCCL that are made in the block leave errors to those who use them.

    By default the watchdog of a group, which asks NCCL for errors once a second, ends the process at the first one. A
    group reads the variable when it is made (ProcessGroupNCCL.cpp).
    """
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


class _Sending:
    """A bucket that is sent, and copied, or would be if no rank were lost."""

    def __init__(self, connection: Connection, entries: list[Entry], place: torch.Tensor) -> None:
        self._connection, self._place = connection, place
        self._work = connection.attempt(lambda group: group.start(entries, place))

    def wait(self) -> None:
        """Return once its memory is free; on a GPU, too, the host waits, and sees if a rank is lost."""
        if (work := self._work) is not None:
            while self._place.is_cuda and not work.is_completed() and not self._connection.is_lost():
                time.sleep(1e-3)
            self._connection.attempt(lambda group: work.wait())
        self._connection.leave(self._place)
