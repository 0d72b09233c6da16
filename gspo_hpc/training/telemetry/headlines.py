"""The lines with which a run begins and ends on the console: which run, what trains on what, the plan; the result.

Nothing here is collective: rank 0 calls it with what it has.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.planning import trained
from gspo_hpc.planning.estimates import time
from gspo_hpc.planning.plan import Plan
from gspo_hpc.runs import commit, distillation, learning, spending
from gspo_hpc.system.terminal import program
from gspo_hpc.system.text import duration


def opening(config: Config, plan: Plan, where: str, prompts: tuple[int, int]) -> list[str]:
    """Return three lines: the run, what trains on what, and the plan.

    `where`: the run directory with the attempt; `prompts`: how many are trained on, and how many are unseen.
    """
    q, parallel = plan.quantities, config.parallel
    machines = f"{config.cluster.nodes} x " if config.cluster.nodes > 1 else ""
    kind = config.cluster.gpu or "GPU"
    unit = f"{config.cluster.gpus_per_node} {'CPU rank' if config.cluster.platform == 'cpu' else kind}"
    apart = ""
    if (others := plan.layout.get("generation_gpus_per_node")) is not None:
        machines = f"{config.training_nodes} x "
        apart = f" and generates on {config.cluster.generation_nodes} x {others}"
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "DP": q.get("dp_size", 1),
    }
    cut = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1 or name == "DP")
    engines = plan.layout.get("num_engines", 1)
    adapter = trained.adapter(config)
    what = f"{adapter} of {config.model.path}" if adapter else config.model.path
    taught = f", taught by {config.algorithm.teacher}," if config.algorithm.has_teacher else ""
    begins = f"{config.algorithm.name} trains {what}{taught} on {machines}{unit}{'s' * (config.world_size > 1)}{apart}"
    completions, per_prompt = int(q["generation_batch_size"]), int(q["num_generations"])
    updates = int(q["steps_per_generation"]) * config.batch.num_iterations
    rollout = f"{completions:,} completions ({completions // per_prompt:,} prompts x {per_prompt})"
    return [
        f"run {config.run.name}: {where}",
        f"{begins} ({cut}; {_count(engines, 'engine')}); {_count(prompts[0], 'prompt')}, {prompts[1]:,} unseen",
        f"plan: {_count(config.run.max_steps or 0, 'step')}, rollouts of {rollout} with {_count(updates, 'update')}"
        f"{_expected(config, plan)}",
    ]


def closing(config: Config, records: Sequence[Mapping[str, Any]], reason: str, run: Path) -> Iterator[tuple[str, bool]]:
    """Yield four lines: the result, what was learnt, where it is and what comes next. True marks what should worry.

    Where judges were asked, one more says what they were asked.
    """
    steps = [record for record in records if record.get("step") and "seconds" in record]
    step, last = max((int(record["step"]) for record in steps), default=0), config.run.max_steps or 0
    if not steps:
        yield f"{reason}: no step was made", True
        return
    spent = duration(sum(float(record["seconds"]) for record in steps))
    own, found = program(), learning.judge(records)
    nothing = found is not None and found.nothing
    if reason == "done":
        yield f"done{', but learnt nothing' * nothing}: {_count(step, 'step')} in {spent}", nothing
    else:
        yield f"stopped after step {step:,} of {last:,}, and saved; {spent} of steps so far", False
    taught = distillation.of_run(config, records)
    beside = "" if taught is None or taught.alone or not taught.divergences else f"; {taught.course}"
    if found is not None and found.worry:
        yield (
            f"{found.numbers}{beside}; {found.worry}: {own} diagnose {shlex.quote(str(run))} names what to look at",
            True,
        )
    elif found is not None:
        yield f"{found.numbers}{beside}", False
    if (account := spending.read(run / spending.FOLDER)) is not None:
        yield f"asked of judges: {spending.words(account, config.judges)}", False
    whole = commit.list_committed(run / "checkpoints")
    kept = f"checkpoint {int(whole[-1].name)}, " if whole else "no checkpoint, "
    yield f"in {run}: {kept}metrics.jsonl, samples.jsonl", False
    if reason == "done":
        named = shlex.quote(str(run))
        longer = "a higher run.max_steps goes on"
        # A rate that decays has ended where the run does, and epochs are the run's own: neither can change.
        if config.optimizer.lr_decay_style != "constant" or config.run.max_epochs is not None:
            longer = "its weights as model.path begin a longer run"
        more = "then a new run" if nothing else f"{own} export {named} --out FOLDER; {longer}"
        yield f"next: {own} report {named}, {more}", False
    else:
        yield "next: the same command goes on from there", False


def _expected(config: Config, plan: Plan) -> str:
    """Return the estimated time of a step and of the run, if there is an estimate."""
    times, _ = time.of_plan(config, plan)
    if times is None:
        return ""
    told = times.to_json()
    hours = "" if told["hours"] is None else f", {told['hours']:,.1f} hours"
    return f"; about {told['seconds_per_step']:,.0f} s a step{hours}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
