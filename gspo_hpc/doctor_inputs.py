"""The plan, the data files and the graders of a config.

Floor 6.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gspo_hpc import doctor_model, mends, prompts, rewards, snapshot
from gspo_hpc.config import Config, Data
from gspo_hpc.doctor_finding import Finding, Section, first_line, gib
from gspo_hpc.plan import make_plan

ROWS = 1000  # of a large file that are looked at
_WHOLE_BYTES = 64 * 2**20  # smaller files are read whole
GRADER_SECONDS = 30.0
_GRADER = "import sys; from gspo_hpc import rewards; rewards.load(sys.argv[1])"


def findings(config: Config, *, load_graders: bool = True) -> list[Finding]:
    """All lines of the group."""
    section = Section("inputs")
    doctor_model.check(config, section)
    rows = _data(section, "training data", config.data.train, config.data)
    if config.data.eval is not None:
        _data(section, "evaluation data", config.data.eval, config.data)
    elif config.eval.interval is not None:
        text = "eval.interval is given, and data.eval is not"
        section.warn("evaluation data", text, "give data.eval, or eval.interval=null")
    _plan(section, config, rows)
    _graders(section, config, load_graders)
    return section.findings


def _plan(section: Section, config: Config, rows: int | None) -> None:
    if missing := config.missing():
        section.fail("config", f"a run also needs: {', '.join(missing)}", "give them in the file, or as key=value")
    plan = make_plan(config, rows)
    if plan.broken:
        rules = sorted({item.rule for item in plan.broken})
        nearest = mends.find(config, rows, limit=1)
        count = f"{len(plan.broken)} broken (rule {', '.join(map(str, rules))})"
        fix = f"{nearest[0]}; gspo-hpc plan shows others" if nearest else "gspo-hpc plan says which go together"
        section.fail("plan", f"{count}: {first_line(plan.broken[0].message)}", fix)
    elif config.rollout.mode == "server":
        section.fail("plan", "rollout.mode is server, which can be planned but not run yet", "rollout.mode=colocate")
    else:
        section.ok("plan", "valid: every rule that could be checked holds")
    for text in plan.warnings:
        section.warn("plan", first_line(text, 300), "gspo-hpc plan explains it")


def _data(section: Section, check: str, path: str | None, data: Data) -> int | None:
    """Adds the line of a data file; how many rows it has, where all were read."""
    if path is None:
        section.skip(check, "not given")
        return None
    file = Path(path)
    fix = "one JSON object a line, with a prompt (text, or chat messages {role, content}) under data.prompt_key"
    try:
        size = file.stat().st_size
        if size <= _WHOLE_BYTES:
            rows = len(prompts.load_rows(file, data))
            section.ok(check, f"{rows:,} rows, {file}")
            return rows
        if file.suffix != ".jsonl":
            section.skip(check, f"{file}: {gib(size)}, whose rows are read when the run begins")
            return None
        _head(file, data)
        section.ok(check, f"{gib(size)}, the first {ROWS:,} rows are as they should be, {file}")
    except OSError as error:
        section.fail(check, f"{path}: {error.strerror}", f"relative paths begin at {os.getcwd()}")
    except ModuleNotFoundError as error:
        section.skip(check, f"{path}: {error.name} is not installed here, and reads such files")
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        section.fail(check, "; ".join(lines[:2])[:400], fix)
    return None


def _head(file: Path, data: Data) -> None:
    """Raises ValueError for malformed rows among the first."""
    with tempfile.TemporaryDirectory(prefix="gspo-doctor-") as folder:
        part = Path(folder) / file.name
        with file.open("rb") as source:
            part.write_bytes(b"".join(itertools.islice(source, ROWS)))
        try:
            prompts.load_rows(part, data)
        except ValueError as error:
            raise ValueError(str(error).replace(str(part), str(file))) from None


def _graders(section: Section, config: Config, load: bool) -> None:
    if not config.reward.functions:
        return  # told as missing already
    try:
        rewards.check(config.reward)
    except ValueError as error:
        section.fail(
            "graders",
            "; ".join(line.strip() for line in str(error).splitlines())[:400],
            "path/to/file.py:function, with grade(completion, *, prompt, fields, ...), or a name of the package",
        )
        return
    own = [term.function for term in config.reward.functions if snapshot.grader_file(term.function) is not None]
    for function in dict.fromkeys(own) if load else ():
        if error_text := _load(function):
            fix = f"mend it: {sys.executable} {snapshot.grader_file(function)} shows it"
            section.fail("graders", f"{function} does not load: {error_text}", fix)
            return
    names = ", ".join(term.function for term in config.reward.functions)
    section.ok("graders", f"{names}{': loaded' if own and load else ''}")


def _load(function: str, seconds: float = GRADER_SECONDS) -> str:
    """What goes wrong when a grader's file is loaded, in a process of its own; nothing: the empty text."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _GRADER, function],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not within {seconds:.0f} s"
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1][:300] if said else f"its process ended with {done.returncode}"
