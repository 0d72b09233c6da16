"""Symptoms of restarts and ends: refused starts, restarts, failures without a known text, damaged records."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from gspo_hpc.diagnose import registry
from gspo_hpc.diagnose.evidence import AttemptEvidence, Evidence
from gspo_hpc.diagnose.excerpts import failure_matching, one_line, quoted, severity_of
from gspo_hpc.diagnose.patterns import CHANGED, ENGINE_DEATH, ENGINE_LOST, GIVES_UP, UNGRADED
from gspo_hpc.diagnose.registry import Finding, Severity, symptom
from gspo_hpc.launch.verdict import HEALTHY
from gspo_hpc.runs.reader import value

_EXPLAINED = re.compile("TooManySkippedSteps|EngineLost|died [0-9]+ times")  # other symptoms name these
_FILES_SHOWN = 8


@symptom(
    "refused",
    severity="problem",
    shows="the config, data or reward functions that changed, with the difference",
    change="the old values, or another `run.name`",
    job_lines=CHANGED,
    explains_failure=True,
)
def refused(run: Evidence) -> Finding | None:
    """Find a start that was refused because the config or the data are not those of the run."""
    excerpts = [excerpt for excerpt in run.job_excerpts if CHANGED.search(excerpt.text)]
    attempts = [a for a in run.attempts if a.reason == "refused"]
    if not excerpts and not attempts:
        return None
    last = run.attempts[-1].reason if run.attempts else None
    cause, look = "the config has a mistake that only the model or the data reveal", "follow what the message says"
    if attempts and UNGRADED in attempts[-1].detail:
        cause = "a reward function failed for every completion: it has a mistake, or the rows lack what it reads"
        look = "correct it; gspo-hpc try CONFIG shows completions with what each function makes of them"
    if excerpts:
        cause = "these settings, data or reward functions would make it a different run"
        look = "restore the old values, or start another run with another run.name"
    return Finding(
        (
            *(quoted(excerpt) for excerpt in excerpts[-2:]),
            *(f"attempt {a.number}: {one_line(a.detail)}" for a in attempts[-2:]),
        ),
        cause,
        (),
        (look,),
        "problem" if (excerpts and last != "done") or last == "refused" else "note",
    )


@symptom(
    "damaged_records",
    severity="problem",
    shows="the names of files that hold no records, or that are missing although the run got further: a problem if "
    "they alone say how far it got or how it ended. A last line cut off by a kill is normal",
    change="another copy, or a backup",
)
def damaged_records(run: Evidence) -> Finding | None:
    """Find files of the run directory that do not hold what was written there."""
    if not run.damaged:
        return None
    shown = [f"{one.file} {one.what}" for one in run.damaged[:_FILES_SHOWN]]
    more = len(run.damaged) - len(shown)
    return Finding(
        (*shown, *([f"{more} more"] if more else [])),
        "a file system lost data, a copy ended early, or somebody changed the files; this diagnosis lacks what they "
        "held",
        (),
        ("copy the run directory again, or take these files from a backup",),
        "problem" if any(one.hides for one in run.damaged) else "warning",
    )


@symptom(
    "engine_restarts",
    severity="warning",
    shows="how often engines died, at which steps, and why",
    change="`faults.engine_timeout`, `faults.max_engine_restarts`",
    lines=ENGINE_DEATH,
)
def engine_restarts(run: Evidence) -> Finding | None:
    """Find engines that died and were restarted in place, or died too often."""
    counts = {a.number: 0 for a in run.attempts}
    steps: list[int] = []
    for record in run.records:
        attempt, count = record.get("attempt"), int(value(record, "engine_restarts") or 0)
        if isinstance(attempt, int) and count > counts.get(attempt, 0):
            counts[attempt] = count
            steps.append(int(record["step"]))
    lost = failure_matching(run, ENGINE_LOST)
    total = sum(counts.values())
    if not total and lost is None:
        return None
    texts = (excerpt.text for a in run.attempts for excerpt in a.excerpts)
    reasons = Counter(found.group(1) for text in texts if (found := ENGINE_DEATH.search(text)) is not None)
    at = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    evidence = [f"{total} restart{'s' * (total > 1)} in place, logged at {at}"] if total else []
    evidence += [f"{count} x {reason}" for reason, count in reasons.most_common(3)]
    evidence += [f"attempt {lost[0].number}: {quoted(lost[1])}"] if lost else []
    hung = any("no answer for" in reason for reason in reasons)
    settings = [f"faults.engine_timeout={2 * run.config.faults.engine_timeout:g}"] if hung else []
    settings += [f"faults.max_engine_restarts={run.config.faults.max_engine_restarts + 3}"] if lost else []
    return Finding(
        tuple(evidence),
        "an engine produced no token for faults.engine_timeout seconds"
        if hung
        else "the process of an engine crashed, or somebody or the OOM killer killed it",
        tuple(settings),
        ("logs of the ranks that lead engines: read vLLM's last lines", "dmesg: shows whether the kernel killed it"),
        severity_of(run, lost[0]) if lost else "warning",
    )


@symptom(
    "unknown_failure",
    "killed",
    severity="problem",
    shows="an error that no other symptom explains; or a start that never recorded why it ended",
    change="`tracking.debug`, `gspo-hpc logs RUN --errors`",
)
def unknown_failure(run: Evidence) -> Finding | None:
    """Find a failure of the last attempt that no other symptom explains."""
    if not run.attempts or run.attempts[-1].reason not in ("failed", "killed"):
        return None
    attempt = run.attempts[-1]
    reported = attempt.detail + (attempt.error.text if attempt.error else "")
    # Only the newest attempt: what explains an earlier one explains nothing here.
    alone = replace(run, attempts=(attempt,))
    explanations = (one.find(alone) for one in registry.registered() if one.explains_failure)
    if _EXPLAINED.search(reported) or any(explanations):
        return None
    if attempt.reason == "killed":
        return Finding(
            (f"attempt {attempt.number} never recorded why it ended{_at(attempt)}",),
            "the process that watched the ranks was killed as well: a SIGKILL, a lost node, or a machine that went "
            "down",
            (),
            ("the same command resumes from the newest complete checkpoint", "dmesg, sacct -j JOB"),
            name="killed",
        )
    evidence = [f"attempt {attempt.number}: {one_line(attempt.detail) or 'no reason was recorded'}"]
    if attempt.error is not None:
        evidence.append(f"{attempt.error.where}: {one_line(attempt.error.text.rstrip().splitlines()[-1])}")
    return Finding(
        tuple(evidence),
        "no symptom here recognizes this error",
        ("tracking.debug=true",),
        ("gspo-hpc logs RUN --errors",),
    )


@symptom(
    "restarts",
    "crash_loop",
    severity="note",
    shows="the attempts and why they ended; preemptions and time limits (a note) are distinguished from failures",
    change="`slurm.time_minutes` after time limits",
    job_lines=GIVES_UP,
)
def restarts(run: Evidence) -> Finding | None:
    """Find more than one start, and why the earlier ones ended."""
    ended = [a for a in run.attempts if a.reason not in ("running", "done")]
    given_up = next((excerpt for excerpt in run.job_excerpts if GIVES_UP.search(excerpt.text)), None)
    if not ended or (len(run.attempts) == 1 and given_up is None):
        return None
    kinds = Counter(a.reason for a in ended)
    bad = [a for a in ended if a.failed]
    lines = [
        f"attempt {a.number} {a.reason}{f': {one_line(a.detail)}' if a.detail else ''}{_at(a)}" for a in ended[-5:]
    ]
    loop = _failures_in_a_row(run)
    fine = sum(kinds[kind] for kind in HEALTHY)
    summary = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if fine:
        summary += f"; {fine} of these {'was' if fine == 1 else 'were'} not the run's fault"
    evidence = [f"{len(run.attempts)} attempt{'s' * (len(run.attempts) > 1)}: {summary}", *lines]
    if loop > 1:
        evidence.append(f"{loop} failures in a row without a step between them")
    if given_up is not None and run.attempts[-1].failed:
        evidence.append(quoted(given_up))
    severity: Severity = "note"
    if bad:
        severity = "problem" if run.attempts[-1].failed else "warning"
    return Finding(
        tuple(evidence),
        "the same failure ends every start; the other symptoms name it"
        if loop > 1
        else "some starts failed; the other symptoms name the cause"
        if bad
        else "preemptions, time limits, stops and planned restarts ended the earlier starts; nothing is lost",
        (f"slurm.time_minutes={2 * run.config.slurm.time_minutes}",) if kinds["time limit"] else (),
        ("gspo-hpc logs RUN --errors", "attempts/NNNN/: has the logs of attempt NNNN") if bad else (),
        severity,
        "crash_loop" if loop > 1 and run.attempts[-1].failed else "restarts",
    )


def _failures_in_a_row(run: Evidence) -> int:
    """Count the failures at the end of the run without a step between them."""
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
