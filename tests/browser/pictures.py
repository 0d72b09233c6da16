"""Take pictures of the report of a run, to be looked at: wide and on a phone, light and dark.

usage: python -m tests.browser.pictures RUN --out FOLDER [--readme]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.browser import chromium
from tests.browser.chromium import Tab

PROJECT = Path(__file__).resolve().parents[2]
README_SIZE = (1320, 1900)  # pixels


def pages_of(run: Path) -> list[Path]:
    """The report, written anew, and the page of its newest recorded step if it has any."""
    subprocess.run([sys.executable, "-m", "gspo_hpc", "report", str(run)], check=True)
    return [run / "report.html", *sorted((run / "report_steps").glob("step-*.html"))[-1:]]


def open_first_sample(tab: Tab) -> None:
    """Open a sample with its tokens, if the page has any."""
    opened = (
        "(() => { const one = document.querySelector('.sample'); if (one) one.open = true; return one !== null; })()"
    )
    if tab.run(opened):
        tab.until("document.querySelector('.tokens table') !== null")


def main() -> None:
    """Write a PNG for each page, width and colour scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the pictures go")
    parser.add_argument("--readme", action="store_true", help="renew docs/report.png")
    given = parser.parse_args()
    pages = pages_of(given.run)
    with chromium.browser() as started, chromium.tab(started) as tab:
        if given.readme:
            width, height = README_SIZE
            tab.show(pages[0], width=width, height=height)
            tab.picture(PROJECT / "docs" / "report.png", whole=False)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            for page in pages:
                for width in (390, 1280):
                    for dark in (False, True):
                        open_first_sample(tab.show(page, width=width, dark=dark))
                        path = given.out / f"{page.stem}-{width}-{'dark' if dark else 'light'}.png"
                        tab.picture(path)
                        print(path)


if __name__ == "__main__":
    main()
