"""An algorithm in a user's own file: its settings, its mistakes, and who runs the file.

Takes 8 s. It would catch a setting that is lost on the way to the ranks, and a command that only looks at a run but
runs the code that the run's config names.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.algorithms import objective
from gspo_hpc.cli.main import main
from gspo_hpc.config import changes, loader
from gspo_hpc.config.algorithm import AlgorithmInFile
from gspo_hpc.config.loader import ConfigError
from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.runs import snapshot
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.system.environment import CODE

MINE = """
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gspo_hpc.algorithms.objective import Objective, SequenceRatio, TokenRatio
from gspo_hpc.config.algorithm import ClipHigh, ClipLow

open("ran", "a").write("x")


@dataclass(frozen=True)
class Weighted(Objective):
    least: float | None = None


class Mine(TokenRatio):
    '''GRPO with a weight.'''

    paper: ClassVar[str] = "a paper"
    clip_low: ClipLow = 0.25
    clip_high: ClipHigh = 0.3
    least_weight: Annotated[float | None, Field(ge=0, le=10, description="Least weight of a token.")] = None

    def objective(self):
        return Weighted(**vars(super().objective()), least=self.least_weight)


class Bare(TokenRatio):
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    undescribed: int = 1


class Named(TokenRatio):
    name: Literal["named"] = "named"


not_a_class = 3
"""
NAME = "mine.py:Mine"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    return tmp_path


def forget() -> None:
    """Have users' files run again, and show it, if anything loads them."""
    for name in [name for name in sys.modules if name.startswith("_own_code:")]:
        del sys.modules[name]
    Path("ran").unlink()


def load(**keys: Any) -> Config:
    return loader.from_dict({"algorithm": {"name": NAME, **keys}}, run_code=True)


def test_its_defaults_and_settings_reach_the_objective() -> None:
    terms = objective.resolve(load().algorithm)
    assert (terms.clip_low, terms.clip_high, terms.least) == (0.25, 0.3, None)  # type: ignore[attr-defined]
    assert objective.resolve(load(least_weight=2).algorithm).least == 2.0  # type: ignore[attr-defined]


def test_what_a_run_directory_keeps_is_the_same_for_ranks_and_for_those_who_do_not_run_the_file() -> None:
    config = load(clip_low=0.1)
    Path("config.yaml").write_text(loader.dump(config))
    assert loader.load("config.yaml", run_code=True) == config
    forget()
    seen = loader.load("config.yaml")
    assert isinstance(seen.algorithm, AlgorithmInFile) and not Path("ran").exists()
    assert changes.difference(seen, config) == []
    make_plan(seen)  # its rules leave out what only the file knows
    assert not Path("ran").exists()
    assert as_dict(loader.from_dict(as_dict(seen), run_code=True)) == as_dict(config) and Path("ran").exists()


def test_an_edited_file_is_run_again() -> None:
    """A notebook edits and plans in one process."""
    assert load().algorithm.clip_low == 0.25
    Path("mine.py").write_text(MINE.replace("ClipLow = 0.25", "ClipLow = 0.125"))
    assert load().algorithm.clip_low == 0.125


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"least_weigt": 1},
            "config: unknown key algorithm.least_weigt of mine.py:Mine; nearest: algorithm.least_weight",
        ),
        ({"least_weight": 11}, "config: algorithm.least_weight must be at least 0 and at most 10; found 11"),
        ({"clip_low": "x"}, "config: algorithm.clip_low must be a number; found 'x'"),
        (
            {"name": "mine.py"},
            "algorithm.name is 'mine.py', but an algorithm of your own must be given as path/to/file.py:Class",
        ),
        (
            {"name": "gone.py:Mine"},
            "algorithm.name is 'gone.py:Mine', but there is no gone.py; relative paths begin at",
        ),
        ({"name": "mine.py:Nine"}, "algorithm.name is 'mine.py:Nine', but mine.py has no class Nine"),
        ({"name": "mine.py:not_a_class"}, "which is not derived from SequenceRatio or TokenRatio"),
        ({"name": "mine.py:Bare"}, "mine.py: Bare has settings without a description: undescribed"),
        ({"name": "mine.py:Named"}, "remove `name` from Named"),
        ({"name": "broken.py:Mine"}, "which cannot be loaded: ZeroDivisionError: division by zero"),
        ({"name": "no_python.py:Mine"}, "which cannot be loaded: SyntaxError: invalid syntax"),
    ],
)
def test_a_mistake_is_one_line(keys: dict[str, Any], text: str) -> None:
    Path("broken.py").write_text("1 / 0")
    Path("no_python.py").write_text("class = 3")
    with pytest.raises(ConfigError, match=re.escape(text)) as refused:
        load(**keys)
    assert len(refused.value.problems) == 1


