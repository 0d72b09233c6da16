"""Checks of the inputs of a config: model, data files, plan, reward functions, environment and tools."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.config.derived import has_unseen
from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Config
from gspo_hpc.data import counting, hub_data
from gspo_hpc.data.files.formats import ARROW, JSONL, PARQUET, kind
from gspo_hpc.data.rows import Row, first_of, load_parts
from gspo_hpc.data.sources import parts
from gspo_hpc.data.sources.parts import Part
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.doctor import model
from gspo_hpc.doctor.finding import Finding, Section, gib, shortened
from gspo_hpc.launch import grading, preflight, prompt_lengths
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.rewards import registry, trial
from gspo_hpc.rewards.environments.turns import asked, named, turn_function
from gspo_hpc.system.text import first_line

ROWS = 1000  # rows of a large file that are read


def findings(config: Config, *, load_functions: bool = True) -> list[Finding]:
    """Return the findings of the group. `load_functions`: call reward functions and environment on short texts."""
    section = Section("inputs")
    model.check(config, section)
    looked, rows = _training(section, config)
    first = looked[0][1][0] if looked else None
    for part in parts.unseen(config.data):
        own, _ = _data(section, "evaluation data", part, config)
        looked += [(part, own)] if own else []
    if config.eval.interval is not None and not has_unseen(config.data):
        text = "eval.interval is set, but data.eval is not"
        section.warn("evaluation data", text, "set data.eval or data.train_ratio, or eval.interval=null")
    _lengths(section, config)
    _plan(section, config, rows)
    if _reward_functions(section, config, first, load_functions):
        _odd_rows(section, config, looked)
    _environment(section, config, first, load_functions)
    may_be_elsewhere = (preflight.teacher, preflight.reward_models, preflight.prometheus)
    for check in (preflight.notifications, preflight.observers, *may_be_elsewhere, preflight.run_directory):
        for problem in check(config):
            text = "; ".join(line.strip() for line in f"{problem.key}: {problem.text}".splitlines())
            tell = section.warn if check in may_be_elsewhere and problem.absent else section.fail
            tell(check.__name__.replace("_", " "), text, problem.fix or "correct this setting, or what it names")
    return section.findings


def _plan(section: Section, config: Config, rows: int | None) -> None:
    if missing := config.missing():
        section.fail(
            "config", f"the config lacks {', '.join(missing)}", "add them to the file, or give them as key=value"
        )
    plan = make_plan(config, rows)
    if plan.broken:
        rules = list(dict.fromkeys(item.rule for item in plan.broken))
        nearest = search.find(config, rows, limit=1)
        count = f"{len(plan.broken)} broken rule{'s' * (len(plan.broken) > 1)} ({', '.join(rules)})"
        fix = f"{nearest[0]}; gspo-hpc plan shows other fixes" if nearest else "gspo-hpc plan shows the broken rules"
        section.fail("plan", f"{count}: {first_line(plan.broken[0].message)}", fix)
    elif plan.not_run:
        more = f" (and {len(plan.not_run) - 1} more)" if len(plan.not_run) > 1 else ""
        section.fail("plan", plan.not_run[0].reason + more, "gspo-hpc plan shows what this version does not run")
    else:
        section.ok("plan", "the plan is valid: every rule that could be checked holds")
    for text in plan.warnings:
        section.warn("plan", first_line(text), "gspo-hpc plan explains the warning")


def _training(section: Section, config: Config) -> tuple[list[tuple[Part, list[Row]]], int | None]:
    """Add the findings of what is trained on; return the rows that were read, and how many there are if all were."""
    given = parts.training(config.data)
    if not given:
        section.skip("training data", "no file is given")
        return [], None
    found = [_data(section, "training data", part, config) for part in given]
    counts = [count for _, count in found if count is not None]
    total = sum(counts) if len(counts) == len(found) else None
    if total is not None and config.data.deduplicate:  # repeated rows of other sources, too
        total = preflight.rows(config)
    return [(part, rows) for part, (rows, _) in zip(given, found, strict=True) if rows], total


def _data(section: Section, check: str, given: Part, config: Config) -> tuple[list[Row], int | None]:
    """Add the finding of a data file; return the rows that were read, and how many there are if all were."""
    path, data = given.path, config.data
    if hub_data.is_name(path):  # what is in the cache has its path already
        text = f"{path} is not in the cache of the hub; a run downloads it"
        other = f"If this machine cannot reach the hub, on one that can: {hub_data.command(path)}"
        if hub_data.is_task(path):
            text, other = f"the rows of {path} are not made yet; a run makes them", f"It needs {hub_data.command(path)}"
        section.skip(check, f"{text}. {other}")
        return [], None
    file = next(iter(counting.files(path)), Path(path))
    fix = "write one JSON object per line, with a prompt (text, or messages {role, content}) under data.prompt_key"
    try:
        size = sum(part.stat().st_size for part in counting.files(path))
        if size <= WHOLE_FILE_BYTES:
            rows = load_parts([given], data, config.run.seed)
            of = "" if given.source is None else f" of source {given.source.name}"
            section.ok(check, f"{len(rows):,} rows{of} in {path}")
            return rows, len(rows)
        if kind(file) in (PARQUET, ARROW):
            section.skip(check, f"{file} has {gib(size)}; its rows are read only when the run starts")
            return [], None
        if file.suffix == JSONL:
            rows, looked_at = _head(file, given, config), f"{ROWS:,} rows"
        else:  # lines are no rows, or are compressed
            rows, looked_at = first_of(given, data), "rows"
        section.ok(check, f"the first {looked_at} of {file} ({gib(size)}) are valid")
        return rows, None
    except OSError as error:
        section.fail(check, f"{path}: {error.strerror}", f"correct the path; relative paths start at {os.getcwd()}")
    except ModuleNotFoundError as error:
        section.skip(check, f"{path}: {error.name}, which reads such files, is not installed here")
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        section.fail(check, "; ".join(lines[:2]), fix)
    return [], None


def _lengths(section: Section, config: Config) -> None:
    """Add the finding of prompts as tokens, if the files of data and model that they come from are all right."""
    if any(finding.state == "fail" for finding in section.findings) or not parts.training(config.data):
        return
    check, most = "prompts as tokens", config.rollout.max_prompt_length
    try:
        found = prompt_lengths.look(config)
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        section.fail(check, "; ".join(lines[:2]), "correct the rows, or the settings that this names")
        return
    if found.prompts:
        text = f"the longest of {found.prompts:,} has {found.longest:,} (rollout.max_prompt_length={most:,})"
        section.ok(check, text)
    if found.unchecked is not None:
        section.skip(check, f"{found.unchecked}; ranks find prompts that are too long")


def _head(file: Path, given: Part, config: Config) -> list[Row]:
    """Return those of the first ROWS that are used. Raises ValueError for malformed ones."""
    with tempfile.TemporaryDirectory(prefix="gspo-doctor-") as folder:
        part = Path(folder) / file.name
        with file.open("rb") as source:
            part.write_bytes(b"".join(itertools.islice(source, ROWS)))
        try:
            return load_parts([given._replace(path=str(part), limit=None)], config.data, config.run.seed)
        except ValueError as error:
            raise ValueError(str(error).replace(str(part), str(file))) from None


def _reward_functions(section: Section, config: Config, row: Row | None, load: bool) -> bool:
    """Add the finding of reward functions; return whether all of them graded the row."""
    if not config.reward.functions:
        return False  # reported as missing already
    try:
        registry.check(config.reward)
    except ValueError as error:
        section.fail(
            "reward functions",
            "; ".join(line.strip() for line in str(error).splitlines()),
            "give path/to/file.py:function, with grade(completion, *, prompt, fields, ...), or a built-in name",
        )
        return False
    names = ", ".join(term.function for term in config.reward.functions)
    if not load:
        section.ok("reward functions", names)
        return False
    source = None if row is None else find_source(row.fields, config.data)
    functions = [config.reward.functions[term] for term in registry.source_weights(config.reward, source)]
    memory = config.reward.memory_gb
    if row is None:  # without rows they are only loaded
        outcomes = trial.run(functions, "", {}, texts=(), memory_gb=memory, sandbox=config.sandbox)
    else:
        outcomes = trial.run(functions, row.text, row.fields, memory_gb=memory, sandbox=config.sandbox)
    for term, outcome in zip(functions, outcomes, strict=True):
        if outcome.failure is not None:
            add = section.fail if outcome.certain or outcome.not_here else section.warn
            file = own_code.file_of(term.function)
            fix = "compare the fields that it reads with those of the data" if file is None else f"correct {file}"
            add("reward functions", f"{term.function} {shortened(outcome.failure, 300)}", fix)
            return False
    done = "loaded" if row is None else "tried" if source is None else f"those of source {source.name} tried"
    section.ok("reward functions", f"{names} ({done})")
    return row is not None


def _odd_rows(section: Section, config: Config, rows: Sequence[tuple[Part, Sequence[Row]]]) -> None:
    """Add a finding of rows that lack a field which reward functions read: enough of them are tried."""
    faults = [fault for one in grading.look(rows) for fault in grading.refused(config, one)]
    if not faults:
        return
    more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
    fix = "give these rows the field, or leave them out of the data"
    section.fail("fields of rows", f"{shortened(faults[0], 400)}{more}", fix)


def _environment(section: Section, config: Config, row: Row | None, load: bool) -> None:
    """Begin a conversation about the first row with a message or two, and load the tools."""
    settings = config.environment
    if problems := list(preflight.environments(config)):
        for problem in problems:
            section.fail("environment", f"{problem.key}: {problem.text}", problem.fix or "correct this setting")
        return
    if not settings.talks:
        return
    if not load:
        section.ok("environment", named(config))
        return
    fields = asked(row.fields if row is not None else {}, 1, None)
    texts = trial.TEXTS if row is not None else ()  # without rows it is only loaded
    memory, sandbox = config.reward.memory_gb, config.sandbox
    (found,) = trial.run([turn_function(config)], "", fields, texts=texts, memory_gb=memory, sandbox=sandbox)
    if found.failure is None:
        tried = "loaded" if settings.name is None or row is None else "begun, and one message answered"
        section.ok("environment", f"{named(config)} ({tried})")
        return
    tell = section.fail if found.certain or found.not_here else section.warn
    files = {own_code.file_of(name) for name in (settings.name or "", *(tool.function for tool in settings.tools))}
    correct = ", ".join(sorted(str(file) for file in files if file is not None)) or "environment.args"
    tell("environment", f"{named(config)} {shortened(found.failure, 300)}", f"correct {correct}")
