"""The command line: ``python -m tools.acceptance``, which ``tools/gpu_acceptance.sh`` calls."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import REPO, page
from .environment import Environment
from .hardware import Gpus, find_gpus
from .plugin import make_discoverable
from .registry import PARTS, missing
from .rows import FAIL, Platform
from .runner import RUNNING, WAITING, Result, Runner, failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, write the page, and return 1 if one failed."""
    args = _arguments(argv)
    if args.list:
        print("\n".join(f"{part.name:9} {part.title}" for part in PARTS))
        return 0
    if missing(["torch", "numpy"]):
        print(f"gpu_acceptance: {sys.executable} lacks torch or numpy: set PYTHON to one with both", file=sys.stderr)
        return 2
    gpus = find_gpus() if args.platform != "cpu" else Gpus(0)
    cuda = args.platform == "cuda" or gpus.count > 0
    platform: Platform = "cuda" if cuda else "cpu"
    if cuda and not gpus.count:
        print("gpu_acceptance: torch finds no GPU; --platform cpu runs without one", file=sys.stderr)
        return 2
    env = Environment(platform, args.work.resolve())
    os.umask(0o077)
    env.work.mkdir(parents=True, exist_ok=True)
    make_discoverable(env.work)
    about = page.environment(gpus.description)
    told: dict[str, str] = {}

    def report(results: Sequence[Result]) -> None:
        page.write(args.out, page.render(about, results))
        for result in results:
            if result.verdict != WAITING and told.get(result.part.name) != result.verdict:
                told[result.part.name] = result.verdict
                _say(result, env)

    scale = args.scale or (1.0 if cuda else 3.0)
    runner = Runner(env, gpus.count, report, scale, args.seconds)
    results = runner.run([part for part in PARTS if part.name in args.parts])
    page.write(args.out, page.render(about, results))
    print(f"gpu_acceptance: the page is {args.out}", flush=True)
    return 1 if failed(results) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    listed = "\n".join(f"  {part.name:9} {part.title}" for part in PARTS)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="gpu_acceptance.sh",
        description="Measure what only a GPU can show, in independent parts, as a page with pass or fail.",
        epilog=f"parts, in their order:\n{listed}",
        formatter_class=raw,
    )
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help="only these")
    parser.add_argument("--out", type=Path, default=Path("gpu-acceptance.md"), help="the page (default: %(default)s)")
    parser.add_argument(
        "--platform", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if there is one"
    )
    parser.add_argument("--work", type=Path, default=REPO / ".cache" / "acceptance", help="models, runs and logs")
    parser.add_argument("--scale", type=float, help="factor on the time limits of parts (default: 1, on a CPU 3)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all parts together")
    parser.add_argument("--list", action="store_true", help="print the parts, in their order")
    return parser.parse_args(argv)


def _say(result: Result, env: Environment) -> None:
    """Print a line when a part begins and when it ends, with the end of its log if it failed."""
    seconds = "" if result.verdict == RUNNING else f" after {result.seconds:.0f} s"
    print(f"gpu_acceptance: {result.part.name}: {result.verdict}{seconds} {result.reason}".rstrip(), flush=True)
    if result.verdict == FAIL:
        for row in result.rows:
            if row.verdict == FAIL:
                print(f"    {row.what}: {row.figure}, {row.bound}", flush=True)
        log = env.work / "logs" / f"{result.part.name}.log"
        if result.reason and log.exists():
            print("    " + "\n    ".join(log.read_text("utf-8", "replace").splitlines()[-25:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
