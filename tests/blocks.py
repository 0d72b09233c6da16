"""The blocks of commands in the documentation, and how tests execute them as they stand.

A page is one shell script: its blocks run in their order, in one folder, so that what one writes the next finds. A
block that no quick test can run has one of the lines of `REASONS` above it, for readers and for tests alike.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.config import loader
from gspo_hpc.evaluation import stored
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.starter import project
from gspo_hpc.system.files import write_json
from tests import pages
from tests.unit.evaluation.kept import row

# What a marked block needs, and what of it shows in the block: nothing else may be marked so.
REASONS = {
    "Needs a cluster": r"submit|--slurm|sbatch|squeue|sacct|scontrol|--nodes|local_cluster|nft |SHARED=",
    "Needs a GPU": r"vllm==|gpu_acceptance|nvidia-smi",
    "Needs the internet": r"pip3? |uv |buildah build|hf download|setup_env|npm |wandb (sync|login)|gspo-hpc sync",
    "Takes minutes": (
        r"gspo-hpc (try|train|eval|serve|export)|from_pretrained|tests\.slurm|"
        r"tools/(quickstart|test|bench/|make_|measure_)"
    ),
}
SHELL = ("bash", "sh", "shell", "console")
# Exit codes by which commands say something of what they looked at: a check that failed, a config that lacks settings.
SAYS = {"doctor": (1,), "diagnose": (1,), "plan": (3,)}
_BLOCK = re.compile(r"(?:^\*([^*\n]+):\*\n\n)?^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_RUN = re.compile(r"\bruns/(\w+)")
_INIT = re.compile(r"(?m)^gspo-hpc init (\w+)")


@dataclass(frozen=True)
class Block:
    """A block of commands, or a Python file: `reason` says why it is not run, if it is marked."""

    kind: str
    text: str
    reason: str | None

    @property
    def file(self) -> str | None:
        """The file that the first line of a block of Python names."""
        named = re.match(r"# (\S+\.py)\n", self.text)
        return named[1] if self.kind == "python" and named else None


@dataclass(frozen=True)
class Shown:
    """A command of a page, what the page shows of its output, and what it printed."""

    command: str
    expected: tuple[str, ...]
    printed: str


def blocks(text: str) -> list[Block]:
    """Return the blocks of commands and of Python of a page, in their order."""
    found = (Block(kind, body, reason or None) for reason, kind, body in _BLOCK.findall(text))
    return [block for block in found if block.kind in (*SHELL, "python")]


def script(found: list[Block], out: Path) -> tuple[str, list[tuple[str, tuple[str, ...]]]]:
    """Return a shell script of the blocks that are not marked, and its commands with the output that is shown.

    What the commands print goes into the files 0, 1, ... of the folder `out`.
    """
    lines, commands = [_PREFIX], []
    for block in found:
        if block.reason is not None:
            continue
        if block.file is not None:
            lines.append(f"cat > {block.file} <<'END_OF_FILE'\n{block.text}END_OF_FILE")
            continue
        for command, expected in _commands(block):
            shown = "SHOWN=1" if expected else "SHOWN="
            lines.append(f"{shown}\n{{\n{command.rstrip()}\n}} > {out}/{len(commands)} 2>&1")
            commands.append((command, expected))
    return "\n".join(lines) + "\n", commands


def run(
    found: list[Block], folder: Path, seconds: float = 300.0, more: Mapping[str, Sequence[str]] | None = None
) -> list[Shown]:
    """Run the blocks that are not marked in a folder, within so many seconds; AssertionError names one that failed.

    `more`: words that commands of gspo-hpc are given beside those of the page, so that they take seconds.
    """
    out = folder.parent / f"{folder.name}-printed"
    out.mkdir(exist_ok=True)
    text, commands = script(found, out)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(pages.PROJECT),
        "HF_HOME": str(folder / ".hf"),
        **{f"MORE_{command}": " ".join(words) for command, words in (more or {}).items()},
    }
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    printed = [(out / str(n)).read_text("utf-8") if (out / str(n)).exists() else None for n in range(len(commands))]
    ran = [(command, text) for (command, _), text in zip(commands, printed, strict=True) if text is not None]
    assert done.returncode == 0, f"{ran[-1][0] if ran else 'nothing ran'}\n{ran[-1][1] if ran else ''}\n{done.stderr}"
    shown = [Shown(command, lines, text or "") for (command, lines), text in zip(commands, printed, strict=True)]
    for one in shown:
        assert "Traceback" not in one.printed, f"{one.command}\n{one.printed}"
    return shown


def missing(shown: Shown) -> str | None:
    """Return the first line that a page shows of a command and that it did not print, or not in this order."""
    printed, place = " ".join(shown.printed.split()), 0
    for line in shown.expected:
        words = " ".join(line.split())
        found = printed.find(words, place)
        if found < 0:
            return line
        place = found + len(words)
    return None


def furnish(folder: Path, text: str) -> None:
    """Write what pages speak of: an environment, the configs config.yaml, my.yaml and run.yaml, and finished runs."""
    project.write(folder)
    config = (folder / project.CONFIG).read_text("utf-8")
    for name in ("my.yaml", "run.yaml"):
        (folder / name).write_text(config, "utf-8")
    (folder / "configs").symlink_to(pages.PROJECT / "configs")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()  # the environment of the tests is on PATH already
    finished_runs(folder, text)


def finished_runs(folder: Path, text: str) -> None:
    """Make a finished run for every runs/NAME in the commands of a page, also seen from the projects that it begins."""
    found = blocks(text)
    names = sorted({name for block in found for name in _RUN.findall(block.text)})
    if not names:
        return
    project.write(folder / "made")
    for name in names:
        finished_run(folder / "runs" / name, folder / "made" / project.CONFIG)
    for name in {name for block in found for name in _INIT.findall(block.text)}:
        (folder / name).mkdir()
        (folder / name / "runs").symlink_to(folder / "runs")


def finished_run(path: Path, config: Path) -> RunDir:
    """Write the directory of a run that ended well, by the code that writes those of real runs."""
    path.parent.mkdir(exist_ok=True)
    path.mkdir(mode=0o700)
    run = RunDir(path)
    whole = loader.load(config, [f"run.name={path.name}"])
    write_json(run.info, {"run_id": "abc123", "created": "2026-11-21T09:12:00+00:00", "versions": {"torch": "2.13"}})
    write_json(run.plan, {"quantities": {}, "warnings": []})
    attempt = run.new_attempt(whole)
    run.append_metrics({"step": 0, "attempt": 1, "eval/accuracy": 0.25})
    for step in range(1, 21):
        run.append_metrics(_record(step))
    run.append_samples([{"step": 0, "phase": "before", "prompt": "1 + 1 = ?", "completion": "3", "reward": 0.0}])
    for step, right in ((0, range(0, 40, 3)), (20, range(6, 40))):
        stored.write_into(run, step, [_evaluated(step, number, number in right) for number in range(40)])
    for log in (attempt.console, attempt.log_path(0)):
        log.write_text("step 20\n", "utf-8")
    attempt.finish("done", 0, "all steps")
    return run


def _evaluated(step: int, number: int, right: bool) -> dict[str, object]:
    """Return what an evaluation keeps of a prompt; some right answers are sentences."""
    asked = row(number, right, [right, (number + step) % 3 == 0, number % 2 == 0, right], step=step)
    if right and number % 4 == 0:
        asked["greedy"] |= {"text": f"It is {number}."}
    return asked


def _record(step: int) -> dict[str, object]:
    wave = math.sin(step)
    return {
        "step": step,
        "rollout": (step - 1) // 2,
        "update": (step - 1) % 2,
        "attempt": 1,
        "reward": 0.4 + 0.01 * step + 0.02 * wave,
        "reward_std": 0.3,
        "response_length": 14 + wave,
        "response_length_max": 30,
        "truncated_fraction": 0.0,
        "entropy": 0.6,
        "grad_norm": 1.5 + 0.1 * wave,
        "clip_fraction": 0.1 * ((step - 1) % 2),
        "logprob_gap_mean": 1e-6,
        "logprob_gap_max": 1e-5,
        "zero_variance_groups": 0,
        "completion_tokens": 448,
        "completion_tokens_per_s": 107.0,
        "tokens": 448 * step,
        "failures": 0,
        "seconds": 6.0 if step % 2 else 3.0,
        "seconds/generate": 3.0 if step % 2 else 0.0,
        "seconds/update": 3.0,
        "time": 1795252320.0 + 5 * step,
    }


def _commands(block: Block) -> list[tuple[str, tuple[str, ...]]]:
    """Return the commands of a block, each with the lines of its output that the page shows."""
    if block.kind == "python":
        return [(f"python - <<'END_OF_CODE'\n{block.text}END_OF_CODE", ())]
    if block.kind != "console":
        return [(block.text, ())]
    found = []
    for part in re.split(r"(?m)^\$ ", block.text)[1:]:
        command, *lines = part.replace("\\\n", " ").splitlines()
        found.append((command, tuple(lines)))
    return found


_PREFIX = f"""set -eu
gspo-hpc() {{
    local code=0 more="MORE_${{1:-}}"
    set -- "$@" ${{!more:-}}
    python -m gspo_hpc "$@" || code=$?
    [ -z "$SHOWN" ] || [ $code != 2 ] || return 0 # a page may show how a command refuses
    case "${{1:-}} $code" in *" 0" {"".join(f'| "{name} {code}"' for name, codes in SAYS.items() for code in codes)}) ;;
        *) echo "exit code $code: gspo-hpc $*" >&2; exit 1 ;;
    esac
}}"""
