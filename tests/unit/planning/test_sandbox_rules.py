"""Rules of the sandbox. They take no time. They would catch a sandbox without a place, and one that reads its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.plan import make_plan


def broken(config: dict[str, object]) -> list[tuple[str, str]]:
    return [(str(one.rule), one.message) for one in make_plan(from_dict(config)).broken]


@pytest.mark.parametrize(("kind", "key", "value"), [("http", "url", "http://h:1"), ("apptainer", "image", "x.sif")])
def test_a_sandbox_has_its_place(kind: str, key: str, value: str) -> None:
    ((rule, message),) = broken({"sandbox": {"kind": kind}})
    assert rule == "sandbox_has_its_place" and f"{kind} needs sandbox.{key}" in message
    assert broken({"sandbox": {"kind": kind, key: value}}) == broken({"sandbox": {}}) == []


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"run": {"dir": "/scratch/me/runs/x"}}, "run.dir (/scratch/me/runs/x)"),
        ({"data": {"train": "/scratch/me/train.jsonl"}}, "data.train (/scratch/me/train.jsonl)"),
        ({"run": {"dir": "/scratch/me"}}, "run.dir (/scratch/me)"),
        (
            {"data": {"sources": [{"name": "a", "files": "/scratch/me/a.jsonl#9"}]}},
            "data.sources[0].files (/scratch/me/a.jsonl)",
        ),
        (
            {"data": {"eval_sets": [{"name": "a", "files": "/scratch/me/a.jsonl"}]}},
            "data.eval_sets[0].files (/scratch/me/a.jsonl)",
        ),
    ],
)
def test_programs_do_not_read_their_run(config: dict[str, object], names: str) -> None:
    ((rule, message),) = broken({**config, "sandbox": {"readable": ["/opt/lib", "/scratch/me/"]}})
    assert rule == "sandbox_reads_no_run" and f"/scratch/me, and {names} lies in it" in message
    assert broken({**config, "sandbox": {"readable": ["/opt/lib", "/scratch/me/lib", "/scratch/m"]}}) == []


def test_programs_do_not_read_the_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    readable = {"sandbox": {"readable": [str(tmp_path)]}}
    found = broken({"model": {"path": str(tmp_path / "model")}, **readable})
    assert ("sandbox_reads_no_run", True) in [(rule, "model.path" in message) for rule, message in found]
    assert "sandbox_reads_no_run" not in dict(broken({"model": {"path": "owner/name"}, **readable}))


def test_folders_are_named_in_full() -> None:
    with pytest.raises(ValueError, match="sandbox.readable must be the full path of a folder"):
        from_dict({"sandbox": {"readable": ["lib"]}})
    with pytest.raises(ValueError, match="sandbox.url must be an address such as http://HOST:8080"):
        from_dict({"sandbox": {"url": "http://me:word@host/"}})
