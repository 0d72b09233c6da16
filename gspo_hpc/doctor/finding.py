"""Findings of ``gspo-hpc doctor``: one line per check, with its state and its fix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gspo_hpc.system.text import gib as gib  # for every check
from gspo_hpc.system.text import shortened as shortened

State = Literal["ok", "warn", "fail", "skip"]

# ok: as it should be. warn: the run starts, but something costs time or may end it. fail: the run will not work.
# skip: not checked, with the reason.
STATES: tuple[State, ...] = ("ok", "warn", "fail", "skip")
# In the order of the page.
GROUPS = ("versions", "gpus", "host", "network", "files", "inputs", "tracking", "slurm", "nodes")
PATIENCE = 60.0  # seconds for one group: a file system or a driver that hangs must not hang the command


@dataclass(frozen=True)
class Finding:
    """One line of the page."""

    group: str  # one of GROUPS
    check: str
    state: State
    finding: str
    fix: str = ""  # what to do; empty for ok and skip

    def to_json(self) -> dict[str, str]:
        """Return the object for --json, and for the answers of nodes."""
        return asdict(self)


def from_json(raw: Mapping[str, Any]) -> Finding:
    """Return the finding that `to_json` wrote. Raises ValueError for anything else."""
    words = {key: raw.get(key) for key in ("group", "check", "state", "finding", "fix")}
    if words["state"] not in STATES or not all(isinstance(word, str) for word in words.values()):
        raise ValueError(f"this is not a finding: {shortened(str(raw))}")
    return Finding(**words)  # type: ignore[arg-type]


class Section:
    """The findings of one group, while they are collected."""

    def __init__(self, group: str) -> None:
        assert group in GROUPS, group
        self.group = group
        self.findings: list[Finding] = []

    def add(self, state: State, check: str, finding: str, fix: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(self.group, check, state, finding, fix))

    def ok(self, check: str, finding: str) -> None:
        """Add a check that passed."""
        self.add("ok", check, finding)

    def skip(self, check: str, finding: str) -> None:
        """Add a check that could not be made."""
        self.add("skip", check, finding)

    def warn(self, check: str, finding: str, fix: str) -> None:
        """Add a finding that does not stop a run, with its fix."""
        self.add("warn", check, finding, fix)

    def fail(self, check: str, finding: str, fix: str) -> None:
        """Add a finding that makes a run fail, with its fix."""
        self.add("fail", check, finding, fix)


def within(group: str, look: Callable[[], Iterable[Finding]], seconds: float = PATIENCE) -> list[Finding]:
    """Return what `look` finds, within `seconds`.

    If it raises OSError or ValueError, or does not return in time, that is a failure of the whole group. A thread that
    hangs in the kernel is left behind.
    """
    found: list[Finding] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.extend(look())
        except BaseException as error:  # the thread that waits raises it again, or reports it
            errors.append(error)

    thread = threading.Thread(target=work, name=f"doctor-{group}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        text = f"the checks gave no answer within {seconds:.0f} s"
        return [Finding(group, "all", "fail", text, "find what hangs (a mount, a driver, a server): see dmesg")]
    if errors and isinstance(errors[0], OSError | ValueError):
        return [
            Finding(
                group, "all", "fail", f"the checks could not run: {errors[0]}", "fix this error, and run doctor again"
            )
        ]
    if errors:
        raise errors[0]
    return found
