"""Generation and grading: prompts go to engines as these become free, finished groups into the journal.

The ranks that own an engine take prompts from a counter in the torch.distributed store, so a slow engine simply takes
fewer, and fetch the prompts that they have taken from there, where rank 0 put them. Completions are graded while
generation goes on, and groups stay on the rank whose engine generated them. Ranks without an engine wait. Nobody sits
in a collective meanwhile, so an engine that died can be given its weights again by all ranks together (see
:mod:`gspo_hpc.rollout.recovery`). A rank that is done stays reachable in this way until all are done: only then can no
sync be requested any more, and all have read the same notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Group
from gspo_hpc.data.replies import Replies
from gspo_hpc.engine.engine import Engine
from gspo_hpc.exchange.prompts import SharedPrompts
from gspo_hpc.policy.passes import Abandoned, never
from gspo_hpc.policy.process_groups import Ranks, largest
from gspo_hpc.rewards.environments import registry
from gspo_hpc.rewards.environments.tools import Toolbox
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rollout.carried_files import CarriedFiles
from gspo_hpc.rollout.conversations import Conversations
from gspo_hpc.rollout.generation import (
    CallCounters,
    Generation,
    ProgressCallback,
    Request,
    always,
    ignore_progress,
)
from gspo_hpc.rollout.notices import Notices
from gspo_hpc.rollout.recovery import EngineRecovery
from gspo_hpc.rollout.scoring import RewardModels
from gspo_hpc.rollout.timing import EngineTime, engine_extremes, engine_metrics
from gspo_hpc.runs.journal import Journal
from gspo_hpc.system.progress import mark, waiting


class Interrupted(Exception):
    """A stop was requested in the middle of a rollout. Finished groups are in the journal."""


class JudgesOverBudget(Interrupted, ValueError):
    """The budget of judges is used up in the middle of a rollout. Finished groups are in the journal."""

    def __init__(self, why: str) -> None:
        """Take what the reward function said on the rank that found it out; other ranks may not know it."""
        self.why = why or "the budget of judges is used up"
        super().__init__(
            f"{self.why}; judges.used_up is stop: raise the limit, or give judges.used_up=exclude, and start the same "
            "command again"
        )


@dataclass(frozen=True)
class Generated:
    """The result of one call of generation."""

    own: dict[int, Group]  # by slot: what this rank's engine generated
    engines: dict[str, float]  # metrics of all engines; empty if there was nothing to generate
    seconds_waiting_for_rewards: float  # of this rank
    unfinished: dict[int, Group] = field(default_factory=dict)  # by slot: what this rank's engine left unfinished


@dataclass
class RolloutWorker:
    """One rank's part in generation. `engine` and `pool` are None on ranks that own no engine.

    The pool is None, too, where a teacher is the only signal and nothing is graded.
    """

    config: Config
    ranks: Ranks
    store: dist.Store
    notices: Notices
    engine: Engine | None
    pool: RewardPool | None
    num_engines: int
    recovery: EngineRecovery
    stop_requested: Callable[[], bool]
    models: RewardModels | None = None  # which score what the pool does not; None: there are none
    turns: RewardPool | None = None  # in which an environment answers; None: there is none
    replies: Replies | None = None  # with it
    toolbox: Toolbox | None = None  # what the model may call; None: nothing
    prompts_come_from_outside: bool = False  # the trainer has put them into the store before it asked for a call
    has_signal: Callable[[Group], bool] = always  # see Generation
    rollouts: Path | None = None  # the folder of journals
    _calls: int = 0

    def generate(
        self, request: Request, journal: Journal | None = None, progress: ProgressCallback = ignore_progress
    ) -> Generated:
        """Sample and grade completions of every prompt. Collective.

        `progress` is called for every group that this rank's engine finished. Raises Interrupted on all ranks if a stop
        was requested, JudgesOverBudget if it was for want of a budget, EngineLost if an engine cannot be restarted any
        more.
        """
        self._calls += 1
        counters = CallCounters(self.store, self.notices, self._calls, len(request.slots), request.enough)
        mine, unfinished = dict[int, Group](), dict[int, Group]()
        engine_time, waited = EngineTime(), 0.0
        if request.slots:
            try:
                shared = self._share_prompts(request)
                if self.engine is not None:
                    generation = self._generation(request, shared, counters, journal, progress)
                    mine, unfinished = generation.run(), generation.unfinished
                    engine_time, waited = generation.time, generation.seconds_waiting_for_rewards
                else:
                    self._wait(counters)
                self._leave(counters)
            except Abandoned:  # of a sync that was to fill an engine: all ranks left it together
                if self.engine is not None:
                    self.engine.abort()  # one that generates cannot sleep
                raise Interrupted from None
        stopped = counters.stopped()
        # All ranks meet here before any of them ends and closes the stores that the others still read.
        own = engine_extremes(engine_time if self.engine is not None else None)
        why = counters.why_stopped()
        *extremes, over_budget = largest([*own, float(bool(why))], self.ranks.device)
        if over_budget > 0:
            raise JudgesOverBudget(why)
        if stopped:
            raise Interrupted
        return Generated(mine, engine_metrics(extremes), waited, unfinished)

    def close(self) -> None:
        """Close the reward pool and the engines."""
        self.notices.close()
        for pool in (self.pool, self.turns):
            if pool is not None:
                pool.close()
        if self.models is not None:
            self.models.close()
        if self.engine is not None:
            self.engine.close()

    def _share_prompts(self, request: Request) -> SharedPrompts | None:
        """Return where engines find their prompts; None if rank 0, which has them, owns the only engine. Collective.

        Nobody waits at the store for a prompt, for there a rank that waits holds up the thread that reads notices.
        """
        if self.prompts_come_from_outside:
            return SharedPrompts(self.store, f"generate/{self._calls}")
        if self.num_engines == 1:
            return None
        shared = SharedPrompts(self.store, f"generate/{self._calls}")
        if self.ranks.rank == 0:
            shared.publish({slot: request.prompts[slot] for slot in request.slots})
        with waiting():  # for rank 0
            self.ranks.exchange.transport.barrier()
        return shared

    def _generation(
        self,
        request: Request,
        shared: SharedPrompts | None,
        counters: CallCounters,
        journal: Journal | None,
        progress: ProgressCallback,
    ) -> Generation:
        assert self.engine is not None
        conversations = None
        if self.turns is not None and self.replies is not None:
            limits = self.config.environment
            conversations = Conversations(
                self.engine,
                self.turns,
                self.replies,
                limits.max_turns,
                limits.max_seconds,
                slots=frozenset(request.slots),
                journal=journal,
                stop_requested=self.stop_requested,
                toolbox=self.toolbox,
                weights_version=lambda: self.recovery.weights_version,
                answers=limits.name is not None,
                scores_groups=registry.scores_groups(limits),
            )
        return Generation(
            request=request,
            counters=counters,
            engine=self.engine,
            pool=self.pool,
            recovery=self.recovery,
            config=self.config,
            num_engines=self.num_engines,
            stop_requested=self.stop_requested,
            journal=journal,
            progress=progress,
            shared=shared,
            conversations=conversations,
            has_signal=self.has_signal,
            carried=None if self.rollouts is None else CarriedFiles(self.rollouts),
        )

    def _wait(self, counters: CallCounters) -> None:
        """Wait until the others have finished all groups, or a stop was requested."""
        while True:
            mark("generate")
            seen = self.notices.look()
            if counters.over():
                return
            if self.stop_requested():
                counters.stop()
            if counters.stopped():
                return
            self.recovery.join_syncs()
            self.notices.wait(seen, self.recovery.or_weights(self.stop_requested))

    def _leave(self, counters: CallCounters) -> None:
        """Stay reachable for the weight syncs of others until every rank has come here."""
        # This rank may have asked for newer weights while it waited, and then read that the call is over. Once it has
        # left, the others may leave as well, and some of them would wait in that sync for those that did.
        self.recovery.join_syncs(leaving=True)
        counters.leave()
        while True:
            mark("generate")
            seen = self.notices.look()
            if counters.all_left():
                return
            self.recovery.join_syncs(leaving=True)
            self.notices.wait(seen, never)
