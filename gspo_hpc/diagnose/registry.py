"""The registry of symptoms: what `gspo-hpc diagnose` looks for.

A symptom is one function of the evidence with the decorator :func:`symptom`, in a file below symptoms/. Files there are
discovered, so a new symptom needs no entry anywhere else: `gspo-hpc diagnose`, its --json and the table in
docs/diagnose.md (written by tools/make_symptoms.py) take it from here.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gspo_hpc.config.changes import refused_changes
from gspo_hpc.diagnose import symptoms
from gspo_hpc.diagnose.evidence import Evidence
from gspo_hpc.planning.plan import make_plan

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")  # worst first


@dataclass(frozen=True)
class Finding:
    """The finding that a symptom's function returns for a run that has it."""

    evidence: tuple[str, ...]  # sentences with the numbers, and the steps or attempts that they belong to
    cause: str
    settings: tuple[str, ...] = ()  # key=value, as on the command line, the likeliest fix first
    look: tuple[str, ...] = ()  # where to look, or what to do, if no setting is the fix
    severity: Severity | None = None  # where it is not the registered one
    name: str | None = None  # which of the registered names; None: the first


@dataclass(frozen=True)
class Symptom:
    """One thing that is wrong or slow in a run.

    `problem`: the run failed, learns nothing or wastes much. `warning`: it makes progress, at a cost. `note`: this is
    worth knowing.
    """

    name: str
    severity: Severity
    evidence: tuple[str, ...]
    cause: str
    settings: tuple[str, ...] = ()
    look: tuple[str, ...] = ()
    resumable: bool = True  # whether this run may be resumed with all of the settings
    new_run: tuple[str, ...] = ()  # those of the settings that only a new run can have

    @property
    def on_resume(self) -> tuple[str, ...]:
        """The settings with which this run may be resumed."""
        return tuple(one for one in self.settings if one not in self.new_run)

    def to_json(self) -> dict[str, Any]:
        """Return the object for --json."""
        return {key: list(part) if isinstance(part, tuple) else part for key, part in asdict(self).items()}


Find = Callable[[Evidence], "Finding | None"]


@dataclass(frozen=True)
class Registered:
    """A symptom's function, and what the page of documentation says about it."""

    names: tuple[str, ...]
    severity: Severity  # the usual one
    shows: str  # the evidence, for the docs
    change: str  # the settings to change, for the docs
    find: Find
    lines: re.Pattern[str] | None  # lines of the ranks' logs that are quoted as evidence
    job_lines: re.Pattern[str] | None  # the same for the logs of Slurm jobs
    explains_failure: bool  # whether it names the cause of a failed attempt


_REGISTERED: dict[str, list[Registered]] = {}  # by module


def symptom(
    *names: str,
    severity: Severity,
    shows: str,
    change: str,
    lines: re.Pattern[str] | None = None,
    job_lines: re.Pattern[str] | None = None,
    explains_failure: bool = False,
) -> Callable[[Find], Find]:
    """Register a function as a symptom.

    `names`: usually one; a function that tells several cases apart has one for each. `shows` and `change` become a row
    of the table in docs/diagnose.md. `lines` and `job_lines` match the log lines that the function wants to see in
    `AttemptEvidence.excerpts` and `Evidence.job_excerpts`.
    """
    assert names and severity in SEVERITIES

    def register(find: Find) -> Find:
        entry = Registered(names, severity, shows, change, find, lines, job_lines, explains_failure)
        _REGISTERED.setdefault(find.__module__, []).append(entry)
        return find

    return register


@functools.cache
def registered() -> tuple[Registered, ...]:
    """Return all symptoms, by module and in the order of their definition."""
    for module in pkgutil.iter_modules(symptoms.__path__, f"{symptoms.__name__}."):
        importlib.import_module(module.name)
    found = tuple(one for module in sorted(_REGISTERED) for one in _REGISTERED[module])
    names = [name for one in found for name in one.names]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"symptoms registered twice: {', '.join(sorted(twice))}"
    return found


def find(evidence: Evidence) -> Iterator[Symptom]:
    """Yield the symptoms that the evidence shows, worst first.

    Settings that would change nothing are left out, and so are those with which the plan would no longer be valid.
    """
    found = [(one, finding) for one in registered() if (finding := one.find(evidence)) is not None]
    for one, finding in sorted(found, key=lambda pair: SEVERITIES.index(pair[1].severity or pair[0].severity)):
        name = finding.name or one.names[0]
        assert name in one.names, f"{name} is not registered"
        settings = tuple(text for text in finding.settings if _offered(evidence, text))
        new_run = tuple(text for text in settings if refused_changes(evidence.config, evidence.with_settings(text)))
        severity = finding.severity or one.severity
        yield Symptom(name, severity, finding.evidence, finding.cause, settings, finding.look, not new_run, new_run)


def table() -> str:
    """Return the table of all symptoms for docs/diagnose.md, as Markdown."""
    head = "| symptom | severity | evidence | what to change |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {', '.join(f'`{name}`' for name in one.names)} | {one.severity} | {one.shows} | {one.change} |\n"
        for one in registered()
    )


def _offered(evidence: Evidence, setting: str) -> bool:
    try:
        changed = evidence.with_settings(setting)
    except ValueError:
        return False
    if changed == evidence.config:
        return False
    # If the run's own plan is not valid (a part of its config is missing), it says nothing about the setting.
    before, after = make_plan(evidence.config), make_plan(changed)
    if after.not_run and not before.not_run:
        return False
    return after.valid or not before.valid
