"""The registry of symptoms: its table in the docs, the example of a new symptom, and the texts that it relies on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.diagnose import patterns, registry
from gspo_hpc.diagnose.registry import Finding, symptom
from gspo_hpc.runs.directory import open_run
from tests.examples import example
from tests.unit.diagnose.test_symptoms import CONFIG, evidence, healthy


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test registers."""
    registry.registered()  # files that are imported only under the patch would be forgotten, too, and for good
    monkeypatch.setattr(registry, "_REGISTERED", {name: list(some) for name, some in registry._REGISTERED.items()})
    registry.registered.cache_clear()
    yield
    registry.registered.cache_clear()


def test_the_table_in_the_docs_is_the_registry(project: Path) -> None:
    done = subprocess.run([sys.executable, project / "tools" / "make_symptoms.py", "--check"], timeout=60)
    assert done.returncode == 0, "docs/diagnose.md is out of date: run python tools/make_symptoms.py"
    rows = re.findall(r"^\| (`.*?`) \| (\w+) \|", (project / "docs" / "diagnose.md").read_text(), re.MULTILINE)
    names = [name for names, _ in rows for name in re.findall(r"`(\w+)`", names)]
    assert names == [name for one in registry.registered() for name in one.names] and len(names) > 40
    assert {severity for _, severity in rows} == set(registry.SEVERITIES)


def test_worst_first_with_the_registered_name_and_severity(fresh: None) -> None:
    def register(one: str, **changes: Any) -> None:
        finding = Finding((f"evidence of {one}",), "cause", **changes)
        symptom(one, "other_" + one, severity="note", shows="x", change="y")(lambda run: finding)

    register("one")
    register("two", severity="problem", name="other_two")
    found = [(one.name, one.severity) for one in registry.find(evidence())]
    assert found == [("other_two", "problem"), ("one", "note")]


def test_a_run_resumes_with_its_settings_only_if_it_may_change_all_of_them(fresh: None) -> None:
    changes = ("reward.workers=3", "optimizer.lr=1e-7")  # the first may change within a run, the second may not
    for name, settings in (("both", changes), ("one", changes[:1])):
        finding = Finding(("evidence",), "cause", settings)
        symptom(name, severity="note", shows="x", change="y")(lambda run, finding=finding: finding)
    found = {one.name: one for one in registry.find(evidence())}
    assert {name: one.resumable for name, one in found.items()} == {"both": False, "one": True}
    assert found["both"].new_run == changes[1:] and found["one"].new_run == ()


def test_a_longer_run_is_a_new_one_where_the_rate_decays(fresh: None) -> None:
    finding = Finding(("evidence",), "cause", ("run.max_steps=200",))
    symptom("short", severity="note", shows="x", change="y")(lambda run: finding)
    (constant,) = registry.find(evidence())
    (decays,) = registry.find(evidence(optimizer={"lr_decay_style": "cosine"}))
    assert constant.resumable and decays.new_run == ("run.max_steps=200",)


def test_a_setting_with_which_no_run_starts_is_not_offered(fresh: None) -> None:
    """An engine over both nodes can be planned only."""
    finding = Finding(("evidence",), "cause", ("rollout.tensor_parallel_size=16", "rollout.tensor_parallel_size=8"))
    symptom("wide", severity="note", shows="x", change="y")(lambda run: finding)
    (found,) = registry.find(evidence(cluster={"nodes": 2}))
    assert found.settings == ("rollout.tensor_parallel_size=8",)


def test_a_name_is_registered_once(fresh: None) -> None:
    symptom("restarts", severity="note", shows="x", change="y")(lambda run: None)
    with pytest.raises(AssertionError, match="registered twice: restarts"):
        registry.registered()


def test_the_example_of_a_new_symptom(project: Path, tmp_path: Path) -> None:
    """One file in a copy of the package: found in a run directory that shows it, and written into the docs."""
    text = example("A symptom")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(text.splitlines()) < 60
    for name in ("gspo_hpc", "docs", "tools"):
        shutil.copytree(project / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    folder, docs = tmp_path / "copy" / "gspo_hpc" / "diagnose" / "symptoms", tmp_path / "copy" / "docs" / "diagnose.md"
    before = {path: path.read_bytes() for path in (tmp_path / "copy" / "gspo_hpc").rglob("*.py")}
    (folder / "shrunk.py").write_text(code)

    run, _ = open_run(loader.from_dict(CONFIG | {"run": {"max_steps": 100, "dir": str(tmp_path / "run")}}))
    for step in range(1, 13):
        run.append_metrics(healthy(step, response_length=2.5))

    def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "copy"), "PYTHONDONTWRITEBYTECODE": "1"}
        line = [sys.executable, *words]
        return subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    done = command("-m", "gspo_hpc", "diagnose", run.path, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["symptoms"]
    assert (found["name"], found["severity"]) == ("shrunk_completions", "warning")
    assert found["evidence"] == ["a completion has 2.5 tokens on average in steps 1 to 12"]
    assert found["settings"] == ["algorithm.kl_beta=0.001"]
    page = command("-m", "gspo_hpc", "diagnose", run.path).stdout
    assert "warning  shrunk_completions" in page and "2.5 tokens on average" in page
    assert command(tmp_path / "copy" / "tools" / "make_symptoms.py", "--check").returncode == 1
    assert command(tmp_path / "copy" / "tools" / "make_symptoms.py").returncode == 0
    assert "| `shrunk_completions` | warning | a completion has fewer than 4 tokens" in docs.read_text()
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("hangs in", patterns.HANGS),
        ("has not been heard of for", patterns.HANGS),
        ("not up within", patterns.NOT_UP),
        ("was killed", patterns.KILLED),
        ("no answer from", patterns.NODE_SILENT),
        ("the job goes back to the queue", patterns.LOST_NODE),
        ("has gone and its step has not", patterns.LOST_NODE),
        ("engine and trainer disagree on the probe", patterns.MISMATCH),
        ("engine and trainer disagree on the tokens", patterns.MISMATCH),
        ("class ProbeMismatch", patterns.MISMATCH),
        ("class GapMismatch", patterns.MISMATCH),
        ("stale prefix cache: ", patterns.MISMATCH),
        ("engine died (", patterns.ENGINE_DEATH),
        ("); restart", patterns.ENGINE_DEATH),
        ("class EngineLost", patterns.ENGINE_LOST),
        ("class TooManySkippedSteps", None),
        ("was started with another config", patterns.CHANGED),
        ("gives up: ", patterns.GIVES_UP),
    ],
)
def test_texts_of_this_package_are_still_written(project: Path, text: str, pattern: re.Pattern[str] | None) -> None:
    """Some symptoms recognize sentences of other rooms: who rewords one there has to reword it here."""
    files = [path for path in (project / "gspo_hpc").rglob("*.py") if "diagnose" not in path.parts]
    assert any(text in path.read_text() for path in files), f"nobody writes {text!r}: see diagnose/patterns.py"
    if pattern is not None:
        known = pattern.pattern.replace("\\", "")
        assert text.removeprefix("class ").strip() in known or text in ("the job goes back to the queue",), known
