"""Every Python that the package and its tools start leaves the current folder out of its path.

Takes a second. It would catch a new start of Python without -P: the folder that somebody stands in may be a run
directory of somebody else, with a torch.py in it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SHELLS = {"bash", "sh"}  # -c is a line of the shell
# Starts that need no -P, by file and what is started.
EXCEPTIONS = {
    "gspo_hpc/doctor/packages.py: -c": "another Python, maybe too old for -P; its script clears the path first",
    "gspo_hpc/system/terminal.py: -m": "a line for people: __main__.py takes the current folder out of the path",
    "gspo_hpc/starter/project.py: -c": "a line for people",
    "tools/acceptance/runner.py: -m": "cwd=REPO",
    "tools/acceptance/parts/speed.py: -m": "cwd=REPO",
    "tools/acceptance/parts/parity.py: -m": "cwd=REPO",
    "tools/bench/start.py: -m": "the commands, which are started with -P before these words",
    "tools/bench/start.py: -c": "the commands, which are started with -P before these words",
}


def starts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the option of each command in a module that starts Python without -P.

    Seen are lists and tuples with -m or -c, texts with values in them that have -m or -c as a word, and lists in which
    the interpreter comes first and nothing but values that are not known here.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List | ast.Tuple):
            words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            if "-P" in words or SHELLS & set(words[:1]):
                continue
            found = [word for word in words if word in ("-m", "-c")]
            if found:
                yield node.lineno, found[0]
            elif len(node.elts) > 1 and _is_python(node.elts[0]) and isinstance(node.elts[1], ast.Starred):
                yield node.lineno, "*"
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.FormattedValue):
            text = "".join(one.value for one in node.values if isinstance(one, ast.Constant))
            if (option := re.search(r"(?:^| )(-[mc]) ", text)) and " -P " not in text:
                yield node.lineno, option[1]


def _is_python(node: ast.expr) -> bool:
    return "sys.executable" in ast.unparse(node)


def modules(project: Path) -> Iterator[Path]:
    """Yield the modules of the package and its tools."""
    reads = project / "gspo_hpc" / "importers"  # they start nothing: these are words of scripts that they read
    for name in ("gspo_hpc", "tools", "slurm"):
        yield from (path for path in sorted((project / name).rglob("*.py")) if reads not in path.parents)


def test_every_start_of_python_leaves_out_the_current_folder(project: Path) -> None:
    found = {
        f"{path.relative_to(project)}: {option}": line
        for path in modules(project)
        for line, option in starts(path.read_text("utf-8"))
    }
    new = {f"{place} in line {line}" for place, line in found.items() if place not in EXCEPTIONS}
    assert not new, f"use environment.python, or give -P: {sorted(new)}"
    assert EXCEPTIONS.keys() <= found.keys(), "an exception that nothing needs"


@pytest.mark.parametrize(
    "line",
    [
        '[sys.executable, "-m", "gspo_hpc.training.worker"]',
        '(sys.executable, "-m", "gspo_hpc.training.worker")',
        '[python, "-u", "-m", "x", *words]',
        '[*words, *python, "-m", "x"]',
        '[sys.executable, "-c", code]',
        "[sys.executable, *arguments]",
        'f"{python} -u -m {module}"',
    ],
)
def test_a_start_without_it_is_found(line: str) -> None:
    assert list(starts(line))
    assert not list(
        starts(
            line.replace('"-m"', '"-P", "-m"')
            .replace('"-c"', '"-P", "-c"')
            .replace("-m {", "-P -m {")
            .replace("executable, *", 'executable, "-P", *')
        )
    )


def test_shells_start_it_from_the_project_or_without_the_current_folder(project: Path) -> None:
    for path in sorted([*(project / "tools").glob("*.sh"), *(project / "slurm").glob("*.sh")]):
        text = path.read_text("utf-8")
        began = re.search(r"python3?\}?\"? (-[mc] |- )|PYTHON\}?\"? (-[mc] |- )", text, re.IGNORECASE)
        if began:
            safe = re.search(r'^cd "\$PROJECT"|^export PYTHONSAFEPATH=1', text, re.MULTILINE)
            assert safe, f"{path.name} starts Python where somebody stands: export PYTHONSAFEPATH=1"