@pytest.fixture
def run(folder: Path) -> RunDir:
    """A run that failed, whose config names an algorithm, a reward function and an observer in users' files."""
    Path("theirs.py").write_text("open('ran', 'a')\ndef reward(text, *, prompt, fields): ...\ndef watch(record): ...")
    own = {"reward": {"functions": [{"function": "theirs.py:reward"}]}, "tracking": {"observers": ["theirs.py:watch"]}}
    config = loader.from_dict({"run": {"max_steps": 4}, "algorithm": {"name": NAME}, **own}, run_code=True)
    made, _ = open_run(config)
    with made.lock():
        attempt = made.new_attempt(config)
        attempt.log_path(0).write_text("ZeroDivisionError: the cause\n")
        attempt.finish("failed", 1, "rank 0: ZeroDivisionError: the cause")
    for step in range(1, 5):
        made.append_metrics(
            {"step": step, "reward": 0.5, "loss": 0.1, "seconds": 2.0, "clip_fraction": 0.9, "update": 1}
        )
    forget()
    return made


@pytest.mark.parametrize(
    "words",
    [
        ("status", "RUN"),
        ("logs", "RUN"),
        ("report", "RUN", "--out", "page.html"),
        ("diagnose", "RUN", "--json"),
        ("cancel", "RUN"),
    ],
    ids=lambda words: words[0],
)
def test_who_looks_at_a_run_runs_none_of_its_code(
    run: RunDir, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run.path) if word == "RUN" else word for word in words])
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("ran").exists()


def test_a_command_that_is_given_the_config_runs_the_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text(f"algorithm: {{name: '{NAME}', least_weight: 3}}\n")
    assert main(["plan", "config.yaml"]) == 3  # much is missing
    assert Path("ran").exists()
    shown = " ".join(capsys.readouterr().out.split())
    assert "mine.py:Mine: a paper" in shown and "least_weight 3.0 Least weight of a token." in shown


def test_a_run_is_not_resumed_with_another_algorithm_but_with_other_observers(run: RunDir) -> None:
    config = loader.load(run.config, run_code=True)
    Path("theirs.py").write_text("def reward(text, *, prompt, fields): ...")
    with pytest.raises(ValueError, match=r"the code of your own \(theirs.py\) is not the file"):
        open_run(config)
    Path("theirs.py").write_text("open('ran', 'a')\ndef reward(text, *, prompt, fields): ...\ndef watch(record): ...")
    Path("mine.py").write_text(MINE + "\n")
    with pytest.raises(ValueError, match=r"the code of your own \(mine.py\) is not the file"):
        open_run(config)
    Path("mine.py").write_text(MINE)
    assert open_run(loader.with_settings(config, ["tracking.observers=[other.py:watch]"]))[1] is True


def test_a_submitted_run_has_the_files_of_the_time_of_submission(
    run: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = loader.load(run.config, run_code=True)
    snapshot.take(folder / "code.zip", config)
    Path("mine.py").write_text(MINE.replace("ClipLow = 0.25", "ClipLow = 0.125"))
    Path("theirs.py").unlink()
    with zipfile.ZipFile(folder / "code.zip") as archive:
        assert len([name for name in archive.namelist() if name.startswith("own/")]) == 2
    assert load().algorithm.clip_low == 0.125
    monkeypatch.setenv(CODE, str(folder / "code.zip"))
    assert load().algorithm.clip_low == 0.25
    assert snapshot.fingerprints(config) == run.read_info()["graders_sha256"]
