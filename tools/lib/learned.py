"""Print what a run learned, in a few lines, from its metrics.jsonl: `learned.py RUN`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def learned(run: Path) -> str:
    """Accuracy on unseen prompts before and after, and where to look on. Raises ValueError without metrics."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is not there: has the run made a step?")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    scores = [
        (record["step"], record["eval/accuracy"]) for record in records if record.get("eval/accuracy") is not None
    ]
    if len(scores) < 2:
        lines = [f"{run} has no evaluation before and after to compare (eval.before, eval.after)"]
    else:
        (first, before), (last, after) = scores[0], scores[-1]
        lines = [
            f"Accuracy on unseen prompts, greedy decoding: {before:.3f} at step {first}, {after:.3f} at step {last} "
            f"({after - before:+.3f})"
        ]
    lines += [
        f"Curves and samples:  {run}/report.html",
        f"Every step:          {run}/metrics.jsonl",
        f"As Hugging Face:     gspo-hpc export {run} --out DIR",
    ]
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    try:
        print(learned(Path(sys.argv[1])))
    except ValueError as error:
        print(f"learned: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
