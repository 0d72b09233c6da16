"""The report of a run: one self-contained HTML page of curves, samples, attempts, plan and settings.

The page needs no network, no server and no script. Text from models and data sets is escaped; in addition, the content
security policy of the page allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from gspo_hpc.report import experts
from gspo_hpc.report.curves import figures, readouts
from gspo_hpc.report.details import attempts, plan, settings
from gspo_hpc.report.failure import failure
from gspo_hpc.report.findings import ShownFinding
from gspo_hpc.report.render import asset, render
from gspo_hpc.report.steps import Recorded, StepPages
from gspo_hpc.report.summary import summary, when
from gspo_hpc.report.texts.evaluated import evaluated
from gspo_hpc.report.texts.samples import samples
from gspo_hpc.runs.reader import RunData, read_run
from gspo_hpc.system.files import write_atomically


def write_report(
    run_dir: Path,
    out: Path | None = None,
    findings: Sequence[ShownFinding] = (),
    refresh: int | None = None,
    steps: StepPages | None = None,
) -> Path:
    """Write the page, by default as report.html in the run directory, and return its path.

    `findings` come first on the page. `refresh`: seconds after which a browser loads the page again. Pages of recorded
    steps go into a folder beside it, report_steps for report.html; `steps` is kept by who writes the page again.

    Works on a run in any state. Raises ValueError if `run_dir` is no run directory, OSError if the page cannot be
    written; an older page is then left as it was.
    """
    run = read_run(Path(run_dir))
    path = Path(out) if out is not None else run.path / "report.html"
    if path.is_dir():
        raise ValueError(f"{path}: is a directory; give the name of the page, --out {path / 'report.html'}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}")
    recorded = (steps or StepPages()).write(run, path)  # before the page that links to them
    write_atomically(path, page(run, findings, refresh, recorded))
    return path


def page(
    run: RunData,
    findings: Sequence[ShownFinding] = (),
    refresh: int | None = None,
    recorded: Recorded | None = None,
) -> str:
    """Return the whole page, as text that can be encoded as UTF-8."""
    drawn, script = [*figures(run), *experts.figures(run)], asset("report.js")
    return render(
        "page.html.j2",
        style=asset("report.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        refresh=refresh,
        summary=summary(run),
        findings=findings,
        failure=failure(run),
        recorded=recorded,
        figures=drawn,
        readouts={name: asdict(one) for name, one in readouts(drawn).items()},
        samples=samples(run),
        evaluated=evaluated(run),
        attempts=attempts(run),
        plan=plan(run),
        settings=settings(run),
        footer=list(_footer(run)),
    )


def _footer(run: RunData) -> Iterator[str]:
    if run.info.get("run_id"):
        yield f"run {run.info['run_id']}"
    versions = run.info.get("versions")
    if isinstance(versions, Mapping):
        yield from (f"{name} {version}" for name, version in versions.items())
    yield f"page written {when(datetime.now(UTC).timestamp())}"
