"""docs/reference.md has every setting of a config, as the schema has it.

It takes two seconds, and catches a setting that is new, renamed or has another default, without its page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gspo_hpc.config import schema
from gspo_hpc.config.reference.settings import settings
from tests import pages


def test_the_reference_is_what_the_schema_says(project: Path) -> None:
    command = [sys.executable, str(project / "tools" / "make_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_setting_has_one_item_in_its_section() -> None:
    text = (pages.PROJECT / "docs" / "reference.md").read_text("utf-8")
    sections = re.split(r"(?m)^## ", text)[1:]
    assert [part.split("\n")[0] for part in sections] == list(schema.Config.model_fields)
    for part in sections:
        name = part.split("\n")[0]
        named = re.findall(r"(?m)^- \*\*`([\w.]+)`\*\*", part)
        assert named == [key for key in settings() if key.startswith(f"{name}.")], name


def test_defaults_and_ranges_are_there() -> None:
    text = (pages.PROJECT / "docs" / "reference.md").read_text("utf-8")
    assert "- **`batch.share_prompts`** (true or false; default: `true`). " in text
    assert "- **`data.train_ratio`** (number, above 0, at most 1; default: `1.0`). " in text
    assert "default: `null`" not in text and "below 2\\*\\*63" in text
