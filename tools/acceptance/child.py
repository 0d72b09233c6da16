"""The process of one part: ``python -m tools.acceptance.child MODULE --platform P --work DIR --results FILE``."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
from pathlib import Path

from gspo_hpc.system.processes import die_with_parent

from .environment import Environment
from .rows import Recorder


def main() -> None:
    """Run the part; an error ends the process with a traceback and code 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--platform", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after this long the runner ends the process")
    parser.add_argument("--runner", type=int, required=True, help="process id of the runner")
    args = parser.parse_args()
    die_with_parent(args.runner)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, 0.95 * args.seconds))  # where it hangs, into the log
    os.umask(0o077)
    part = importlib.import_module(args.module)
    part.run(Environment(args.platform, args.work), Recorder(args.results, args.platform))


if __name__ == "__main__":
    main()
