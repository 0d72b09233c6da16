"""The Python interface: its names are found, explained and light to import, and its examples say what happens.

Takes 6 s. It would catch a name that is listed and missing, an example that no longer holds, an import of
`gspo_hpc` that brings libraries along, and a mistake of a user that is not answered in a line.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import gspo_hpc
from gspo_hpc.config import loader
from gspo_hpc.launch import local
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.system.exit_codes import DONE, FAILED, REFUSED, REQUEUE

FUNCTIONS = [name for name in gspo_hpc.__all__ if inspect.isfunction(getattr(gspo_hpc, name))]
METHODS = [name for name, one in vars(gspo_hpc.Run).items() if inspect.isfunction(one) and name[0] != "_"]
SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of two steps, which the examples speak of, in the current folder."""
    monkeypatch.chdir(tmp_path)
    run, _ = open_run(loader.from_dict({"run": {"name": "demo", "max_steps": 4}}))
    for step in (1, 2):
        run.append_metrics({"step": step, "reward": step / 4, "loss": 0.1, "seconds": 2.0})
    run.append_samples([{"step": 1, "phase": "train", "prompt": "7 + 5 = ?", "completion": "12", "reward": 1.0}])
    return run


def test_names_are_found_and_no_others() -> None:
    assert set(gspo_hpc.__all__) <= set(dir(gspo_hpc))
    assert {getattr(gspo_hpc, name).__name__ for name in gspo_hpc.__all__} == set(gspo_hpc.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'; it has Run, "):
        gspo_hpc.trian  # noqa: B018
    assert not hasattr(gspo_hpc, "__wrapped__")  # asked by inspect and doctest


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(gspo_hpc.__file__).read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = [one.name for node in block.body if isinstance(node, ast.ImportFrom) for one in node.names]
    assert sorted(names) == sorted(gspo_hpc.__all__)


@pytest.mark.parametrize("function", [*FUNCTIONS, *(f"Run.{name}" for name in METHODS)])
def test_every_function_is_explained(function: str) -> None:
    owner, _, name = function.rpartition(".")
    one = getattr(gspo_hpc.Run if owner else gspo_hpc, name)
    text, parameters = inspect.getdoc(one) or "", [*inspect.signature(one).parameters]
    needed = [section for section in SECTIONS if section in ("Returns:", "Example:") or not owner]
    assert [section for section in needed if section not in text] == []
    assert [name for name in parameters if name != "self" and not re.search(rf"^ +\*{{0,2}}{name}: ", text, re.M)] == []


@pytest.mark.parametrize("owner", [*FUNCTIONS, "Run"])
def test_examples_say_what_happens(demo: RunDir, owner: str) -> None:
    tests = doctest.DocTestFinder().find(getattr(gspo_hpc, owner), owner, globs={"gspo_hpc": gspo_hpc, "Path": Path})
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.summarize().failed == 0
    assert runner.tries > 0 or owner in ("train", "submit")  # which start something: docs/notebook.ipynb trains


def modules(code: str) -> set[str]:
    """Every module that a fresh Python has after `code`, but for those that it starts with."""
    source = f"import json, sys\nhad = set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - had)))"
    command = [sys.executable, "-S", "-c", source] if code == "import gspo_hpc" else [sys.executable, "-c", source]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, cwd=Path(gspo_hpc.__file__).parents[1]
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_import_brings_nothing_along() -> None:
    assert modules("import gspo_hpc") == {"gspo_hpc"}  # without site-packages, too


def test_planning_from_python_is_light() -> None:
    found = modules("import gspo_hpc\nassert gspo_hpc.plan(gspo_hpc.load_config('smollm2_cpu')).valid")
    assert "gspo_hpc.planning.plan" in found
    assert not found & {"torch", "numpy", "vllm", "submitit", "rich", "jinja2", "argparse"}


CONFIG = "tiny_cpu"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda config: gspo_hpc.load_config("tiny_cqu"), "tiny_cqu: no such config file; nearest: tiny_cpu"),
        (lambda config: gspo_hpc.load_config(CONFIG, "run.max_stepz=3"), "unknown key run.max_stepz"),
        (
            lambda config: gspo_hpc.with_settings(config, "run.max_steps=x", "run.max_stepz=3"),
            "unknown key run.max_stepz",
        ),
        (lambda config: gspo_hpc.with_reward(config, "number_mach"), "nearest: number_match"),
        (lambda config: gspo_hpc.with_reward(config, "gone.py:reward"), "gone.py is not there"),
        (lambda config: gspo_hpc.with_reward(config, "number_match", weight="x"), "weight must be a number; found 'x'"),
        (lambda config: gspo_hpc.with_algorithm(config, "gpso"), "algorithm.name is 'gpso', which is not allowed"),
        (lambda config: gspo_hpc.with_algorithm(config, "grpo", clip=1), "unknown key algorithm.clip of grpo"),
        (lambda config: gspo_hpc.with_observer(config, "gone.py:watch"), "gone.py is not there"),
        (lambda config: gspo_hpc.with_environment(config, "guess_numbr"), "nearest: guess_number"),
        (lambda config: gspo_hpc.with_environment(config, "gone.py:Game"), "gone.py is not there"),
        (lambda config: gspo_hpc.with_environment(config, "guess_number", args={"lo": 1}), "environment.args"),
        (lambda config: gspo_hpc.open_run("runs/none"), "runs/none: no such run directory"),
    ],
)
def test_a_mistake_is_told_in_a_line(demo: RunDir, call: Callable[[object], object], text: str) -> None:
    config = gspo_hpc.load_config(CONFIG)
    with pytest.raises(ValueError, match=re.escape(text)) as refused:
        call(config)
    assert len(str(refused.value).splitlines()) <= 2


