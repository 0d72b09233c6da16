"""The job that trains: it builds the parts of one rank, from the newest whole checkpoint, and runs the loop."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

from gspo_hpc.algorithms import objective
from gspo_hpc.algorithms.terms.adaptive import AdaptiveWeights
from gspo_hpc.checkpoint import sharded
from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.config import derived, loader
from gspo_hpc.config.derived import role_of
from gspo_hpc.config.schema import Config
from gspo_hpc.data.sources import stream
from gspo_hpc.exchange.transport import gather_unordered
from gspo_hpc.planning import plan
from gspo_hpc.policy import offload
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import (
    UNWATCHED_MINUTES,
    WATCHED_MINUTES,
    Ranks,
    barrier,
    broadcast_bytes,
    start,
    start_generating,
    stop,
)
from gspo_hpc.rollout.resampling import DrawLimits
from gspo_hpc.rollout.worker import RolloutWorker
from gspo_hpc.runs import commit, sample_record
from gspo_hpc.runs.directory import Attempt, RunDir
from gspo_hpc.runs.spending import Account
from gspo_hpc.system.control import Client
from gspo_hpc.system.exit_codes import DONE, REQUEUE
from gspo_hpc.system.files import open_log
from gspo_hpc.system.progress import mark, waiting
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.trackers import registry
from gspo_hpc.trackers.feed import Feeds
from gspo_hpc.training import loop
from gspo_hpc.training.agreement.gap import Baseline
from gspo_hpc.training.agreement.watch import RolloutGapMonitor
from gspo_hpc.training.bringup import (
    LoadedPrompts,
    load_prompts,
    read_architecture,
    set_threads,
    start_rollout_worker,
)
from gspo_hpc.training.checkpoint_state import CheckpointState, read_layout
from gspo_hpc.training.checkpoints import Checkpoints, new_staging
from gspo_hpc.training.observers.base import Observers, StepObserver
from gspo_hpc.training.observers.console import ConsoleLines, ProgressBar, TrackerWake
from gspo_hpc.training.observers.files import CheckpointCommit, files_of_steps
from gspo_hpc.training.observers.memory import MemoryWatch
from gspo_hpc.training.observers.own import HURRY, PATIENCE, OwnObservers
from gspo_hpc.training.observers.record import SampleRecord
from gspo_hpc.training.phases import Evaluator, LogprobPasses
from gspo_hpc.training.progress import Progress
from gspo_hpc.training.recipe import PromptData, Recipe
from gspo_hpc.training.reference import AnyReference, load_teacher, moving, reference_of, refuse_other_teacher
from gspo_hpc.training.sampling.base import Sampler
from gspo_hpc.training.sampling.colocated import ColocatedSampler
from gspo_hpc.training.sampling.judged import signal_of
from gspo_hpc.training.serving import generators
from gspo_hpc.training.serving.engines import RemoteEngines
from gspo_hpc.training.serving.link import GeneratorLink
from gspo_hpc.training.serving.sampler import RemoteSampler
from gspo_hpc.training.serving.weights import RemoteWeights
from gspo_hpc.training.session import Session
from gspo_hpc.training.step_record import StepRecorder
from gspo_hpc.training.sync import EngineWeights, WeightSync
from gspo_hpc.training.telemetry import headlines
from gspo_hpc.training.telemetry.accelerator import Accelerator
from gspo_hpc.training.telemetry.collectives import CollectiveTime
from gspo_hpc.training.telemetry.console import Console
from gspo_hpc.training.telemetry.meter import Meter
from gspo_hpc.training.telemetry.step_clock import StepClock

_EXIT_CODES = {"done": DONE, "stopped": REQUEUE}  # for the trackers; a failure has 1
_OTHER_LAYOUT = "weights, optimizer and prompts are the same, but sums are rounded differently: not bit for bit"


def train(
    run: RunDir,
    attempt: Attempt,
    flag: StopFlag,
    terminal: TextIO,
    control: Client | None,
    report: Callable[[BaseException], object],
) -> str:
    """Train from where the run directory stands; return "done" or "stopped".

    Rank 0 talks to the person at `terminal`, every rank through `control` to the process that watches it. An error is
    given to `report` before anything is closed.
    """
    config = loader.load(attempt.config, run_code=True)
    collectives = CollectiveTime(config.cluster.platform)  # before there are any
    # In server mode ranks wait for a whole rollout, or a whole training phase; the launcher ends them if one dies.
    patience = UNWATCHED_MINUTES if control is None and config.rollout.mode == "colocate" else WATCHED_MINUTES
    if role_of(config, int(os.environ["RANK"])).generates:
        placed = start_generating(config, patience, control)
        set_threads(config)
        return generators.generate(config, placed, run.rollouts, flag, report)
    ranks = start(config, patience, control)
    set_threads(config)
    kept = os.fdopen(open_log(attempt.console), "w", encoding="utf-8") if ranks.rank == 0 else None
    job = TrainingJob(run, attempt, config, ranks, Console.of(config, terminal, kept))
    try:
        reason = job.train(flag, control, collectives)
        job.end_generators(reason)
    except BaseException as error:
        report(error)
        job.close_after_error()  # but not the process groups: others may never join what theirs still wait for
        raise
    job.close(_EXIT_CODES[reason])
    job.show_result(reason)
    stop()
    return reason


class TrainingJob:
    """One rank of one attempt, between the start of its process group and its end."""

    def __init__(self, run: RunDir, attempt: Attempt, config: Config, ranks: Ranks, console: Console) -> None:
        self._run, self._attempt, self._config, self._ranks, self._console = run, attempt, config, ranks, console
        self._worker: RolloutWorker | RemoteEngines | None = None
        self._trackers: Feeds | None = None
        self._own_observers: OwnObservers | None = None
        self._checkpoints: Checkpoints | None = None

    def train(self, flag: StopFlag, control: Client | None, collectives: CollectiveTime) -> str:
        """Build all parts and run the loop; return "done" or "stopped"."""
        config, ranks = self._config, self._ranks
        monitor = PassMonitor(stop_requested=lambda: flag.requested is not None)
        link = None if ranks.job_store is None else GeneratorLink(config, ranks, self._run.rollouts, flag)
        self._worker = None if link is None else link.engines
        prompts = load_prompts(config, ranks.exchange)
        policy, reference, progress = self._load_policy((prompts.count, sum(prompts.unseen_sizes.values())))
        if progress.cursor.step >= (config.run.max_steps or 0) and progress.record is None:
            return "done"
        weight_sync = WeightSync(policy, prompts.probe, monitor)
        worker = link.engines if link is not None else self._start_worker(weight_sync, monitor, progress.baseline)
        observers = Observers([*self._make_observers(), *self._make_memory_watch(flag), *self._make_sample_record()])
        recipe = self._make_recipe()
        data = self._make_data(recipe, prompts)
        saver = Saver(policy, background=config.checkpoint.async_save, reference=moving(reference, config))
        clock = StepClock(
            Meter(collectives, Accelerator(ranks.device), ranks.device),
            monitor,
            profile_steps=config.tracking.profile_steps,
            traces=self._attempt.traces,
            rank=ranks.rank,
        )
        weights: EngineWeights | RemoteWeights
        sampler: Sampler
        if link is not None:
            weights = link.weights(policy, prompts.probe, clock, progress.baseline)
            sampler = RemoteSampler(
                recipe, data, link.engines, weights, self._run.rollouts, observers, clock, progress.ahead
            )
        else:
            assert isinstance(worker, RolloutWorker)
            weights = EngineWeights(weight_sync, worker, clock, progress.baseline)
            sampler = ColocatedSampler(recipe, data, worker, weights, self._run.rollouts, observers, clock)
        staging = partial(new_staging, self._run, ranks)
        self._checkpoints = Checkpoints(saver, staging, control, observers, clock, ranks)
        account = Account(self._run.spending) if ranks.rank == 0 else None
        session = Session(
            recipe=recipe,
            policy=policy,
            sampler=sampler,
            logprobs=LogprobPasses(recipe, policy, reference, clock),
            evaluator=Evaluator(config, data, worker, weights, observers, clock),
            weights=weights,
            watch=RolloutGapMonitor(config, progress.baseline),
            checkpoints=self._checkpoints,
            recorder=StepRecorder(recipe, weights, worker.recovery, observers, clock, account),
            observers=observers,
            clock=clock,
        )
        mark("ready")
        return loop.train(session, progress)

    def end_generators(self, outcome: str) -> None:
        """Have the ranks that only generate end with this outcome, too."""
        if isinstance(self._worker, RemoteEngines):
            self._worker.end(outcome)

    def close_after_error(self) -> None:
        """Wait a moment for a save under way, which then need not be repeated, and close."""
        if self._checkpoints is not None:
            with contextlib.suppress(Exception):  # the error that is reported is the one before
                self._checkpoints.wait_briefly()
        self.close(1)

    def close(self, exit_code: int) -> None:
        """Close the engine, the reward pool, the user's observers and the trackers."""
        if self._worker is not None:
            self._worker.close()
        if self._own_observers is not None:
            self._own_observers.close(PATIENCE if exit_code == DONE else HURRY)
        if self._trackers is not None:
            self._trackers.close(exit_code)

    def show_result(self, reason: str) -> None:
        """Print how the run stands at the end of this attempt."""
        if self._ranks.rank != 0:
            return
        try:
            for text, bad in headlines.closing(self._config, self._run.read_metrics(), reason, self._run.path):
                (self._console.warn if bad else self._console.note)(text)
        except (OSError, ValueError) as error:  # a file that somebody changed: the run is over and well all the same
            self._console.warn(f"the result cannot be shown: {error}")

    def _show_start(self, whole: Path | None, prompts: tuple[int, int]) -> None:
        """Print which run this is, what trains on what, and the plan; the tracker says later where it is."""
        if self._ranks.rank != 0:
            return
        start = (
            "from the beginning" if whole is None else f"from step {int(whole.name)} of {self._config.run.max_steps}"
        )
        where = f"{self._run.path}, attempt {self._attempt.number}, {start}"
        self._console.header(headlines.opening(self._config, plan.make_plan(self._config), where, prompts))

    def _load_policy(self, prompts: tuple[int, int]) -> tuple[Policy, AnyReference | None, Progress]:
        """Return the policy as the newest whole checkpoint has it, or as model.path does, and where the run stands."""
        config, ranks = self._config, self._ranks
        whole = newest_checkpoint(self._run, ranks, self._console)
        self._show_start(whole, prompts)
        mark("loading")
        teacher = load_teacher(config, ranks)  # before the policy: each is on the GPU alone while it is loaded
        policy = Policy(read_architecture(config), config, ranks)
        if whole is None or policy.has_adapters or derived.reference_is_start(config):  # else a checkpoint has all
            policy.load(str(config.model.path))
        reference = reference_of(policy, teacher)
        policy.make_optimizer()
        with waiting():
            barrier(ranks.device)
        logged = cut_metrics(self._run, whole, ranks)
        weights = AdaptiveWeights.first(objective.resolve(config.algorithm))
        fingerprint = None if teacher is None else teacher.fingerprint
        if whole is None:
            return policy, reference, Progress(evaluated=logged >= 0, weights=weights, teacher=fingerprint)
        if (before := read_layout(whole)) != config.layout:
            self._note(f"{_layout_text(before)} became {_layout_text(config.layout)}: {_OTHER_LAYOUT}")
        sharded.load(policy, whole, moving(reference, config))
        state = CheckpointState.read(whole, ranks.exchange, prompts[0])
        refuse_other_teacher(state.teacher, fingerprint, config.algorithm.teacher)
        groups = ranks.exchange.gather_table(state.groups)
        record = state.record if logged < state.cursor.step else None
        # Another layout rounds differently, so gaps are compared with its own first ones.
        baseline = state.baseline if before == config.layout else Baseline()
        resumed = Progress(
            state.cursor,
            groups,
            record,
            evaluated=True,
            baseline=baseline,
            ahead=state.ahead,
            weights=None if weights is None else state.weights or weights,
            teacher=fingerprint,
            retired=state.retired,
            rates=state.rates,
            sources=state.sources,
            carried=state.carried,
        )
        return policy, reference, resumed

    def _start_worker(self, weight_sync: WeightSync, monitor: PassMonitor, baseline: Baseline) -> RolloutWorker:
        policy = weight_sync.policy
        self._worker = worker = start_rollout_worker(
            self._config,
            self._ranks,
            experts=policy.arch.experts is not None,
            make_room=lambda: offload.leave_to_engines(policy),
            sync_weights=lambda engine: weight_sync.run(engine, baseline.probe)[1],
            stop_requested=monitor.stop_requested,
            note=self._note,
            rollouts=self._run.rollouts,
            has_signal=signal_of(self._config),
        )
        return worker

    def _make_observers(self) -> list[StepObserver]:
        """Return the observers of this rank and start its trackers; ranks other than 0 have none."""
        if self._ranks.rank != 0:
            return []
        config, run, console = self._config, self._run, self._console
        # wandb's process inherits the blocked signals: Slurm sends them to every process, and what was logged counts.
        services, tracked = registry.chosen(config.tracking), registry.tracked_run(run, config)
        self._trackers = Feeds(services, tracked, warn=console.warn, announce=console.note)
        self._own_observers = OwnObservers(config.tracking.observers, run.path, console.warn)
        return [*make_observers(run, config, self._trackers, console), self._own_observers]

    def _make_memory_watch(self, flag: StopFlag) -> list[StepObserver]:
        """Return the observer of this node's memory, on one rank of the node."""
        if self._ranks.local_rank != 0:
            return []
        return [MemoryWatch(self._config, flag.request, self._console.warn if self._ranks.rank == 0 else print)]

    def _make_sample_record(self) -> list[StepObserver]:
        """Return the observer that records samples, on every rank, if the config asks for one."""
        if self._config.tracking.record_interval is None:
            return []
        return [SampleRecord(self._run, self._config, self._ranks.exchange.transport, self._note)]

    def _make_recipe(self) -> Recipe:
        config = self._config
        quantities = plan.make_plan(config).quantities
        return Recipe(
            config=config,
            objective=objective.resolve(config.algorithm),
            passes=derived.passes_needed(config),
            num_rollout_prompts=int(quantities["num_rollout_prompts"]),
            updates_per_rollout=int(quantities["steps_per_generation"]) * config.batch.num_iterations,
            attempt=self._attempt.number,
        )

    def _make_data(self, recipe: Recipe, prompts: LoadedPrompts) -> PromptData:
        limits = DrawLimits.of(recipe.config.rollout, recipe.num_rollout_prompts)
        order = stream.of(recipe.config, prompts.sizes, limits.wanted, limits.window, prompts.prior)
        return PromptData(order, prompts.train, prompts.unseen, prompts.unseen_sizes)

    def _note(self, text: str) -> None:
        if self._ranks.rank == 0:
            self._console.note(text)


