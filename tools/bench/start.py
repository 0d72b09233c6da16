"""Measure how long the command line takes to answer, as a ratio to a bare interpreter.

    python tools/bench/start.py [--rounds 15]

Runs every command in turn, in rounds, as a process of its own, and keeps the least processor time (user and system) of
each, so that other load on the machine counts little. From the second round on, file caches are warm and the bytecode
of all modules is compiled, in a folder of this measurement: so it is after an installation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
REFUSED = "gspo-hpc plan qwen2.5_7b_tp2 cluster.nodes=3"  # by a rule; the search for fixes is part of the answer
UNKNOWN = "gspo-hpc plan tiny_cpu"  # its model is not there, and has no known name
PLAN = "gspo-hpc plan qwen3_30b_a3b_ep8"  # its data is not there
EXIT_CODES = {REFUSED: 2, UNKNOWN: 3, PLAN: 3, f"{PLAN} --json": 3}
COMMANDS: dict[str, tuple[str, ...]] = {
    "python -c pass": ("-c", "pass"),
    "gspo-hpc --help": ("-m", "gspo_hpc", "--help"),
    UNKNOWN: ("-m", "gspo_hpc", "plan", "tiny_cpu"),
    PLAN: ("-m", "gspo_hpc", "plan", "qwen3_30b_a3b_ep8"),
    f"{PLAN} --json": ("-m", "gspo_hpc", "plan", "qwen3_30b_a3b_ep8", "--json"),
    REFUSED: ("-m", "gspo_hpc", "plan", "qwen2.5_7b_tp2", "cluster.nodes=3"),
    "gspo-hpc suggest qwen2.5_7b_tp2": ("-m", "gspo_hpc", "suggest", "qwen2.5_7b_tp2"),
}


def processor_seconds(arguments: tuple[str, ...], folder: Path, exit_code: int = 0) -> float:
    """Seconds of processor time, user and system, in which a fresh interpreter ends with the exit code."""
    environment = os.environ | {"PYTHONPATH": str(REPO), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-P", *arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == exit_code, (command, process.returncode)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    best = dict.fromkeys(COMMANDS, float("inf"))
    with tempfile.TemporaryDirectory(prefix="gspo_hpc.start.") as folder:
        for _ in range(args.rounds):
            for name, arguments in COMMANDS.items():
                best[name] = min(best[name], processor_seconds(arguments, Path(folder), EXIT_CODES.get(name, 0)))
    bare = best["python -c pass"]
    print("| command | seconds of processor time | ratio to a bare interpreter |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| `{name}` | {seconds:.3f} | {seconds / bare:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
