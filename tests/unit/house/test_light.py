"""How much a command imports: what decides how soon it answers on a login node, and does not depend on the machine.

Takes 3 s. It would catch a library, or a part of this package, that a command begins to import without needing it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.runs.directory import open_run
from tests.folders import model_folder

TRAINING = ("torch", "vllm", "megatron", "wandb", "transformers", "numpy", "safetensors", "pyarrow")
OTHERS = (
    "jinja2",
    "submitit",
    "cloudpickle",
    "tree_sitter",
    "pygments",
    "rich.markdown",
    "rich.syntax",
    "rich.progress",
)
STANDARD = (
    "asyncio",
    "http",
    "urllib.request",
    "ssl",
    "multiprocessing",
    "concurrent.futures",
    "xml",
    "unittest",
    "logging",
)
HEAVY = (*TRAINING, *OTHERS, *STANDARD)
OURS = (
    "gspo_hpc.launch",
    "gspo_hpc.doctor",
    "gspo_hpc.diagnose",
    "gspo_hpc.report",
    "gspo_hpc.importers",
    "gspo_hpc.runs",
)
# A plan has the checks of what a run needs, and nothing that starts one.
OF_A_PLAN = (
    *(name for name in OURS if name != "gspo_hpc.launch"),
    *("gspo_hpc.launch.checks", "gspo_hpc.launch.local", "gspo_hpc.launch.slurm", "gspo_hpc.launch.notify"),
)
OTHER_ALGORITHMS = ("gspo_hpc.algorithms.grpo", "gspo_hpc.algorithms.cispo", "gspo_hpc.algorithms.rloo")
REFUSED_PLANS, SUGGESTIONS = "gspo_hpc.planning.fixes", "gspo_hpc.planning.layouts"
CONFIG = ("gspo_hpc.config", "pydantic", "yaml")


def loaded(project: Path, code: str) -> set[str]:
    """Every module that a fresh Python has after `code`, but for those that it starts with."""
    before, after = (
        "import sys\nhad = set(sys.modules)",
        "import json\nprint(json.dumps(sorted(set(sys.modules) - had)))",
    )
    command = [sys.executable, "-c", f"{before}\n{code}\n{after}"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def named(modules: set[str], names: Sequence[str]) -> list[str]:
    """The names that are among the modules, or hold one of them."""
    return [name for name in names if any(module == name or module.startswith(f"{name}.") for module in modules)]


@pytest.mark.parametrize(
    ("command", "absent", "ours", "others"),  # the most modules of this package, and of others
    [
        ("--help", (*HEAVY, *OURS, *CONFIG, "rich"), 8, 25),
        ("plan smollm2_cpu", (*HEAVY, *OF_A_PLAN, REFUSED_PLANS, SUGGESTIONS), 114, 250),
        ("plan qwen3_30b_a3b_ep8", (*HEAVY, *OF_A_PLAN, REFUSED_PLANS, SUGGESTIONS), 131, 250),
        ("plan smollm2_cpu --json", (*HEAVY, *OF_A_PLAN, REFUSED_PLANS, SUGGESTIONS, "rich"), 111, 200),
        ("schema", (*HEAVY, *OURS, "gspo_hpc.planning", "rich"), 47, 180),
        ("suggest qwen2.5_7b_tp2", (*HEAVY, *OF_A_PLAN, REFUSED_PLANS), 110, 250),
    ],
)
def test_a_command_imports_only_what_it_needs(
    project: Path, tmp_path: Path, command: str, absent: tuple[str, ...], ours: int, others: int
) -> None:
    words = command.split()
    if words[0] == "plan":  # a run that is there, as the quickstart leaves one, is read
        words.append(f"run.dir={tmp_path}/run")
    code = (
        "import contextlib, io\nfrom gspo_hpc.cli.main import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    assert main({words!r}) in (0, 3)"
    )
    modules = loaded(project, code)
    assert named(modules, absent if command in ("schema", "--help") else (*absent, *OTHER_ALGORITHMS)) == []
    own = {name for name in modules if name.split(".")[0] == "gspo_hpc"}
    assert "gspo_hpc.cli.main" in own
    assert (len(own) <= ours, len(modules - own) <= others) == (True, True), (len(own), len(modules - own))


def test_a_plan_of_files_that_are_here_reads_them_without_a_library(project: Path, tmp_path: Path) -> None:
    """Rows, headers of weights and the syntax tree of a reward function."""
    model_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n' * 40)
    (tmp_path / "own.py").write_text("def mark(completion, *, prompt, fields):\n    return 1.0\n")
    words = ["plan", "tiny_cpu", f"model.path={tmp_path}/model", f"data.train={tmp_path}/rows.jsonl", "--json"]
    words += [f"data.eval={tmp_path}/rows.jsonl", f"reward.functions=[{{function: {tmp_path}/own.py:mark}}]"]
    code = (
        "import contextlib, io\nfrom gspo_hpc.cli.main import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    assert main({words!r}) == 0"
    )
    modules = loaded(project, code)
    assert named(modules, (*HEAVY, *OF_A_PLAN, REFUSED_PLANS, SUGGESTIONS, "rich")) == []
    own = {name for name in modules if name.split(".")[0] == "gspo_hpc"}
    assert "gspo_hpc.data.rows" in own and "gspo_hpc.models.weight_table" in own
    assert (len(own) <= 111, len(modules - own) <= 200) == (True, True), (len(own), len(modules - own))


def test_the_status_of_a_run_that_goes_on_is_read_without_models_and_rules(project: Path, tmp_path: Path) -> None:
    """It is asked for again and again, and from scripts: neither sizes of models nor pages come with it."""
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/run, max_steps: 2}}\n")
    open_run(loader.load(str(tmp_path / "run.yaml"), []))
    absent = ("gspo_hpc.models", "gspo_hpc.planning.rules", "gspo_hpc.planning.plan", "gspo_hpc.runs.learning", "rich")
    for command, ours, others in (("status", 76, 190), ("logs", 76, 190)):
        words = [command, f"{tmp_path}/run"]
        code = (
            "import contextlib, io\nfrom gspo_hpc.cli.main import main\n"
            f"with contextlib.redirect_stdout(io.StringIO()):\n    assert main({words!r}) in (0, 2)"
        )
        modules = loaded(project, code)
        assert named(modules, (*TRAINING, *OTHERS, *absent, *OURS[1:5])) == []
        own = {name for name in modules if name.split(".")[0] == "gspo_hpc"}
        assert (len(own) <= ours, len(modules - own) <= others) == (True, True), (words, len(own), len(modules - own))


def test_the_probe_sees_an_import(project: Path) -> None:
    modules = loaded(project, "import logging.handlers, gspo_hpc.planning.fixes.search")
    assert named(modules, (*HEAVY, REFUSED_PLANS)) == ["logging", REFUSED_PLANS]