def test_each_config_is_another_and_keeps_what_was_given() -> None:
    first = gspo_hpc.load_config(CONFIG, "algorithm.kl_beta=0.1")
    second = gspo_hpc.with_settings(gspo_hpc.with_reward(first, "exact_match"), "run.seed=7")
    assert [term.function for term in first.reward.functions] == ["number_match"] and first.run.seed == 42
    assert [term.function for term in second.reward.functions] == ["exact_match"] and second.run.seed == 7
    assert second.algorithm == first.algorithm
    third = gspo_hpc.with_algorithm(second, "grpo")
    assert (third.algorithm.clip_low, third.algorithm.kl_beta) == (0.2, 0.0)  # the algorithm's own, not those before
    assert third.run.seed == 7


@pytest.mark.parametrize(("code", "raises"), [(DONE, False), (REQUEUE, False), (FAILED, True), (REFUSED, True)])
def test_train_returns_the_run_or_raises_why_it_failed(
    demo: RunDir, monkeypatch: pytest.MonkeyPatch, code: int, raises: bool
) -> None:
    """The launcher itself is tested where it starts ranks; here it has ended with a code."""

    def ended(config: object, checks: object) -> int:
        with demo.lock():
            demo.new_attempt(loader.load(demo.config)).finish("failed" if raises else "done", code, "rank 0: the cause")
        return code

    monkeypatch.setattr(local, "train", ended)
    config = loader.load(demo.config)
    if raises:
        with pytest.raises(gspo_hpc.RunFailed, match=r"runs/demo: rank 0: the cause \(gspo-hpc logs .*--errors\)"):
            gspo_hpc.train(config)
        return
    run = gspo_hpc.train(config)
    assert run.path == demo.path and run.state == "done" and "step 2 of 4" in repr(run)


def test_train_in_another_thread_is_refused(demo: RunDir) -> None:
    told: list[str] = []

    def call() -> None:
        try:
            gspo_hpc.train(loader.load(demo.config))
        except ValueError as error:
            told.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in told[0]
