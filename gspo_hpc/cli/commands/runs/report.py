"""``gspo-hpc report``: the report page of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Writes one self-contained HTML file: what diagnose finds and what failed, curves, samples from before and "
        "after training, plan and attempts. Steps that the run recorded (tracking.record_interval) get a page each, in "
        "a folder beside it: groups, samples, and tokens with their log-probs and ratios. Of a sweep it is the "
        "comparison of its runs, compare.html. With --watch it writes the pages again until the run ends, and a "
        "browser follows it."
    )
    examples = """
        gspo-hpc report runs/tiny
        gspo-hpc report runs/tiny --watch
        gspo-hpc report --compare runs/lr1 runs/lr2 runs/lr3 --out lr.html
        gspo-hpc report runs/sweep
        gspo-hpc report runs/tiny --out tiny.html"""
    describe(parser, text, examples)
    parser.add_argument(
        "run_dirs", metavar="RUN", type=Path, nargs="+", help="run or sweep directory; several with --compare"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="page to write (default: report.html in RUN)")
    parser.add_argument(
        "--compare", action="store_true", help="write a page that compares the runs (default: compare.html here)"
    )
    parser.add_argument("--watch", action="store_true", help="write the page again every --every seconds")
    parser.add_argument("--every", type=int, default=30, metavar="S", help="seconds between two pages (default: 30)")


def run(args: argparse.Namespace) -> int:
    """Write the page, once or until the run is over, and print its path."""
    import time

    from gspo_hpc.api.run import findings
    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.launch import status
    from gspo_hpc.report.page import write_report
    from gspo_hpc.report.steps import StepPages
    from gspo_hpc.runs.sweep import SweepDir, expand

    for path in args.run_dirs:
        require_path(path, "run directory")
    if args.compare and args.watch:
        raise ValueError("--compare writes its page once: leave out --watch, which follows one run")
    if args.compare or SweepDir(args.run_dirs[0]).exists:
        from gspo_hpc.report.compare import write_comparison

        out = Path("compare.html") if args.compare else args.run_dirs[0] / "compare.html"
        print(write_comparison(expand(args.run_dirs), args.out or out))
        return DONE
    if len(args.run_dirs) > 1:
        raise ValueError(f"{len(args.run_dirs)} runs are given: --compare writes one page about them")
    (run_dir,) = args.run_dirs
    if args.every < 1:
        raise ValueError(f"--every {args.every} must be at least 1 second")
    told, steps = False, StepPages()
    while True:
        # Before the page is made: the last page must not miss the end.
        goes_on = args.watch and not status.read(run_dir).is_over
        path = write_report(run_dir, args.out, findings(run_dir), args.every if goes_on else None, steps)
        if not told:
            print(path, flush=True)
            told = True
        if not goes_on:
            return DONE
        time.sleep(args.every)
