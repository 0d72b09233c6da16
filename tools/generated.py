"""The command line of the tools that write a page of docs, or a section of one, from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def section(name: str, content: str) -> Callable[[str], str]:
    """Return a function of a page's text: the page with `content` between the markers of its section `name`.

    It raises ValueError where the markers are missing.
    """

    def page(text: str) -> str:
        before, begin, rest = text.partition(f"<!-- {name}: ")
        marker, close, old = rest.partition(" -->\n")
        _, end, after = old.partition(f"<!-- end of {name} -->\n")
        if not (begin and close and end):
            raise ValueError(f"the markers '<!-- {name}: ... -->' and '<!-- end of {name} -->' are gone; restore them")
        return f"{before}{begin}{marker}{close}\n{content}\n{end}{after}"

    return page


def main(tool: str, description: str | None, pages: Mapping[str, Callable[[str], str]]) -> int:
    """Write files of docs, each from its present text ("" if there is none), and return the exit code.

    With --check on the command line nothing is written, and the code is 1 if a file is out of date.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"{tool}.py", description=description, formatter_class=raw)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check, stale = parser.parse_args().check, False
    for name, page in pages.items():
        path = DOCS / name
        text = path.read_text("utf-8") if path.exists() else ""
        if (made := page(text)) == text:
            continue
        stale = True
        if check:
            print(f"docs/{name} is out of date; run: python tools/{tool}.py", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made, "utf-8")
    return int(check and stale)
