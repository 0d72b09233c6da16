"""The Tab key in real shells, and what it offers."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo_hpc.cli import completers
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.config.reference.settings import settings
from gspo_hpc.config.schema import keys
from gspo_hpc.runs.directory import open_run

START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(gspo-hpc completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(gspo-hpc completion zsh)"'),
}
LINES = [  # what is typed before Tab, and what then stands there
    ("gspo-hpc diag", "gspo-hpc diagnose "),
    ("gspo-hpc plan qwen3_235", "gspo-hpc plan qwen3_235b_a22b_tp4_pp2_ep32 "),
    ("gspo-hpc plan tiny_cpu batch.num_g", "batch.num_generations="),
    ("gspo-hpc plan tiny_cpu run.name=a model.dtype=bfl", "model.dtype=bfloat16 "),
    ("gspo-hpc logs runs/fir", "gspo-hpc logs runs/first "),
    ("gspo-hpc suggest tiny_cpu --keep cluster.net", "--keep cluster.network_gb_per_s "),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, and the program on PATH."""
    open_run(from_dict({"run": {"dir": str(tmp_path / "runs" / "first")}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def typed(shell: str, lines: list[tuple[str, str]], seconds: float = 20.0) -> list[str]:
    """What stands on the screen after each line and Tab, in one shell."""
    command, begin = START[shell]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="dumb", PS1="", INPUTRC="/dev/null")
        os.execvp(command[0], command)
    found = []
    try:

        def seen(until: str) -> str:
            text, end = "", time.monotonic() + seconds
            while until not in text and time.monotonic() < end:
                if select.select([terminal], [], [], 0.1)[0]:
                    text += os.read(terminal, 65536).decode(errors="replace")
            return text

        os.write(terminal, f"{begin}; echo RE''ADY\n".encode())
        assert "READY" in seen("READY")
        for line, expected in lines:
            os.write(terminal, f"{line}\t".encode())
            found.append(seen(expected))
            os.write(terminal, b"\x15")  # forget the line
            os.write(terminal, b"echo NE''XT\n")
            seen("NEXT")
    finally:
        os.write(terminal, b"\x15exit\n")
        os.close(terminal)
        os.waitpid(pid, 0)
    return found


@pytest.mark.parametrize("shell", START)
def test_tab_in_a_shell(folder: Path, shell: str) -> None:
    for (line, expected), text in zip(LINES, typed(shell, LINES), strict=True):
        assert expected in text, (line, text)


def test_tab_in_fish(folder: Path) -> None:
    plan = "gspo-hpc plan tiny_cpu"
    lines = ["gspo-hpc diag", f"{plan} batch.num_g", f"{plan} model.dtype=bfl", "gspo-hpc logs runs/fir"]
    asked = "".join(f"complete -C '{line}'; echo ==; " for line in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"gspo-hpc completion fish | source; {asked}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    offered = [part.strip().splitlines() for part in done.stdout.split("==\n")]
    assert offered[0] == ["diagnose\texplain what is wrong or slow in a run"]
    assert offered[1] == [f"batch.num_generations=\t{keys()['batch.num_generations'].description}"]
    assert [line.split("\t")[0] for line in offered[2]] == ["model.dtype=bfloat16"]
    assert any(line.split("\t")[0].rstrip("/") == "runs/first" for line in offered[3])


def test_runs_in_other_folders_are_known_as_runs(folder: Path) -> None:
    open_run(from_dict({"run": {"dir": str(folder / "mine" / "second")}}))
    offered = completers.runs("mine/")
    assert offered["mine/second"] == offered["runs/first"] == "run" and "mine/second/" not in offered


def test_every_setting_is_offered_with_its_values() -> None:
    offered = completers.overrides("")
    assert {f"{key}=" for key in keys()} <= set(offered)
    assert completers.overrides("tracking.wandb=") == {
        "tracking.wandb=auto": "default",
        "tracking.wandb=online": "",
        "tracking.wandb=offline": "",
        "tracking.wandb=disabled": "",
    }
    assert {"slurm.profile=gpu_cluster", "slurm.profile=local"} <= set(completers.overrides("slurm.profile="))
    assert completers.overrides("model.nothing=") == {}


def test_what_is_offered_loads() -> None:
    """Every value that is offered for a setting, by itself, is one that the loader takes."""
    for key, one in settings().items():
        for text in one.choices:
            load(None, [f"{key}={text}"])
