"""A requeued job is let go as soon as it waits, whatever states Slurm shows on the way there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gspo_hpc.launch.slurm import commands, unhold
from gspo_hpc.launch.slurm.commands import Job

RUNNING = Job("7", "RUNNING", "", "n1", None, None, None, restarts=2, comment="")
COMPLETING = replace(RUNNING, state="COMPLETING")
WAITING = replace(RUNNING, state="PENDING", reason="BeginTime", restarts=3)
AGAIN = replace(RUNNING, restarts=3)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ([RUNNING, WAITING], ["start"]),
        ([RUNNING, COMPLETING, WAITING], ["start"]),
        ([RUNNING, replace(COMPLETING, restarts=3), WAITING], ["start"]),
        ([RUNNING, replace(RUNNING, state="NODE_FAIL"), WAITING], ["start"]),
        ([RUNNING, AGAIN], []),
        ([RUNNING, replace(AGAIN, state="CONFIGURING")], []),
        ([RUNNING, replace(RUNNING, state="COMPLETED")], []),
        ([RUNNING, None], []),
    ],
)
def test_it_is_let_go_once_it_waits(monkeypatch: pytest.MonkeyPatch, seen: list[Job | None], told: list[str]) -> None:
    states: Iterator[Job | None] = iter(seen)
    done: list[str] = []
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(unhold, "_POLL", 0.0)
    monkeypatch.setattr(commands, "job", lambda job_id: next(states))
    monkeypatch.setattr(commands, "exclude", lambda job_id, nodes: done.append(f"exclude {','.join(nodes)}"))
    monkeypatch.setattr(commands, "start_soon", lambda job_id: done.append("start"))
    assert unhold.unhold("7", ["n2"]) == bool(told)
    assert done == (["exclude n2", *told] if told else [])
    assert next(states, "nothing more") == "nothing more"