def make_observers(run: RunDir, config: Config, trackers: Feeds, console: Console) -> list[StepObserver]:
    """Return the observers of rank 0, in the order in which they get results."""
    return [
        *files_of_steps(run, config.tracking.samples, config.run.max_steps or 0),
        TrackerWake(trackers),
        ConsoleLines(console),
        ProgressBar(console),
        CheckpointCommit(run, config.layout, config.checkpoint.keep),
    ]


def newest_checkpoint(run: RunDir, ranks: Ranks, console: Console) -> Path | None:
    """Return the newest whole checkpoint. Rank 0 chooses, and all ranks read their share of its files. Collective."""

    def share(path: Path) -> list[str]:
        """Return what any rank finds wrong with its share of a checkpoint's files."""
        found = json.dumps(commit.verify(path, ranks.rank, ranks.world_size)).encode()
        with waiting():  # for ranks whose share takes longer
            answers = gather_unordered(ranks.exchange.transport, found)
        return list(dict.fromkeys(problem for of_rank in answers for problem in json.loads(of_rank)))

    def ask(path: Path) -> list[str]:
        broadcast_bytes(path.name.encode(), ranks.device)
        return share(path)

    if ranks.rank == 0:
        commit.clean_staging(run.checkpoints)
        whole, remarks = commit.newest_whole(run.checkpoints, put_aside=True, verify=ask)
        for remark in remarks:
            console.warn(remark)
        broadcast_bytes(b"", ranks.device)  # nothing more is to be read
        name = whole.name if whole is not None else ""
    else:
        while asked := _from_rank_0(ranks):
            share(run.checkpoints / asked)
        name = ""
    with waiting():  # for rank 0
        name = broadcast_bytes(name.encode(), ranks.device).decode()
    return run.checkpoints / name if name else None


def _from_rank_0(ranks: Ranks) -> str:
    with waiting():
        return broadcast_bytes(b"", ranks.device).decode()


def cut_metrics(run: RunDir, checkpoint: Path | None, ranks: Ranks) -> int:
    """Cut metrics.jsonl and the record of samples back to the checkpoint's step. Collective.

    Return the last step of metrics.jsonl then, -1 for none.
    """
    last = -1
    if ranks.rank == 0:
        step = int(checkpoint.name) if checkpoint is not None else 0
        sample_record.cut(run.record, step)
        run.truncate_metrics(step)
        last = max((int(record["step"]) for record in run.read_metrics()), default=-1)
    with waiting():  # for rank 0
        return int(broadcast_bytes(str(last).encode(), ranks.device))


def _layout_text(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())
