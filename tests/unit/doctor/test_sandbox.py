"""The finding of doctor about the sandbox of a machine. It takes about five seconds.

It would catch a node without a sandbox that is called fit for a run with programs, and a run without programs that is
refused for the lack of one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.schema import Sandbox as Settings
from gspo_hpc.doctor import host
from tests.unit.sandbox import rungs

NOWHERE = Settings(kind="http", url="http://127.0.0.1:9")


def test_the_rung_is_named() -> None:
    section, kind = host.sandbox(rungs.sandbox(rungs.KINDS[0]).settings, asked=True)
    (found,) = section.findings
    assert kind == rungs.KINDS[0] and (found.state, found.check) == ("ok", "sandbox")
    assert found.finding == f"programs run in {kind}"
    section, kind = host.sandbox(Settings(), asked=False)
    others = "; landlock would serve, too" if len(rungs.KINDS) > 1 else ""
    assert section.findings[0].finding == f"programs run in {rungs.KINDS[0]}{others}" and kind == rungs.KINDS[0]


@pytest.mark.parametrize(("asked", "state"), [(True, "fail"), (False, "skip")])
def test_without_one_a_run_with_programs_fails(asked: bool, state: str) -> None:
    section, kind = host.sandbox(NOWHERE, asked)
    (found,) = section.findings
    assert kind == "none" and found.state == state and "cannot be reached" in found.finding
    assert ("install bubblewrap" in found.fix) == asked


@pytest.mark.parametrize(
    ("setting", "state"),
    [
        ("reward.functions=[{function: code}]", "fail"),
        ("reward.functions=[{function: own.py:runs}]", "fail"),
        ("environment.tools=[{function: python}]", "fail"),
        ("environment.tools=[{function: calculator}]", "skip"),
        ("reward.functions=[{function: nowhere.py:runs}]", "skip"),
    ],
)
def test_a_config_says_whether_it_has_programs(
    setting: str,
    state: str,
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def runs(completion, *, prompt, fields, sandbox):\n    return 1.0\n")
    main(["doctor", str(tiny_config), f"run.dir={tmp_path}/x", setting, "sandbox.kind=http", "--json"])
    found = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["check"] == "sandbox"]
    assert [(one["group"], one["state"]) for one in found] == [("host", state)]
