"""The page of ``gspo-hpc diagnose``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from gspo_hpc.cli.pages.render import grid, item, text
from gspo_hpc.diagnose.evidence import ENOUGH
from gspo_hpc.diagnose.gather import Diagnosis
from gspo_hpc.diagnose.registry import SEVERITIES, Severity
from gspo_hpc.planning import trained
from gspo_hpc.runs import distillation
from gspo_hpc.system.terminal import pasteable

_COLOURS: dict[Severity, str] = {"problem": "red", "warning": "yellow", "note": "cyan"}


def page(found: Diagnosis) -> Iterator[RenderableType]:
    """Yield the parts of the page."""
    run = found.evidence
    counts = {kind: sum(s.severity == kind for s in found.symptoms) for kind in SEVERITIES}
    summary = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n) or "nothing found"
    worst = next((kind for kind, n in counts.items() if n), None)
    total = "" if found.max_steps is None else f" of {found.max_steps}"
    attempts = f"{len(run.attempts)} attempt{'s' * (len(run.attempts) != 1)}"
    yield text(
        ("diagnosis", "bold"),
        f" of {run.path}: ",
        (summary, _COLOURS[worst] if worst else "green"),
        f" ({run.state}, step {run.steps}{total}, {attempts})",
    )
    if (adapter := trained.adapter(run.config)) is not None:
        yield item("  trains   ", adapter)
    if (taught := distillation.of_run(run.config, run.records)) is not None:
        yield item("  distils  ", taught.words)
    for symptom in found.symptoms:
        yield ""
        yield text((symptom.severity, _COLOURS[symptom.severity]), "  ", (symptom.name, "bold"))
        yield from (item("  evidence ", evidence) for evidence in symptom.evidence)
        yield item("  cause    ", symptom.cause)
        if symptom.on_resume:
            yield item("  set      ", f"{' or '.join(symptom.on_resume)}   (may change when this run is resumed)")
        if symptom.new_run:
            yield item("  set      ", f"{' or '.join(symptom.new_run)}   (only for a new run)")
        yield from (item("  next     ", pasteable(place, run.path)) for place in symptom.look)
    if 0 < len(run.records) < ENOUGH:
        yield ""
        steps = f"{len(run.records)} step{'s' * (len(run.records) > 1)}"
        yield item("", f"{steps}: too few to judge learning and speed ({ENOUGH} are needed)")
    rows = [
        (
            target.name,
            f"{target.measured:.2f}" if target.measured >= 0.01 else f"{target.measured:.1e}",
            f"{'above' if target.above else 'below'} {target.target:g}: {'met' if target.met else 'missed'}",
        )
        for target in found.targets
        if target.measured is not None
    ]
    lacking = [target for target in found.targets if target.lacking is not None]
    if rows or lacking:
        yield ""
        yield text(("targets", "bold"))
    if rows:
        yield grid(rows, "lrl")
    yield from (item(f"  {target.name}  ", f"not measured: {target.lacking}") for target in lacking)
