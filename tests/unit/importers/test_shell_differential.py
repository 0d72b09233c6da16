"""Scripts written at random give the commands that bash gives: what the reader calls known is what bash has.

Takes about 6 s; would catch a value, a word or a command that the reader takes for certain and bash does not have.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gspo_hpc.importers.scripts.expansion.splitting import Absent, Open
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.scripts.shell import follow

from .generated_scripts import NAMES, Writer

# Records the words of each run, and what declare says of the variables; also for `env` and `command`, as a program.
_STUB = r"""
megatron() {
  builtin printf '%s\0' "$@" "$STARTED_AS_PROGRAM"$'\1' >> "$RECORD_OF_RUNS"
  local __name
  for __name in @names@; do
    if [[ ${!__name+x} ]]; then
      builtin printf '%s\0' "$__name" "${!__name}" >> "$RECORD_OF_RUNS"
      builtin declare -p "$__name" >> "$RECORD_OF_RUNS"
      builtin printf '\0' >> "$RECORD_OF_RUNS"
    fi
  done
  builtin printf '%s\0' $'\2' >> "$RECORD_OF_RUNS"
}
outside() { builtin printf '%s\n' "$*"; }
outside_ok() { builtin return 0; }
outside_fail() { builtin return 1; }
"""


class Run(NamedTuple):
    """A run as bash started it."""

    words: tuple[str, ...]
    values: dict[str, str]
    exported: frozenset[str]
    program: bool  # it was started as a program, which sees nothing but what is exported


def in_bash(scripts: Sequence[str], folder: Path, seconds: int = 60) -> list[list[Run] | None]:
    """Return the runs of each script, None for one that is no bash."""
    stub = folder / "stub.sh"
    stub.write_text(_STUB.replace("@names@", " ".join(NAMES)))
    program = folder / "bin" / "megatron"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\nSTARTED_AS_PROGRAM=1 megatron "$@"\n')
    program.chmod(0o755)
    (folder / "empty").mkdir()
    for number, script in enumerate(scripts):
        (folder / f"{number}.sh").write_text(script)
    driver = (
        f"cd {folder}/empty\nfor ((n = 0; n < {len(scripts)}; n++)); do\n"
        f"RECORD_OF_RUNS={folder}/$n.txt BASH_ENV={stub} bash {folder}/$n.sh"
        f" </dev/null >/dev/null 2>{folder}/$n.err\ndone\n"
    )
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", f"ulimit -t {seconds}\n{driver}"], check=True, timeout=600, env=environment)
    found: list[list[Run] | None] = []
    for number in range(len(scripts)):
        record = folder / f"{number}.txt"
        errors = (folder / f"{number}.err").read_text(errors="replace")
        broken = "syntax error" in errors or "unexpected" in errors
        found.append(None if broken else _runs(record.read_text() if record.exists() else ""))
    return found


def _runs(text: str) -> list[Run]:
    runs = []
    for part in text.split("\2\0")[:-1]:
        words, _, rest = part.partition("\1\0")
        *given, program = words.split("\0")
        fields = rest.split("\0")[:-1]
        values = dict(zip(fields[::3], fields[1::3], strict=True))
        flags = {name: shown.split()[1] for name, shown in zip(fields[::3], fields[2::3], strict=True)}
        runs.append(Run(tuple(given), values, frozenset(name for name in flags if "x" in flags[name]), bool(program)))
    return runs


def is_known(word: str) -> bool:
    return not isinstance(word, Open | Absent) and not is_unset(word)


def fits(command: Command, run: Run) -> str:
    """Return what bash has otherwise than the reader says, an empty text if there is nothing."""
    words = [word for word in command.words[1:] if not isinstance(word, Absent)]
    opened = [number for number, word in enumerate(words) if isinstance(word, Open)]
    first = opened[0] if opened else len(words)
    last = len(words) - opened[-1] - 1 if opened else 0
    if len(run.words) < len(words) - len(opened) or (not opened and len(run.words) != len(words)):
        return f"{words} is {run.words}: another number of words"
    pairs = [
        *zip(words[:first], run.words, strict=False),
        *(zip(words[-last:], run.words[-last:], strict=True) if last else ()),
    ]
    for told, has in pairs:
        if is_known(told) and told != has:
            return f"{words} is {run.words}: {told!r} is {has!r}"
    if not opened:
        for number, (told, has) in enumerate(zip(words, run.words, strict=True)):
            if is_known(told) and told != has:
                return f"word {number}: {told!r} is {has!r}"
    for name in command.exported.intersection(NAMES) if run.program else NAMES:
        told = command.variables.get(name)
        if told is not None and is_known(told) and name not in command.unknown and told != run.values.get(name):
            return f"${name}: {told!r} is {run.values.get(name)!r}"
        if told is None and name not in command.unknown and "*" not in command.unknown and name in run.values:
            return f"${name}: not set is {run.values.get(name)!r}"
    texts = {name for name in NAMES if name in command.variables and is_known(command.variables[name])}
    if wrong := command.exported & texts - run.exported:
        return f"exported: {wrong}"
    return ""


def differences(script: str, runs: Sequence[Run], counts: dict[str, int]) -> list[str]:
    """Return what the reader says otherwise than bash; `counts` gets how much it says."""
    try:
        read = follow(script)
    except ValueError as error:
        counts["refused"] += 1
        counts[f"refused: {re.sub(r'line [0-9]*', '', str(error))[:60]}"] += 1
        return []
    told: dict[str, list[Command]] = defaultdict(list)
    has: dict[str, list[Run]] = defaultdict(list)
    certain = [command for command in read.commands if command.words[0] == "megatron"]
    possible = [command for command in read.possible if command.words[0] == "megatron"]
    for command in (*certain, *possible):
        told[command.words[1]].append(command)
        words = command.words[2:]
        counts["words"] += len(words)
        counts["known"] += sum(map(is_known, words))
        counts["runs"] += 1
    counts["certain"] += len(certain)
    for run in runs:
        has[run.words[0]].append(run)
    wrong: list[str] = []
    for command in certain:
        if command.words[1] not in has:
            wrong.append(f"run {command.words[1]} does not run")
    for site, there in has.items():
        if not told[site]:
            wrong.append(f"run {site} runs")
        for run in there:
            reasons = [fits(command, run) for command in told[site]]
            if reasons and all(reasons):
                wrong.append(f"run {site}: {reasons[0]}")
        for command in certain:
            if command.words[1] == site and all(reasons := [fits(command, run) for run in there]):
                wrong.append(f"run {site}, of several: {reasons[0]}")
    return wrong


def test_what_is_read_of_scripts_written_at_random_is_what_bash_has(tmp_path: Path) -> None:
    scripts = [Writer(seed).script() for seed in range(500)]
    counts: dict[str, int] = defaultdict(int)
    wrong: list[str] = []
    skipped = 0
    for seed, (script, runs) in enumerate(zip(scripts, in_bash(scripts, tmp_path), strict=True)):
        if runs is None:
            skipped += 1
            continue
        wrong += [f"seed {seed}: {line}\n{script}" for line in differences(script, runs, counts)]
    assert not wrong, f"{len(wrong)} differences, the first:\n{wrong[0]}"
    assert skipped <= 5 and counts["refused"] <= 10, dict(counts)
    assert counts["known"] / counts["words"] > 0.55, dict(counts)  # 0.59 in 2026-11
    assert counts["certain"] / counts["runs"] > 0.8, dict(counts)  # 0.88 in 2026-11
