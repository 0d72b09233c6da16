"""Every Python that the package and its tools start leaves the current folder out of its path.

Takes seconds. It would catch a new start of Python without -P, by a command, by os.spawn* and its like or by
multiprocessing: the folder that somebody stands in may be a run directory of somebody else, with a torch.py in it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SHELLS = {"bash", "sh"}  # -c is a line of the shell
# Starts that need no -P, by file and what is started.
EXCEPTIONS = {
    "gspo_hpc/doctor/packages.py: -c": "another Python, maybe too old for -P; its script clears the path first",
    "gspo_hpc/rewards/environments/verifiers.py: -c": "another Python, with -I, which has -P in it",
    "gspo_hpc/sandbox/jails.py: -c": "another Python, with -I, which has -P in it",
    "gspo_hpc/system/terminal.py: -m": "a line for people: __main__.py takes the current folder out of the path",
    "gspo_hpc/starter/project.py: -c": "a line for people",
    "tools/acceptance/parts/ipc.py: get_context": "cwd=REPO",
    "tools/acceptance/parts/server.py: get_context": "cwd=REPO",
    "tools/acceptance/runner.py: -m": "cwd=REPO",
    "tools/acceptance/parts/speed.py: -m": "cwd=REPO",
    "tools/acceptance/parts/parity.py: -m": "cwd=REPO",
    "tools/bench/start.py: -m": "the commands, which are started with -P before these words",
    "tools/bench/start.py: -c": "the commands, which are started with -P before these words",
}


# Functions that start a program whose words are their arguments, in os and asyncio.
_STARTERS = re.compile(
    r"(spawn|exec)(l|le|lp|lpe|v|ve|vp|vpe)|posix_spawnp?|create_subprocess_(exec|shell)|system|popen|getoutput|getstatusoutput"
)
# Those of multiprocessing that choose new interpreters, or which one.
_SPAWNING = {"get_context", "set_start_method", "set_executable", "ProcessPoolExecutor", "ProcessPool"}
# Those that start a process in the way that this version of Python has as its default, or in one that is named.
_DEFAULT_WAY = re.compile(
    r"(.*\.)?(multiprocessing|mp)\.(Process|(pool\.)?Pool|Manager|spawn|start_processes)|(.*\.)?(Spawn|ForkServer)(Context|Process)"
)
_PYTHON = re.compile(r"(.*/)?python(3(\.\d+)?)?")
_OPTION = re.compile(r"-[A-Za-z]*[mc]|-")  # alone or behind others (-um); a minus is a program on standard input


def starts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the option, or the function, of each command in a module that starts Python without -P.

    Seen are lists and tuples with -m or -c, texts with values in them that have -m or -c as a word, lists in which
    the interpreter comes first and nothing but values that are not known here, the functions of os that start a program
    with an interpreter among their arguments, and multiprocessing's for new interpreters.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield from _call(node)
        elif isinstance(node, ast.ImportFrom) and "multiprocessing" in (node.module or ""):
            names = (f"multiprocessing.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name) for name in names if _DEFAULT_WAY.fullmatch(name) and "Spawn" not in name)
        elif isinstance(node, ast.List | ast.Tuple):
            words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            if "-P" in words or SHELLS & set(words[:1]):
                continue
            python = bool(node.elts) and _is_python(node.elts[0])
            options = filter(_OPTION.fullmatch, (word for word in words if isinstance(word, str)))
            found = [word for word in options if python or word in ("-m", "-c")]
            if found:
                yield node.lineno, found[0]
            elif len(node.elts) > 1 and _is_python(node.elts[0]) and isinstance(node.elts[1], ast.Starred):
                yield node.lineno, "*"
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.FormattedValue):
            text = "".join(one.value for one in node.values if isinstance(one, ast.Constant))
            if (option := re.search(r"(?:^| )(-[mc]) ", text)) and " -P " not in text:
                yield node.lineno, option[1]


def _call(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    words = [one.value for one in given if isinstance(one, ast.Constant)]
    if _DEFAULT_WAY.fullmatch(ast.unparse(node.func)):
        yield node.lineno, name
    elif name in _SPAWNING:
        context = {keyword.arg for keyword in node.keywords} & {"mp_context", "context"}  # found where it is made
        if not context and words != ["fork"]:  # with no name, it is what Python's version has as its default
            yield node.lineno, name
    elif _STARTERS.fullmatch(name):
        inside = [part for one in given if isinstance(one, ast.List | ast.Tuple) for part in one.elts]
        words += [one.value for one in inside if isinstance(one, ast.Constant)]
        first = [word for text in words if isinstance(text, str) for word in text.split()]
        python = any(map(_PYTHON.fullmatch, first)) or any(map(_is_python, [*given, *inside]))
        if python and "-P" not in first:
            yield node.lineno, name


def _is_python(node: ast.expr) -> bool:
    text = ast.unparse(node)
    named = isinstance(node, ast.Constant) and isinstance(node.value, str) and _PYTHON.fullmatch(node.value)
    return bool(named) or "sys.executable" in text or text in ("python", "interpreter")


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
        '[sys.executable, "-um", "x"]',
        '["python3", "-Bc", code]',
        '[sys.executable, "-"]',
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
            .replace(', "-um"', ', "-P", "-um"')
            .replace(', "-Bc"', ', "-P", "-Bc"')
            .replace(', "-"]', ', "-P", "-"]')
        )
    )


@pytest.mark.parametrize(
    ("line", "function"),
    [
        ('os.spawnlp(os.P_WAIT, "python3", "python3", "x.py")', "spawnlp"),
        ('os.spawnvp(os.P_NOWAIT, "python", ["python", "x.py"])', "spawnvp"),
        ('spawnle(P_WAIT, sys.executable, "python", "x.py", env)', "spawnle"),
        ('os.execvp("/usr/bin/python3.12", words)', "execvp"),
        ("os.execv(sys.executable, [sys.executable, *words])", "execv"),
        ('os.posix_spawn("/usr/bin/python3", ["python3", "x.py"], os.environ)', "posix_spawn"),
        ("os.posix_spawnp(file=sys.executable, argv=words, env={})", "posix_spawnp"),
        ('asyncio.create_subprocess_exec(sys.executable, "x.py")', "create_subprocess_exec"),
        ('os.system("python3 x.py")', "system"),
        ('multiprocessing.get_context("spawn")', "get_context"),
        ('multiprocessing.get_context(method="forkserver")', "get_context"),
        ("get_context()", "get_context"),
        ("multiprocessing.context.SpawnContext()", "SpawnContext"),
        ('set_start_method("spawn")', "set_start_method"),
        ("multiprocessing.set_executable(sys.executable)", "set_executable"),
        ("context.set_executable(path)", "set_executable"),
        ("ProcessPoolExecutor(4)", "ProcessPoolExecutor"),
        ("pebble.ProcessPool(max_workers=4)", "ProcessPool"),
        ("multiprocessing.pool.Pool(4)", "Pool"),
        ("multiprocessing.Process(target=run)", "Process"),
        ("from multiprocessing import Process", "multiprocessing.Process"),
        ("mp.Pool(4)", "Pool"),
        ("torch.multiprocessing.spawn(run, nprocs=2)", "spawn"),
        ("multiprocessing.context.SpawnContext()", "SpawnContext"),
        ('os.posix_spawn(python, [python, "x.py"], env)', "posix_spawn"),
    ],
)
def test_a_function_that_starts_it_is_found(line: str, function: str) -> None:
    assert (1, function) in list(starts(line))


@pytest.mark.parametrize(
    "line",
    [
        'os.spawnlp(os.P_WAIT, "python3", "python3", "-P", "x.py")',
        'os.execv(sys.executable, [sys.executable, "-u", "-P", "-m", "x"])',
        'os.execvp("srun", ["srun", *words])',
        'multiprocessing.get_context("fork")',
        "ProcessPoolExecutor(4, mp_context=context)",
        "ProcessPool(max_workers=4, context=context)",
        "system(one, two)",
        "context.Process(target=run)",
        "from multiprocessing.connection import Connection",
        "psutil.Process(pid)",
    ],
)
def test_a_function_with_it_or_of_another_program_is_not(line: str) -> None:
    assert not list(starts(line))


def test_what_the_reward_pool_starts_leaves_out_the_current_folder(tmp_path: Path, project: Path) -> None:
    """A file of the folder that somebody stands in, with the name of one that Python itself imports, is not run."""
    (tmp_path / "pickle.py").write_text("open('ran', 'w').close()\n")
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"  # started as the command gspo-hpc is: by its path, without -P
    script.write_text(
        "import os\n"
        "from gspo_hpc.rewards import spawning\n\n"
        "def told(out):\n"
        "    before = os.environ.get('PYTHONSAFEPATH')\n"
        "    spawning.begun()\n"
        "    out.put((before, os.environ.get('PYTHONSAFEPATH')))\n\n"
        "if __name__ == '__main__':\n"
        "    context = spawning.context()\n"
        "    out = context.Queue()\n"
        "    context.Process(target=told, args=(out,)).start()\n"
        "    assert 'PYTHONSAFEPATH' not in os.environ, 'what else is started here would have it'\n"
        "    assert out.get(timeout=60) == ('gspo-hpc', None)\n"
    )
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"} | {"PYTHONPATH": str(project)}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=clean, check=True, timeout=120)
    assert not (tmp_path / "ran").exists()


def test_shells_start_it_from_the_project_or_without_the_current_folder(project: Path) -> None:
    for path in sorted([*(project / "tools").glob("*.sh"), *(project / "slurm").glob("*.sh")]):
        text = path.read_text("utf-8")
        began = re.search(r"python3?\}?\"? (-[mc] |- )|PYTHON\}?\"? (-[mc] |- )", text, re.IGNORECASE)
        if began:
            safe = re.search(r'^cd "\$PROJECT"|^export PYTHONSAFEPATH=1', text, re.MULTILINE)
            assert safe, f"{path.name} starts Python where somebody stands: export PYTHONSAFEPATH=1"
