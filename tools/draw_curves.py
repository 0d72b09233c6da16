"""Draw one curve of several runs as SVG: `draw_curves.py reward --out FILE "name=runs/a-seed*" "other=runs/b-seed*"`.

Each `name=pattern` is one line: the mean of a value of metrics.jsonl over the runs whose folders match the pattern (one
for each seed), over the optimizer steps that all of them have, as a mean of the steps around. A step whose value is
null (no completion counted) is left out.
"""

from __future__ import annotations

import argparse
import glob
import statistics
import sys
from pathlib import Path

from gspo_hpc.report.charts import Chart, Line, line_chart
from gspo_hpc.report.scales import moving_average
from gspo_hpc.runs.reader import read_run, value

COLORS = {"accent": "#2a5d9f", "second": "#b25420", "third": "#317a5b", "good": "#27704c", "bad": "#b5413b"}
STYLE = (
    "text{font:11.5px sans-serif;fill:#555}.label{font-weight:600}.grid{stroke:#e4e4e4}.axis{stroke:#999}"
    "path{fill:none;stroke-width:2;stroke-linejoin:round}"
)


def line(pattern: str, key: str, color: str, name: str) -> tuple[Line, list[int]]:
    """The mean over the runs of a pattern. Raises SystemExit where no run matches."""
    folders = sorted(glob.glob(pattern))
    if not folders:
        sys.exit(f"no run directory matches {pattern}")
    curves = [
        {int(record["step"]): value(record, key) for record in read_run(Path(folder)).train_records}
        for folder in folders
    ]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = []
    for step in steps:
        known = [one for curve in curves if (one := curve[step]) is not None]
        means.append(statistics.fmean(known) if known else None)
    return Line(name, moving_average(means, max(1, len(steps) // 12)), color), steps


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("key", help="a value of metrics.jsonl, such as reward or clip_fraction")
    parser.add_argument("runs", nargs="+", metavar="name=pattern")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    drawn = [
        line(pattern, arguments.key, color, name)
        for (name, _, pattern), color in zip((one.partition("=") for one in arguments.runs), COLORS, strict=False)
    ]
    if len(drawn) < len(arguments.runs):
        sys.exit(f"{len(arguments.runs)} lines, but there are only {len(COLORS)} colours: draw fewer")
    steps = drawn[0][1]
    if any(others != steps for _, others in drawn):
        sys.exit("the runs have different steps: draw runs of one length")
    chart = Chart(arguments.key, arguments.key, "", steps, [one for one, _ in drawn], from_zero=True, width=640)
    text = str(line_chart(chart).svg)
    variables = ";".join(f"--{name}:{color}" for name, color in {**COLORS, "ink": "#222", "muted": "#666"}.items())
    start = f'<svg xmlns="http://www.w3.org/2000/svg" style="{variables};background:white"'
    arguments.out.write_text(text.replace("<svg", start, 1).replace(">", f"><style>{STYLE}</style>", 1) + "\n")


if __name__ == "__main__":
    main()
