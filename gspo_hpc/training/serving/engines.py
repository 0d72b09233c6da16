"""The engines on GPUs of their own, as the ranks that train see them: they ask for rollouts, and read the journals.

A rank that generates writes every finished group into the run directory, where a rollout that is killed finds it again.
The ranks that train read it there: what is trained on is what is on disk.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.data.carried import Enough
from gspo_hpc.data.records import Group
from gspo_hpc.exchange.prompts import SharedPrompts
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.generation import ProgressCallback, Request, always, ignore_progress
from gspo_hpc.rollout.worker import Generated, Interrupted, JudgesOverBudget
from gspo_hpc.runs import journal
from gspo_hpc.system.files import wait_until_visible
from gspo_hpc.system.progress import waiting
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training.sampling.judged import signal_of
from gspo_hpc.training.serving.commands import END, GENERATE, Commands, Values
from gspo_hpc.training.serving.connection import Connection, GeneratorsStarted


@dataclass(frozen=True)
class Call:
    """A call of generation that the engines work on."""

    count: int  # of calls of generation up to it
    request: Request
    folder: Path  # of the journals
    fingerprint: str  # of the weights


@dataclass(frozen=True)
class Answer:
    """The answer of the ranks that generate to a call."""

    stopped: bool  # before everything was sampled
    engines: dict[str, float]  # metrics of all engines; empty if there was nothing to generate
    waited: float  # seconds for which a rank waited for rewards, at most
    files: dict[str, int]  # the journals of the call's folder that they have written, with their sizes
    short: str = ""  # why the run is to stop and start again: the memory of one of their nodes runs out
    unfinished: dict[str, int] = field(default_factory=dict)  # as `files`, of groups that later rollouts go on with
    over_budget: str | None = None  # why it was stopped, if for want of a budget for judges

    def require_whole(self) -> None:
        """Raise Interrupted if the call was stopped: JudgesOverBudget, if for want of a budget."""
        if self.stopped:
            raise Interrupted if self.over_budget is None else JudgesOverBudget(self.over_budget)


@dataclass
class _Asked:
    """A call as rank 0 has asked the newest start of the ranks that generate."""

    commands: Commands  # of this start
    command: int  # its number
    number: int  # of the call, in this start
    written: dict[str, int] = field(default_factory=dict)  # journals of earlier starts, with their sizes


class RemoteEngines:
    """The training ranks' end of server mode. It has what the loop uses of a RolloutWorker; methods are collective."""

    engine = None  # no training rank owns one

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        connection: Connection | None,
        rollouts: Path,
        flag: StopFlag,
    ) -> None:
        """`connection`: that of rank 0; the others have none. `rollouts`: the folder of journals.

        `flag` stops this rank; what it says of memory lets engines finish.
        """
        self.config, self.ranks = config, ranks
        self._connection, self._rollouts, self._flag = connection, rollouts, flag
        self._calls = 0
        self._open: list[Call] = []
        self._answers: dict[int, Answer] = {}
        self._asked: dict[int, _Asked] = {}  # on rank 0: of the open calls
        self._found: dict[int, Values] = {}  # on rank 0: answers of an earlier start that were not read yet
        self._stale = False  # the ranks that generate have started again, and know nothing yet
        self._ended = False

    @property
    def recovery(self) -> RemoteEngines:
        """The deaths of engines, see :meth:`deaths`."""
        return self

    def deaths(self) -> list[str]:
        """Return how engines died in this attempt: one text each. Ranks other than 0 know none."""
        return [] if self._connection is None else self._connection.deaths()

    def start(self, request: Request, folder: Path, fingerprint: str) -> Call:
        """Have the engines sample and grade `request` after all calls before it, and return at once."""
        self._calls += 1
        call = Call(self._calls, request, folder, fingerprint)
        self._open = [one for one in self._open if one.count not in self._answers]
        self._open.append(call)
        if self._connection is not None:
            self._asked[call.count] = self._ask(self._connection, call, request.slots, request.enough)
        return call

    def _ask(self, connection: Connection, call: Call, slots: Sequence[int], enough: Enough | None) -> _Asked:
        """Ask the ranks that generate for these slots of a call."""
        connection.num_calls += 1
        request, number = call.request, connection.num_calls
        SharedPrompts(connection.calls, f"generate/{number}").publish({slot: request.prompts[slot] for slot in slots})
        command = connection.commands.post(
            GENERATE,
            {
                "slots": list(slots),
                "samples": request.samples,
                "sampling": asdict(request.sampling),
                "rollout": request.rollout,
                "folder": str(call.folder.relative_to(self._rollouts)),
                "fingerprint": call.fingerprint,
                "enough": None if enough is None else enough.to_values(),
                "weights_version": request.weights_version,
                "begun": request.begun,
            },
        )
        return _Asked(connection.commands, command, number)

    def _ask_again(self, connection: Connection, call: Call) -> _Asked:
        """Ask ranks that have started again for the groups of a call that those before have not finished."""
        request, files = call.request, journal.journals(call.folder)
        finished = journal.read_journals(call.folder, call.fingerprint)
        done = {slot: finished[slot] for slot in request.slots if slot in finished}
        enough = request.enough
        if enough is not None:
            has_signal = signal_of(self.config) if enough.signal else always
            counted = sum(map(has_signal, done.values()))
            enough = replace(enough, groups=max(0, enough.groups - counted), required=enough.required - done.keys())
        asked = self._ask(connection, call, [slot for slot in request.slots if slot not in done], enough)
        asked.written = sizes(files)
        return asked

    def persist(self, ask: Callable[[], Values]) -> Values:
        """Return what `ask` returns of the ranks that generate, on rank 0, however often these start again meanwhile.

        It raises GeneratorsStarted if they do, and is called once more when they know what they have to do.
        """
        while True:
            try:
                if self._stale:
                    self._restore()
                return ask()
            except GeneratorsStarted:
                self._stale = True

    def look_after(self) -> None:
        """Give ranks that generate, and that have started again, what they need to go on, on rank 0."""
        if (connection := self._connection) is not None:

            def check() -> Values:
                connection.check()
                return {}

            with waiting():  # for engines that are filled
                self.persist(check)

    def _restore(self) -> None:
        """Give the newest start of the ranks that generate the weights and the work of the one before it."""
        connection = self._connection
        assert connection is not None
        unanswered = [call for call in self._open if call.count not in self._answers.keys() | self._found.keys()]
        for call in unanswered:
            asked = self._asked[call.count]
            if (found := asked.commands.find_answer(asked.command)) is not None:
                self._found[call.count] = self._with_written(call, found)
        connection.renew()
        connection.send_again()
        for call in unanswered:
            if call.count not in self._found:
                self._asked[call.count] = self._ask_again(connection, call)
        self._stale = False

    def _with_written(self, call: Call, answer: Values) -> Values:
        """Return an answer with the journals of earlier starts."""
        return answer | {"files": self._asked[call.count].written | answer["files"]}

    def wait(self, call: Call, progress: ProgressCallback = ignore_progress) -> Answer:
        """Return the answer to a call once it is there, which may be long ago; `progress` is called on rank 0."""
        if call.count not in self._answers:
            found = self.from_rank_0(lambda: self._await(call, progress))
            self._answers[call.count] = answer = Answer(**found)
            if answer.short:
                self._flag.request(answer.short)
        return self._answers[call.count]

    def _await(self, call: Call, progress: ProgressCallback) -> Values:
        """Return the answer to a call, on rank 0, once it is there."""
        connection = self._connection
        assert connection is not None
        look = self._looker(connection, call, progress)

        def ask() -> Values:
            if call.count in self._found:
                return self._found.pop(call.count)
            asked = self._asked[call.count]
            return self._with_written(call, asked.commands.wait_for_answer(asked.command, look))

        found = self.persist(ask)
        del self._asked[call.count]
        return found

    def wait_for_all(self) -> None:
        """Wait until the engines have nothing more to do. Raises Interrupted if a call was stopped."""
        for call in self._open:
            self.wait(call).require_whole()
        self._open.clear()

    def read(self, call: Call, answer: Answer) -> dict[int, Group]:
        """Return this rank's share of the groups that a call asked for, by slot, from the journals.

        Raises RuntimeError where one is missing of a call that ends with all of them, and TimeoutError where a file of
        another node is not seen here.
        """
        folder, asked = call.folder, set(call.request.slots)

        def content(name: str) -> dict[int, Group]:
            # What engines have just written may not be listed on this node yet.
            wait_until_visible(folder / name, answer.files[name])
            found = journal.read_journal(folder / name, call.fingerprint)
            return {slot: group for slot, group in found.items() if slot in asked}

        own, slots = self.ranks.exchange.partition_files(lambda: sorted(answer.files), content)
        if slots != asked and call.request.enough is None:
            raise RuntimeError(f"{folder}: {len(slots)} of {len(asked)} groups can be read, although all were finished")
        return own

    def generate(self, request: Request) -> Generated:
        """Sample and grade completions that are not trained on; nothing stays on disk."""
        folder = self._rollouts / "evaluation"
        if self.ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        name = self.from_rank_0(lambda: {"random": secrets.token_hex(8)})["random"]  # what is left over never counts
        call = self.start(request, folder, f"evaluation {name}")
        answer = self.wait(call)
        answer.require_whole()
        own = self.read(call, answer)
        self.ranks.exchange.transport.barrier()
        if self.ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return Generated(own, answer.engines, answer.waited)

    def end(self, outcome: str) -> None:
        """Have the ranks that generate end with this outcome. Calling it again does nothing."""
        connection = self._connection
        if connection is None or self._ended:
            return
        self._ended = True
        for asked in self._asked.values():
            connection.notices.post(f"generate/{asked.number}/stop")
        with waiting():
            while True:  # the store ends with this rank, and the others still look into it
                command = connection.commands.post(END, {"outcome": outcome})
                try:
                    connection.commands.wait_for_answer(command, connection.check)
                    return
                except GeneratorsStarted:  # which end before they have begun
                    connection.renew()

    def close(self) -> None:
        """Do nothing: what ends with an error is ended by whoever watches the ranks."""

    def from_rank_0(self, find: Callable[[], Values]) -> Values:
        """Return what rank 0 finds, on all training ranks, which wait for it."""
        with waiting():
            found = json.dumps(find() if self.ranks.rank == 0 else {}).encode()
            every = self.ranks.exchange.transport.tree_all_reduce(found, lambda parts: parts[0])
        values: Values = json.loads(every)
        return values

    def _looker(self, connection: Connection, call: Call, progress: ProgressCallback) -> Callable[[], None]:
        """Return a function that rank 0 calls while it waits: it reports new groups, and passes a stop on.

        The function raises GeneratorsStarted.
        """
        seen, counted = 0, self._asked[call.count]

        def look() -> None:
            nonlocal seen, counted
            connection.check()
            asked = self._asked[call.count]
            if asked is not counted:
                seen, counted = 0, asked
            done = connection.calls.add(f"generate/{asked.number}/done", 0)
            if done > seen:
                progress((done - seen) * call.request.samples, 0)
                seen = done
            stop = f"generate/{asked.number}/stop"
            if self._flag.hurried and not connection.notices.has(stop):
                connection.notices.post(stop)

        return look


def sizes(paths: list[Path]) -> dict[str, int]:
    """Return name and size of files, as an answer has them."""
    return {path.name: path.stat().st_size for path in paths}
