"""What ``gspo-hpc doctor`` finds: one line a check, with its state, and what mends it.

Floor 6.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "fail", "skip"]

# ok: as it should be. warn: the run starts, and something costs time or may end it. fail: the run will not work.
# skip: not looked at, and why.
STATES: tuple[State, ...] = ("ok", "warn", "fail", "skip")
# In the order of the page.
GROUPS = ("versions", "gpus", "host", "network", "files", "inputs", "tracking", "slurm", "nodes")
PATIENCE = 60.0  # seconds for one group: a file system or a driver that hangs must not hang the doctor


@dataclass(frozen=True)
class Finding:
    """One line."""

    group: str  # one of GROUPS
    check: str
    state: State
    finding: str
    fix: str = ""  # what to do, for warn and fail

    def to_json(self) -> dict[str, str]:
        """For --json, and for what nodes tell."""
        return asdict(self)


def from_json(raw: Mapping[str, Any]) -> Finding:
    """The reverse of `to_json`. Raises ValueError for anything else."""
    words = {key: raw.get(key) for key in ("group", "check", "state", "finding", "fix")}
    if words["state"] not in STATES or not all(isinstance(word, str) for word in words.values()):
        raise ValueError(f"not a finding: {str(raw)[:200]}")
    return Finding(**words)  # type: ignore[arg-type]


class Section:
    """The findings of one group, while they are collected."""

    def __init__(self, group: str) -> None:
        assert group in GROUPS, group
        self.group = group
        self.findings: list[Finding] = []

    def add(self, state: State, check: str, finding: str, fix: str = "") -> None:
        self.findings.append(Finding(self.group, check, state, finding, fix))

    def ok(self, check: str, finding: str) -> None:
        self.add("ok", check, finding)

    def skip(self, check: str, finding: str) -> None:
        self.add("skip", check, finding)

    def warn(self, check: str, finding: str, fix: str) -> None:
        self.add("warn", check, finding, fix)

    def fail(self, check: str, finding: str, fix: str) -> None:
        self.add("fail", check, finding, fix)


def within(group: str, look: Callable[[], Iterable[Finding]], seconds: float = PATIENCE) -> list[Finding]:
    """What `look` finds. One that raises OSError or ValueError, or does not come back in time, is a failure of the
    whole group; a thread that hangs in the kernel is left behind."""
    found: list[Finding] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.extend(look())
        except BaseException as error:  # raised again, or told, by who waits
            errors.append(error)

    thread = threading.Thread(target=work, name=f"doctor-{group}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        text = f"no answer within {seconds:.0f} s"
        return [Finding(group, "all", "fail", text, "something there hangs: a mount, a driver, a server; see dmesg")]
    if errors and isinstance(errors[0], OSError | ValueError):
        return [Finding(group, "all", "fail", f"could not be looked at: {errors[0]}", "mend that, and ask again")]
    if errors:
        raise errors[0]
    return found


def gib(size: float) -> str:
    """1.5 GiB, or 12 MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def first_line(text: str, length: int = 200) -> str:
    """Of what a program or an error said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:length] if lines else ""
