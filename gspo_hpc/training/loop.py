"""The loop: generate -> reward -> advantage -> (log-probs) -> update -> sync weights -> save -> log.

Read :func:`train` top to bottom and you have seen the system. Everything in it is the same on every rank; what only
rank 0 does (files, console, tracking) is done by its observers.
"""

from __future__ import annotations

import time

from gspo_hpc.policy.passes import Abandoned
from gspo_hpc.policy.process_groups import any_rank
from gspo_hpc.rollout.resampling import Starved
from gspo_hpc.rollout.worker import Interrupted, JudgesOverBudget
from gspo_hpc.training import update
from gspo_hpc.training.progress import Progress
from gspo_hpc.training.session import Session


class TooManySkippedSteps(RuntimeError):
    """The gradient was not finite for too many steps in a row."""


def train(session: Session, progress: Progress) -> str:
    """Train from where `progress` stands to the last step; return "done" or "stopped"."""
    recipe, clock = session.recipe, session.clock
    print(f"device: {clock.device}", flush=True)  # for those who read this rank's log, and for diagnose
    try:
        _log_before_first_step(session, progress)
        while progress.cursor.step < recipe.max_steps:
            step = progress.cursor.step + 1
            clock.begin(step)
            with clock.traced(step):
                if progress.cursor.update == 0:
                    rollout = session.sampler.sample(
                        progress.cursor, progress.start
                    )  # sync, generate, reward, advantage
                    groups = session.logprobs.add(rollout.groups)  # only the passes that are needed
                    progress.begin_rollout(rollout, groups, clock.elapsed())
                    del rollout, groups  # so that nothing of it is left when the next one is sampled
                assert progress.groups is not None
                session.weights.sleep()  # after a resume between two updates, engines may be awake from their start
                batch = update.minibatch(progress.groups, recipe.config, progress.cursor.update)
                recorded = recipe.recorded_slots(step, batch.table)
                with clock.phase("update"):
                    result = update.step(
                        session.policy,
                        batch,
                        progress.objective(recipe.objective),
                        recipe.config,
                        recorded=recorded,
                        sampled_by_this=recipe.samples_at_once and progress.cursor.step == progress.weights_version,
                        monitor=clock.monitor,
                    )
            if result is not None and not result.skipped:
                session.weights.mark_updated()
            before = progress.advance(batch, result, recipe.updates_per_rollout)
            session.logprobs.refresh(progress.cursor)  # the reference, if that is due
            progress.record = session.recorder.record(before, progress, batch, result)
            del batch
            progress.adapt(recipe.objective, result)
            if result is not None:
                session.watch.judge(result.sums, progress.weights_version)  # before a bad update is saved
            if recipe.saves_after(step):
                _save(session, progress)
            finish_step(session, progress)  # evaluate if due, log
            _show_profile(session, step)
            session.checkpoints.check()
            if any_rank(clock.monitor.stop_requested(), session.policy.ranks.device):
                raise Interrupted
    except (Interrupted, Abandoned) as why:
        # What was sampled ahead by weights that are gone has to be whole, or the run goes on from the last checkpoint.
        unsaved = progress.cursor.step > progress.saved_step and session.sampler.is_settled(progress.cursor)
        if unsaved and session.checkpoints.can_save():
            _save(session, progress)
        session.checkpoints.wait()
        if isinstance(why, JudgesOverBudget):  # the same command would end the same way
            raise
        return "stopped"
    except Starved:  # what was trained so far is kept
        if progress.cursor.step > progress.saved_step and session.checkpoints.can_save():
            _save(session, progress)
        session.checkpoints.wait()
        raise
    session.checkpoints.wait()
    return "done"


def _log_before_first_step(session: Session, progress: Progress) -> None:
    """Log the step whose checkpoint was saved but not logged, or evaluate before the first step of all."""
    if progress.record is not None:
        finish_step(session, progress)
        return
    fresh = progress.cursor.step == 0 and not progress.evaluated
    if fresh and session.recipe.config.eval.before and session.evaluator.has_prompts:
        scores = session.evaluator.run(0, "before")
        session.observers.step({"step": 0, "time": time.time(), "attempt": session.recipe.attempt} | scores)


def _save(session: Session, progress: Progress) -> None:
    # Engines are awake only if a rollout or an evaluation was stopped. A save needs the memory, and they are done.
    session.weights.sleep(level=2)
    session.sampler.settle(progress.cursor)
    session.checkpoints.save(progress.checkpoint_state(session.sampler.ahead()))
    progress.saved_step = progress.cursor.step


def finish_step(session: Session, progress: Progress) -> None:
    """Evaluate if the step that was made is due for it, log the step, and stop a run that does not move."""
    recipe, cursor, clock = session.recipe, progress.cursor, session.clock
    scores = {}
    if recipe.evaluates_after(cursor.step) and session.evaluator.has_prompts:
        scores = session.evaluator.run(cursor.step, "after" if cursor.step == recipe.max_steps else "during")
    seconds = {f"seconds/{phase}": clock.seconds[phase] for phase in ("save", "eval") if phase in clock.seconds}
    if scores and cursor.update:
        session.weights.sleep()  # the next step is another update of this rollout, and needs the memory
    assert progress.record is not None
    session.observers.step(progress.record | seconds | scores)
    limit = recipe.config.faults.max_skipped_steps
    if cursor.skipped_in_a_row > limit:
        raise TooManySkippedSteps(
            f"the gradient was not finite for {cursor.skipped_in_a_row} steps in a row (faults.max_skipped_steps "
            f"{limit}): lower optimizer.lr, or examine the rewards and the gap in metrics.jsonl"
        )
    progress.record = None


def _show_profile(session: Session, step: int) -> None:
    """Give the observers the table of a profiled step, with what came after its update. Collective."""
    clock = session.clock
    if clock.profiles(step):
        session.observers.profile(step, clock.measured().table(step), clock.traces)
