"""The page of ``gspo-hpc doctor``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from gspo_hpc.cli.pages.ranks import places
from gspo_hpc.cli.pages.render import Span, item, text
from gspo_hpc.doctor.examine import Diagnosis
from gspo_hpc.doctor.finding import GROUPS, STATES, State

_TITLES = {"gpus": "GPUs", "slurm": "Slurm"}
_COLOURS: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
_WIDEST = 24  # columns for the name of a check; a longer one gets a line of its own


def page(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Yield the parts of the page: a section for each group, a finding and its fix for each check, and the counts."""
    where = "a login node" if diagnosis.place == "login node" else "this machine"
    yield text(("doctor", "bold"), f" of {diagnosis.config or where}, platform {diagnosis.platform}")
    column = min(max((len(one.check) for one in diagnosis.findings), default=0), _WIDEST)
    for group in GROUPS:
        found = [one for one in diagnosis.findings if one.group == group]
        if found:
            yield ""
            yield text((_TITLES.get(group, group.capitalize()), "bold"))
        for one in found:
            head = text("  ", (f"{one.state:<4}", _COLOURS[one.state]), f"  {one.check:<{column}}  ")
            below = " " * (column + 10)
            if len(one.check) > column:
                yield head
                head = text(below)
            yield item(head, one.finding)
            if one.fix:
                yield item(below, f"fix: {one.fix}")
    if ranks := (diagnosis.nodes or {}).get("ranks"):
        yield ""
        yield text(("Ranks", "bold"))
        yield from places(ranks)
    yield ""
    counts: list[Span] = []
    for state in STATES:
        counts += [", ", (f"{diagnosis.counts[state]} {state}", _COLOURS[state])]
    verdict = "no check failed" if diagnosis.ok else "fix what fails before you start a run"
    yield text(*counts[1:], f": {verdict}")
