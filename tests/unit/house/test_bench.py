"""The measurement of the command line runs as docs/benchmarks.md says, and its table names the same commands.

Takes 5 seconds. It would catch a command whose exit code changed, which ends the measurement, and a row of the page
that is no longer measured.
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests import pages


def test_the_start_of_every_command_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "tools/bench/start.py", "--rounds", "1"],
        cwd=pages.PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    named = [row.split(" | ")[0].strip("| ") for row in done.stdout.splitlines()[2:]]
    page = (pages.PROJECT / "docs" / "benchmarks.md").read_text("utf-8").split("## Commands on a login node")[1]
    rows = re.findall(r"(?m)^\| (`.*?) \| [\d.]+ \|", page.split("\n## ")[0])
    assert len(named) == 7 and rows == named
