"""Write the table of symptoms in docs/diagnose.md from their registry: `make_symptoms.py`, or `--check`."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_hpc.diagnose import registry  # noqa: E402

PAGE = Path(__file__).resolve().parents[1] / "docs" / "diagnose.md"
_TABLE = re.compile(
    r"(?<=<!-- symptoms: written by tools/make_symptoms.py -->\n\n).*?(?=\n<!-- end of symptoms -->)", re.S
)


def written(text: str) -> str:
    """Return the page with the table of today's symptoms. Raises ValueError if the page has no place for it."""
    if _TABLE.search(text) is None:
        raise ValueError(f"{PAGE.name} has no marker '<!-- symptoms: ... -->'; restore it around the table")
    return _TABLE.sub(lambda _: registry.table(), text)


def main(argv: list[str] | None = None) -> int:
    """Write the page; with --check, only compare it and return 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    args = parser.parse_args(argv)
    text = PAGE.read_text("utf-8")
    if args.check:
        return int(written(text) != text)
    PAGE.write_text(written(text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
