"""One call of generation on a rank that has an engine: its prompts, its grading, and the counters it shares."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from gspo_hpc.config.schema import Config
from gspo_hpc.data.carried import Enough, Place
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.engine.engine import Engine, EngineDied, Sampling
from gspo_hpc.exchange.prompts import SharedPrompts
from gspo_hpc.rewards.calls import ENVIRONMENT, Sampled
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.rollout.carried_files import CarriedFiles
from gspo_hpc.rollout.conversations import Conversations
from gspo_hpc.rollout.notices import POLL_SECONDS, Notices
from gspo_hpc.rollout.recovery import EngineRecovery
from gspo_hpc.rollout.timing import EngineTime
from gspo_hpc.runs.journal import Journal
from gspo_hpc.system.progress import mark

ProgressCallback = Callable[[int, int], None]  # completions newly finished, tokens sampled so far


def always(group: Group) -> bool:
    """Return True."""
    return True


def ignore_progress(completions: int, tokens: int) -> None:
    """Do nothing with the progress of a rollout."""


@dataclass(frozen=True)
class Request:
    """Prompts and how to sample them; but for the prompts, the same on every rank."""

    slots: Sequence[int]  # in the order in which they are generated
    prompts: Mapping[int, Prompt]  # by slot, at least of these, on rank 0; the others' are ignored
    samples: int  # completions of each prompt
    sampling: Sampling
    rollout: int  # its number, on which every seed depends; below 0: nothing of it is trained on
    enough: Enough | None = None  # the call ends with these, and not with all
    weights_version: int = 0  # the number of steps that had made the weights which sample
    begun: Mapping[int, Place] = field(default_factory=dict)  # by slot, where groups are that others began

    def seeds(self, run_seed: int, slot: int, prompt: Prompt) -> list[int]:
        """Return the seed of each completion of a slot, which has this prompt."""
        return [sample_seed(run_seed, self.rollout, slot, prompt.index, index) for index in range(self.samples)]


def sample_seed(run_seed: int, rollout: int, slot: int, prompt: int, sample: int) -> int:
    """Return the seed of one completion: a pure function, so a resumed rollout samples what it would have sampled."""
    digest = hashlib.blake2b(f"{run_seed}/{rollout}/{slot}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class CallCounters:
    """The counters and notices that ranks share in one call of generation of `groups` groups."""

    def __init__(
        self, store: dist.Store, notices: Notices, call: int, groups: int, enough: Enough | None = None
    ) -> None:
        """Take the number of the call; what this rank has read of the calls before it is forgotten.

        `enough`: the groups with which the call ends, if not with all of them.
        """
        self.notices = notices
        self._store, self._name, self._groups, self._enough = store, f"generate/{call}", groups, enough
        notices.forget(*(f"generate/{call - 1}/{what}" for what in ("done", "left", "stop")))

    def take(self, count: int) -> range:
        """Return the places of the next `count` prompts, for this rank alone."""
        end = self._store.add(f"{self._name}/next", count)
        return range(end - count, end)

    def add_finished(self, slot: int, *, counts: bool = True) -> None:
        """Count one more finished group; with the last one that the call needs, all ranks are told.

        `counts`: it is one of those with which the call ends.
        """
        last = self._store.add(f"{self._name}/done", 1) == self._groups
        if self._enough is not None:
            # Of two ranks that count at once the later one sees both.
            required = self._store.add(f"{self._name}/required", int(slot in self._enough.required))
            groups = self._store.add(f"{self._name}/counted", int(counts))
            required = self._store.add(f"{self._name}/required", 0)
            last = last or (groups >= self._enough.groups and required == len(self._enough.required))
        if last and not self.over():
            self.notices.post(f"{self._name}/done")

    def over(self) -> bool:
        """Return True once this rank knows that all groups of all ranks are finished, or enough of them."""
        return self.notices.has(f"{self._name}/done")

    def leave(self) -> None:
        """Note that this rank has nothing more to do in the call."""
        if self.notices.arrive(f"{self._name}/left"):
            self.notices.post(f"{self._name}/left")

    def all_left(self) -> bool:
        """Return True once this rank knows that all ranks called :meth:`leave`."""
        return self.notices.has(f"{self._name}/left")

    def stop(self, why: str = "") -> None:
        """Have all ranks stop the call, because somebody asked for it, or because of `why`."""
        if not self.stopped():
            self.notices.post(f"{self._name}/stop", why)

    def stopped(self) -> bool:
        """Return True once this rank knows that a rank called :meth:`stop`."""
        return self.notices.has(f"{self._name}/stop")

    def why_stopped(self) -> str:
        """Return the reason for which a rank stopped the call, as far as this rank knows; empty if it was asked to."""
        return next(filter(None, self.notices.texts(f"{self._name}/stop")), "")


@dataclass
class Generation:
    """The state of one call of generation on a rank that has an engine."""

    request: Request
    counters: CallCounters
    engine: Engine
    pool: RewardPool | None  # None: nothing is graded
    recovery: EngineRecovery
    config: Config
    num_engines: int
    stop_requested: Callable[[], bool]
    journal: Journal | None
    progress: ProgressCallback
    shared: SharedPrompts | None = None  # where other ranks have engines too; else the request has all prompts
    conversations: Conversations | None = None  # between the engine and this, where there is an environment
    has_signal: Callable[[Group], bool] = always  # of a graded group: whether there is anything to learn from it
    carried: CarriedFiles | None = None  # in which groups are that earlier rollouts began
    time: EngineTime = field(default_factory=EngineTime)
    seconds_waiting_for_rewards: float = 0.0
    _finished: dict[int, Group] = field(default_factory=dict)
    _grading: dict[int, tuple[Group, dict[int, RewardResult]]] = field(default_factory=dict)
    _exhausted: bool = False  # no prompt is left to take
    unfinished: dict[int, Group] = field(default_factory=dict)  # what the call ended without, by slot

    def __post_init__(self) -> None:
        self._slots = self.request.slots
        self._sampler: Engine | Conversations = self.conversations or self.engine
        self._tokens_before = self.engine.tokens_generated

    def run(self) -> dict[int, Group]:
        """Return the groups that this rank generated and graded, by slot, once those of all ranks are finished.

        Where the call ends with enough of them, `unfinished` has what was sampled of the others afterwards.
        """
        notices = self.counters.notices
        self.recovery.note_weights(self.request.weights_version)
        while True:
            mark("generate")  # a step of an engine that hangs ends with EngineDied, after faults.engine_timeout
            seen = notices.look()
            if self._stops():
                self._sampler.abort()
                self._collect_paid_rewards()
                break
            if self.request.enough is not None and self.counters.over():
                self._leave_unfinished()
                break
            self._submit_prompts()
            if self._sampler.pending:
                self._step_engine()
            if not self._collect_rewards():
                continue
            if not self._sampler.pending and not self._grading:
                if self._exhausted and self.counters.over():
                    break
                if self._exhausted:  # others still generate
                    self.recovery.join_syncs()
                    notices.wait(seen, self.recovery.or_weights(self.stop_requested))
            elif self.num_engines > 1 or self.config.rollout.in_flight_updates:
                self.recovery.join_syncs()
        return self._finished

    def _stops(self) -> bool:
        """Return True if the call is to be stopped, of which all ranks are told."""
        if self.stop_requested():
            self.counters.stop()
        return self.counters.stopped()

    def _submit_prompts(self) -> None:
        """Take prompts until the engine has half of its fair share.

        That is enough to keep it full, and little enough for the others to take over. Where the call does not wait for
        all groups, nobody has to take over: engines take their whole shares.
        """
        every = self._slots
        parts = 2 * self.num_engines if self.request.enough is None else self.num_engines
        share = -(-len(every) // parts) if self.num_engines > 1 else len(every)
        if self._exhausted or (missing := share - self._sampler.pending) <= 0:
            return
        taken = self.counters.take(missing)
        self._exhausted = taken.stop >= len(every)
        slots = every[taken.start : taken.stop]
        prompts = self.shared.fetch(slots) if self.shared is not None else [self.request.prompts[s] for s in slots]
        for slot, prompt in zip(slots, prompts, strict=True):
            seeds = self.request.seeds(self.config.run.seed, slot, prompt)
            # A kilobyte of a token, which only training reads.
            trained = self.request.rollout >= 0
            if self._tells_weights:
                begun = self._begun(slot, prompt)
                self._sampler.submit(slot, prompt, seeds, self.request.sampling, begun=begun, may_stop=True)
            else:
                self._sampler.submit(slot, prompt, seeds, self.request.sampling, reports_experts=trained)

    def _step_engine(self) -> None:
        """Make one step of the engine, and submit the groups that it finished for grading.

        A dead engine is restarted, filled and given its unfinished groups again, but not if a stop is requested: the
        restart would take the time that is left for the save.
        """
        running, began = self._sampler.running, time.monotonic()
        try:
            ready = self._sampler.step()
        except EngineDied as death:
            if not self._stops():
                self.recovery.recover(death)
            ready = []
        waited = None if self.conversations is None else self.conversations.waited()
        self.time.add(time.monotonic() - began, running, waited=waited)
        self.time.tokens = self._tokens()
        for group in ready:
            if self._tells_weights:  # now: others may come while it is graded
                group = group.with_piece(self.recovery.weights_version)
            if self.pool is None or not self.pool.grades(group.prompt.fields):
                self._finish(with_rewards(group, {}, self.config.reward.on_failure))
                continue
            self._grading[group.slot] = (group, {})
            self.pool.submit_group(
                [(group.slot, index) for index in range(len(group.completions))],
                as_graded(group),
                group.prompt.text,
                group.prompt.fields,
            )

    def _collect_rewards(self) -> bool:
        """Take the rewards that are there; False if a stop was requested meanwhile and they are not to be trusted."""
        if self.pool is None:
            return True
        waiting = not self._sampler.pending and bool(self._grading)
        began = time.monotonic()
        results = self.pool.poll(timeout=POLL_SECONDS if waiting else 0.0)
        if waiting:
            self.seconds_waiting_for_rewards += time.monotonic() - began
        if any(result.failure for _, result in results) and self.stop_requested():
            return False  # Slurm signals every process of a job: a reward function that died of that has not failed
        over = self._note_rewards(results)
        if over:
            self.counters.stop(over)
        return not over

    def _note_rewards(self, results: Sequence[tuple[tuple[int, int], RewardResult]]) -> str:
        """Note rewards, and finish the groups that have all of theirs.

        Return why the call has to stop, empty if it has not: the budget of judges is used up. Such a group never has
        all, so it is not in the journal, and a larger budget grades it.
        """
        why = ""
        for (slot, index), result in results:
            if is_over_budget(result) and self.config.judges.used_up == "stop":
                why = why or result.failure or ""
                continue
            group, graded = self._grading[slot]
            graded[index] = result
            if len(graded) == len(group.completions):
                del self._grading[slot]
                self._finish(with_rewards(group, graded, self.config.reward.on_failure))
        return why

    def _collect_paid_rewards(self) -> None:
        """Wait for what judges were asked, where the call stops for want of a budget: groups that are graded are kept.

        Requests beyond the budget are not sent, so this takes as long as those under way.
        """
        while self.pool is not None and self.pool.pending and self.counters.why_stopped():
            mark()
            results = self.pool.poll(timeout=POLL_SECONDS)
            if self.stop_requested():  # Slurm signals every process of a job: see above
                return
            self._note_rewards(results)

    @property
    def _tells_weights(self) -> bool:
        """True if several weights may sample a completion that is trained on."""
        return self._goes_on or (self.config.rollout.in_flight_updates and self.request.rollout >= 0)

    @property
    def _goes_on(self) -> bool:
        """True if a later rollout goes on with what this one leaves unfinished."""
        return self.request.enough is not None and self.config.rollout.unfinished == "continue"

    def _begun(self, slot: int, prompt: Prompt) -> Sequence[Completion]:
        """Return what earlier rollouts have sampled of a group; nothing if nothing was, or if that is damaged."""
        place = self.request.begun.get(slot)
        if place is None:
            return ()
        assert self.carried is not None
        group = self.carried.read(place)
        return () if group is None or group.prompt.index != prompt.index else group.completions

    def _leave_unfinished(self) -> None:
        """End the call without the groups that are not finished."""
        if not self._goes_on:
            self._sampler.abort()
        else:
            stopped = [group.with_piece(self.recovery.weights_version) for group in self._sampler.stop()]
            # Those that are sampled but not graded are graded when the next rollout takes them.
            left = [*stopped, *(group for group, _ in self._grading.values())]
            self.unfinished = {group.slot: group for group in left}
        if self.pool is not None:
            self.pool.drop()
        self._grading.clear()

    def _finish(self, group: Group) -> None:
        self._finished[group.slot] = group
        if self.journal is not None:
            self.journal.append([group])
        enough = self.request.enough
        self.counters.add_finished(group.slot, counts=enough is None or not enough.signal or self.has_signal(group))
        self.progress(len(group.completions), self._tokens())

    def _tokens(self) -> int:
        return self.engine.tokens_generated - self._tokens_before


def is_over_budget(result: RewardResult) -> bool:
    """Return whether a reward is missing because the budget of judges is used up."""
    return "over_budget" in result.outcomes.values()


def as_graded(group: Group) -> list[Sampled]:
    """Return the completions of a group as reward functions see them; a conversation has the environment's reward."""
    return [
        Sampled(c.text, len(c.tokens), tuple(c.tokens.tolist()), c.reward_parts.get(ENVIRONMENT), c.failure)
        for c in group.completions
    ]


def with_rewards(group: Group, results: Mapping[int, RewardResult], on_failure: str) -> Group:
    """Return the group with the reward of each completion; `on_failure` "exclude" excludes those without one.

    A conversation whose environment failed has none, whatever was graded of it. Without `results`, nothing was. One
    that no judge was asked about, for want of a budget, is excluded in any case.
    """

    def grade(completion: Completion, result: RewardResult | None) -> Completion:
        told = result or RewardResult(completion.reward, completion.reward_parts, None)
        failure = completion.failure or told.failure
        return replace(
            completion,
            reward=told.value if failure is None else 0.0,
            reward_parts=told.parts,
            outcomes=dict(told.outcomes),
            failure=failure,
            excluded=failure is not None and (on_failure == "exclude" or is_over_budget(told)),
        )

    return group.with_completions(tuple(grade(c, results.get(i)) for i, c in enumerate(group.completions)))
