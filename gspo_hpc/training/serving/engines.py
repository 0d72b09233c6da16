"""The engines on GPUs of their own, as the ranks that train see them: they ask for rollouts, and read the journals.

A rank that generates writes every finished group into the run directory, where a rollout that is killed finds it again.
The ranks that train read it there: what is trained on is what is on disk.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Group
from gspo_hpc.exchange.prompts import SharedPrompts
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.generation import ProgressCallback, Request, ignore_progress
from gspo_hpc.rollout.notices import Notices
from gspo_hpc.rollout.recovery import engine_deaths
from gspo_hpc.rollout.worker import Generated, Interrupted, JudgesOverBudget
from gspo_hpc.runs import journal
from gspo_hpc.system.files import wait_until_visible
from gspo_hpc.system.progress import waiting
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training.bringup import generation_store
from gspo_hpc.training.serving.commands import END, GENERATE, Commands, Values


@dataclass(frozen=True)
class Call:
    """A call of generation that the engines work on."""

    number: int  # of its command
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


class RemoteEngines:
    """The training ranks' end of server mode. It has what the loop uses of a RolloutWorker; methods are collective."""

    engine = None  # no training rank owns one

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        commands: Commands,
        rollouts: Path,
        flag: StopFlag,
    ) -> None:
        """`rollouts`: the folder of journals. `flag` stops this rank; what it says of memory lets engines finish."""
        assert ranks.job_store is not None
        self.config, self.ranks = config, ranks
        self._commands, self._rollouts, self._flag = commands, rollouts, flag
        self._store = generation_store(ranks.job_store)
        # The notices of the ranks that generate; the first rank alone reads them.
        self._notices = Notices(self._store) if ranks.rank == 0 else None
        self._calls = 0
        self._open: list[Call] = []
        self._answers: dict[int, Answer] = {}
        self._ended = False

    @property
    def recovery(self) -> RemoteEngines:
        """The deaths of engines, see :meth:`deaths`."""
        return self

    def deaths(self) -> list[str]:
        """Return how engines died in this attempt: one text each. Ranks other than 0 know none."""
        return [] if self._notices is None else list(engine_deaths(self._notices))

    def start(self, request: Request, folder: Path, fingerprint: str) -> Call:
        """Have the engines sample and grade `request` after all calls before it, and return at once."""
        self._calls += 1
        number = 0
        if self.ranks.rank == 0:
            shared = SharedPrompts(self._store, f"generate/{self._calls}")
            shared.publish({slot: request.prompts[slot] for slot in request.slots})
            number = self._commands.post(
                GENERATE,
                {
                    "slots": list(request.slots),
                    "samples": request.samples,
                    "sampling": asdict(request.sampling),
                    "rollout": request.rollout,
                    "folder": str(folder.relative_to(self._rollouts)),
                    "fingerprint": fingerprint,
                    "enough": None if request.enough is None else request.enough.to_values(),
                    "weights_version": request.weights_version,
                    "begun": request.begun,
                },
            )
        call = Call(number, self._calls, request, folder, fingerprint)
        self._open = [one for one in self._open if one.count not in self._answers]
        self._open.append(call)
        return call

    def wait(self, call: Call, progress: ProgressCallback = ignore_progress) -> Answer:
        """Return the answer to a call once it is there, which may be long ago; `progress` is called on rank 0."""
        if call.count not in self._answers:
            look = self._looker(call, progress)
            found = self.from_rank_0(lambda: self._commands.wait_for_answer(call.number, look))
            self._answers[call.count] = answer = Answer(**found)
            if answer.short:
                self._flag.request(answer.short)
        return self._answers[call.count]

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
        if self.ranks.rank == 0 and not self._ended:
            self._ended = True
            assert self._notices is not None
            for call in self._open:
                if call.count not in self._answers:
                    self._notices.post(f"generate/{call.count}/stop")
            # The store ends with this rank, and the others still look into it.
            with waiting():
                self._commands.wait_for_answer(self._commands.post(END, {"outcome": outcome}), lambda: None)

    def close(self) -> None:
        """Do nothing: what ends with an error is ended by whoever watches the ranks."""

    def from_rank_0(self, find: Callable[[], Values]) -> Values:
        """Return what rank 0 finds, on all training ranks, which wait for it."""
        with waiting():
            found = json.dumps(find() if self.ranks.rank == 0 else {}).encode()
            every = self.ranks.exchange.transport.tree_all_reduce(found, lambda parts: parts[0])
        values: Values = json.loads(every)
        return values

    def _looker(self, call: Call, progress: ProgressCallback) -> Callable[[], None]:
        """Return a function that rank 0 calls while it waits: it reports new groups, and passes a stop on."""
        seen = 0

        def look() -> None:
            nonlocal seen
            done = self._store.add(f"generate/{call.count}/done", 0)
            if done > seen:
                progress((done - seen) * call.request.samples, 0)
                seen = done
            assert self._notices is not None
            stop = f"generate/{call.count}/stop"
            if self._flag.hurried and not self._notices.has(stop):
                self._notices.post(stop)

        return look


def sizes(paths: list[Path]) -> dict[str, int]:
    """Return name and size of files, as an answer has them."""
    return {path.name: path.stat().st_size for path in paths}
