"""Refuse a run that cannot work, on the machine of the user and before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gspo_hpc.config.schema import Config
from gspo_hpc.data import hub_data
from gspo_hpc.data.rows import Row, listed, load_parts
from gspo_hpc.data.sources import parts
from gspo_hpc.data.sources.parts import Part
from gspo_hpc.launch import grading, preflight, prompt_lengths
from gspo_hpc.launch.notify import addresses
from gspo_hpc.models import hub
from gspo_hpc.planning.fixes import repair
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.planning.quantities import with_steps
from gspo_hpc.rewards import registry
from gspo_hpc.system.terminal import paint


def require(config: Config) -> Plan:
    """Return the plan of a config that can be run, with the rows of its data as far as they can be counted.

    Raises ValueError for missing settings, for addresses of notifications that are not there, for a run directory that
    cannot be written, for what this version only plans, and for every broken rule.
    """
    if missing := config.missing():
        raise ValueError(f"to train, give also: {', '.join(missing)}")
    addresses.resolve(config.notify)
    preflight.refuse(config, [preflight.run_place])
    return _planned(config)


def _planned(config: Config) -> Plan:
    """Return a plan whose rules hold. Raises ValueError, with the nearest fix, if one is broken."""
    rows = preflight.rows(config)
    plan = make_plan(config, rows)
    offered = repair.offered(config, rows) if plan.broken and not plan.not_run else []
    nearest = [fix for fix in offered if not fix.left]
    plan.require(f"nearest fix: {nearest[0]} (gspo-hpc plan shows others)" if nearest else "")
    return plan


def rehearse(
    config: Config, more: Sequence[preflight.Check] = (), *, here: bool = True, tried: set[str] | None = None
) -> Config:
    """Return the config of a dry run, with the paths that caches of the hub have.

    Raises ValueError for whatever a run would be refused for in what is given and is on this machine: its plan, its
    inputs, its model, its run directory, and `more`. What is not there is said on standard error. `tried` is that of
    several dry runs: inputs that have passed, and what was said.
    """
    tried = set() if tried is None else tried
    config = hub_data.with_cached_files(hub.with_cached_folder(config))
    config = with_steps(config, preflight.rows(config))
    _planned(config)
    found = preflight.problems(config, [*preflight.CHECKS, *more])
    if wrong := [problem for problem in found if not problem.absent]:
        raise ValueError("\n".join(map(str, wrong)))
    for text in (f"{problem.key} {problem.text}" for problem in found):
        if text not in tried:
            print(f"{paint('not checked:', '33', sys.stderr)} {text}", file=sys.stderr)
            tried.add(text)
    inputs = repr((config.data, config.reward))
    whole = config.reward.functions and not any(problem.key.startswith(("data.", "reward.")) for problem in found)
    if whole and inputs not in tried:
        check_inputs(config, here=here)
        tried.add(inputs)
    if not any(problem.key.startswith(("data.", "model.", "environment.")) for problem in found):
        prompt_lengths.check(config, tried)
    return config


def resolved(config: Config) -> Config:
    """Return the config that a run is made of: its length in steps, also where it was given in passes over the data.

    Raises ValueError if the prompts of data.train cannot be counted.
    """
    if config.run.max_epochs is None or config.run.max_steps is not None or not parts.training(config.data):
        return config  # if something is missing or given twice, the plan says so
    rows = preflight.rows(config)
    if rows is None:
        preflight.refuse(config, [preflight.data])
        named = ", ".join(part.path for part in parts.training(config.data))
        raise ValueError(
            f"run.max_epochs: the prompts of {named} cannot be counted: give data that can be read here, or "
            "run.max_steps"
        )
    return with_steps(config, rows)


def check_inputs(config: Config, *, here: bool = True) -> None:
    """Raise ValueError for malformed rows and for reward functions that can grade nothing, which are tried.

    `here`: the run will be on this machine, so that a file which cannot be loaded here will not be there either. Nodes
    may have libraries and variables that this machine has not.
    """
    preflight.refuse(config, preflight.INPUTS)
    if config.reward.functions or not config.algorithm.has_teacher:
        registry.check(config.reward)  # that there is a function, too
    # Not all at once: files may be large.
    rows = [
        *grading.look((part, load_parts([part], config.data, config.run.seed)) for part in parts.every(config.data))
    ]
    if not rows:
        return
    from gspo_hpc.rewards import trial  # only here: processes come with it, which help can do without

    first, memory, sandbox = rows[0].first, config.reward.memory_gb, config.sandbox
    if config.environment.talks:
        from gspo_hpc.rewards.environments.turns import asked, named, turn_function

        fields = asked(first.fields, 1, None)
        (found,) = trial.run([turn_function(config)], "", fields, memory_gb=memory, sandbox=sandbox)
        if found.failure is not None and (found.certain or (here and found.not_here)):
            raise ValueError(
                f"{named(config)} {found.failure}\nthis is so for each of "
                f"{len(trial.TEXTS)} messages in a conversation about {first.where}"
            )
    if not config.reward.functions:
        return
    for one in rows:
        if one.part.trains or len(rows) == 1:
            _check_grading(config, one.part, one.first, here=here)
    if faults := [fault for one in rows for fault in grading.refused(config, one)]:
        raise ValueError(listed("reward.functions: rows of the data lack what reward functions read", faults))


def _check_grading(config: Config, part: Part, first: Row, *, here: bool) -> None:
    """Raise ValueError for reward functions that can grade nothing of a row; they are called on a few texts."""
    from gspo_hpc.rewards import trial

    names, terms = registry.part_names(config.reward), registry.source_weights(config.reward, part.source)
    functions = [config.reward.functions[term] for term in terms]
    memory = config.reward.memory_gb
    outcomes = trial.run(functions, first.text, first.fields, memory_gb=memory, sandbox=config.sandbox)
    wrong = [
        f"{names[term]} {outcome.failure}"
        for term, outcome in zip(terms, outcomes, strict=True)
        if outcome.failure is not None and (outcome.certain or (here and outcome.not_here))
    ]
    if wrong:
        has = ", ".join(first.fields) or "none"
        raise ValueError(
            f"reward.functions: {'; '.join(wrong)}\nthis is so for each of {len(trial.TEXTS)} trial completions of "
            f"{first.where} (fields: {has})"
        )


def check_model(config: Config, tried: set[str] | None = None) -> None:
    """Raise ValueError if a folder lacks something, or its parts are not of one model, or the teacher's of another.

    Then the prompts are tokenized, if that is possible here: ValueError for those that are too long, as a rank raises
    it. `tried` is that of :func:`gspo_hpc.launch.prompt_lengths.check`.
    """
    preflight.refuse(config, preflight.FOLDERS)
    prompt_lengths.check(config, tried)
