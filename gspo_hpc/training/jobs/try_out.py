"""The job that samples a few prompts as training would, and grades them, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.data import hub_data
from gspo_hpc.data.prompts import Position, sizes
from gspo_hpc.data.records import Group
from gspo_hpc.data.sources import parts, stream
from gspo_hpc.evaluation import transcript
from gspo_hpc.evaluation.evaluate import EVAL_ROLLOUT
from gspo_hpc.models import hub
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.rollout.generation import Request, as_graded, with_rewards
from gspo_hpc.rollout.worker import RolloutWorker
from gspo_hpc.training.bringup import read_prompts
from gspo_hpc.training.jobs import one_rank
from gspo_hpc.training.sampling.base import training_sampling

SAMPLES = 4  # completions of a prompt, where fewer are not asked for or trained on


def try_out(
    target: Path,
    step: int | None,
    prompts: int,
    samples: int | None,
    overrides: Sequence[str],
    as_json: bool,
    remark: Callable[[str], None],
) -> str:
    """Return the first prompts of training with completions and their rewards, as text or as JSON.

    `target`, `step` and `remark` are as in :func:`gspo_hpc.training.jobs.evaluate.evaluate`. `samples` completions of
    each prompt, at most SAMPLES where it is None.
    """
    run = one_rank.run_of(target)
    config = _complete(one_rank.read_config(target, run, overrides))
    if (lack := one_rank.lack_of_memory(config)) is not None:
        remark(f"sampling {lack}")
    rows, _ = read_prompts(config)
    if prompts > len(rows):
        remark(f"the data has {len(rows)} prompts, fewer than the {prompts} that are asked for")
    order = stream.of(config, sizes(rows, config.data), 1, lambda size: 1)
    indices, _ = order.take(Position(), min(prompts, len(rows)))
    chosen = dict(enumerate(rows[index] for index in indices))
    count = samples or min(SAMPLES, config.batch.num_generations or SAMPLES)
    checkpoint = one_rank.checkpoint_of(run, step, remark)
    with one_rank.sampling_worker(config, checkpoint, list(chosen.values())) as worker:
        request = Request(range(len(chosen)), chosen, count, training_sampling(config), EVAL_ROLLOUT)
        groups = replace(worker, pool=None).generate(request).own  # graded below, for what training does not keep
        results = {slot: _graded(groups[slot], worker.pool) for slot in sorted(groups)}
        if worker.models is not None:
            results = _with_scores(groups, results, worker)
    nothing = not config.reward.functions
    graded = [(groups[slot], None if nothing else of_group) for slot, of_group in results.items()]
    return transcript.as_json(graded, config) if as_json else transcript.as_text(graded, config)


def _graded(group: Group, pool: RewardPool | None) -> list[RewardResult]:
    """Return what reward functions give each completion; nothing where none grades the group."""
    if pool is None or not pool.grades(group.prompt.fields):
        return [RewardResult(0.0, {}, one.failure) for one in group.completions]
    places = range(len(group.completions))
    pool.submit_group(places, as_graded(group), group.prompt.text, group.prompt.fields)
    found: dict[int, RewardResult] = {}
    while pool.pending:
        found |= dict(pool.poll(timeout=None))
    failures = [one.failure for one in group.completions]  # of an environment
    return [
        found[index] if why is None else replace(found[index], value=0.0, failure=why)
        for index, why in zip(places, failures, strict=True)
    ]


def _with_scores(
    groups: Mapping[int, Group], results: Mapping[int, list[RewardResult]], worker: RolloutWorker
) -> dict[int, list[RewardResult]]:
    """Return the rewards with what reward models give each completion."""
    on_failure = worker.config.reward.on_failure
    graded = {
        slot: with_rewards(groups[slot], dict(enumerate(of_group)), on_failure) for slot, of_group in results.items()
    }
    scored = one_rank.completions_of(worker).score(graded)
    return {
        slot: [
            replace(result, value=one.reward, parts=one.reward_parts, failure=one.failure, outcomes=dict(one.outcomes))
            for result, one in zip(of_group, scored[slot].completions, strict=True)
        ]
        for slot, of_group in results.items()
    }


def _complete(config: Config) -> Config:
    """Return the configuration with its files in local folders; raise ValueError if it has no prompts."""
    if not parts.training(config.data):
        raise ValueError("data.train is not set: give a file of prompts with data.train=FILE")
    return hub_data.with_files(hub.with_folder(config, teacher=False))
