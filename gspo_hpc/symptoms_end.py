"""Symptoms of an end: how often a run was started, why the starts before ended, and what is lost of their records.

Floor 6. Every function is pure over the evidence, and answers None where the run does not show its symptom.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from gspo_hpc import symptoms_errors
from gspo_hpc.report_data import value
from gspo_hpc.symptoms import AttemptEvidence, Evidence, Finder, Severity, Symptom
from gspo_hpc.symptoms_errors import ENGINE_DEATH, GIVES_UP
from gspo_hpc.symptoms_told import blamed, one_line, short, weight
from gspo_hpc.verdict import HEALTHY

KNOWN = re.compile("TooManySkippedSteps|EngineLost|died [0-9]+ times")  # told of by other symptoms


def engine_restarts(run: Evidence) -> Symptom | None:
    """Engines that died and were restarted in place, or died too often."""
    counts = {a.number: 0 for a in run.attempts}
    steps: list[int] = []
    for record in run.records:
        attempt, count = record.get("attempt"), int(value(record, "engine_restarts") or 0)
        if isinstance(attempt, int) and count > counts.get(attempt, 0):
            counts[attempt] = count
            steps.append(int(record["step"]))
    lost = blamed(run, re.compile(r"EngineLost|died \d+ times \(faults\.max_engine_restarts"))
    total = sum(counts.values())
    if not total and lost is None:
        return None
    reasons = Counter(
        found.group(1) for a in run.attempts for told in a.said if (found := ENGINE_DEATH.search(told.text)) is not None
    )
    evidence = (
        [f"{total} restart{'s' * (total > 1)} in place, told at step {', '.join(map(str, steps))}"] if total else []
    )
    evidence += [f"{count} x {reason}" for reason, count in reasons.most_common(3)]
    evidence += [f"attempt {lost[0].number}: {short(lost[1])}"] if lost else []
    hung = any("no answer for" in reason for reason in reasons)
    settings = [f"faults.engine_timeout={2 * run.config.faults.engine_timeout:g}"] if hung else []
    settings += [f"faults.max_engine_restarts={run.config.faults.max_engine_restarts + 3}"] if lost else []
    return Symptom(
        "engine_restarts",
        weight(run, lost[0]) if lost else "warning",
        tuple(evidence),
        "an engine gave no token for faults.engine_timeout seconds"
        if hung
        else "an engine's process was killed (by hand, or for want of memory) or crashed",
        tuple(settings),
        ("logs of the ranks that lead engines: what vLLM said last", "dmesg: whether the kernel killed it"),
    )


def restarts(run: Evidence) -> Symptom | None:
    """More than one start, and why the earlier ones ended."""
    ended = [a for a in run.attempts if a.reason not in ("running", "done")]
    given_up = next((told for told in run.job_said if GIVES_UP.search(told.text)), None)
    if not ended or (len(run.attempts) == 1 and given_up is None):
        return None
    kinds = Counter(a.reason for a in ended)
    bad = [a for a in ended if a.failed]
    told = [f"attempt {a.number} {a.reason}{f': {one_line(a.detail)}' if a.detail else ''}{_at(a)}" for a in ended[-5:]]
    loop = _loop(run)
    fine = sum(kinds[kind] for kind in HEALTHY)
    summary = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if fine:
        summary += f"; {fine} of these no fault of the run"
    evidence = [f"{len(run.attempts)} attempt{'s' * (len(run.attempts) > 1)}: {summary}", *told]
    if loop > 1:
        evidence.append(f"{loop} failures in a row without a step between them")
    if given_up is not None and run.attempts[-1].failed:
        evidence.append(short(given_up))
    severity: Severity = "note"
    if bad:
        severity = "problem" if run.attempts[-1].failed else "warning"
    settings = [f"slurm.time_minutes={2 * run.config.slurm.time_minutes}"] if kinds["time limit"] else []
    return Symptom(
        "crash_loop" if loop > 1 and run.attempts[-1].failed else "restarts",
        severity,
        tuple(evidence),
        "the same thing ends every start: the symptoms beside this one say what"
        if loop > 1
        else "starts that failed, of which the symptoms beside this one tell more"
        if bad
        else "preemptions, time limits and stops: the run goes on with nothing lost",
        tuple(settings),
        ("gspo-hpc logs RUN --errors", "attempts/NNNN/") if bad else (),
    )


def unknown_failure(run: Evidence) -> Symptom | None:
    """The last attempt failed, with none of the texts above."""
    if not run.attempts or run.attempts[-1].reason not in ("failed", "killed"):
        return None
    attempt = run.attempts[-1]
    told = attempt.detail + (attempt.error.text if attempt.error else "")
    # The newest of them, that is: one of an attempt before this one explains nothing here.
    alone = replace(run, attempts=(attempt,))
    if KNOWN.search(told) or any(finder(alone) is not None for finder in symptoms_errors.FINDERS):
        return None
    if attempt.reason == "killed":
        return Symptom(
            "killed",
            "problem",
            (f"attempt {attempt.number} never wrote why it ended{_at(attempt)}",),
            "whatever watched it was killed with it: SIGKILL, a lost node, or the machine went down",
            (),
            ("the same command goes on from the newest whole checkpoint", "dmesg, sacct -j JOB"),
        )
    evidence = [f"attempt {attempt.number}: {one_line(attempt.detail) or 'no reason was given'}"]
    if attempt.error is not None:
        evidence.append(f"{attempt.error.where}: {one_line(attempt.error.text.rstrip().splitlines()[-1])}")
    return Symptom(
        "failure",
        "problem",
        tuple(evidence),
        "an error of which nothing more is known here",
        ("tracking.debug=true",),
        ("gspo-hpc logs RUN --errors",),
    )


def damaged_records(run: Evidence) -> Symptom | None:
    """Files of the run directory that do not hold what was written there."""
    if not run.damaged:
        return None
    shown = [f"{one.file} {one.what}" for one in run.damaged[:_SHOWN]]
    more = len(run.damaged) - len(shown)
    return Symptom(
        "damaged_records",
        "problem" if any(one.hides for one in run.damaged) else "warning",
        (*shown, *([f"{more} more"] if more else [])),
        "a file system that lost what was written, a copy that ended early, or a change from outside: what these files "
        "held is missing in all that is said here",
        (),
        ("copy the run directory again, or take these files from a backup",),
    )


_SHOWN = 8  # files that are named


def _loop(run: Evidence) -> int:
    """Failures at the end of the run, in a row and without a step between them."""
    count = 0
    for attempt in reversed(run.attempts):
        if attempt.reason != "failed":
            break
        count += 1
        if attempt.steps is not None:
            break
    return count


def _at(attempt: AttemptEvidence) -> str:
    return " (no step)" if attempt.steps is None else f" (steps {attempt.steps[0]} to {attempt.steps[1]})"


FINDERS: tuple[Finder, ...] = (damaged_records, engine_restarts, unknown_failure, restarts)
