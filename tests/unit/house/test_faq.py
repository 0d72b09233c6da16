"""docs/faq.md lists what can be planned and is not run, and the algorithms that there are.

It takes a second, and catches a feature that is planned only, or an algorithm, that the page does not name.
"""

from __future__ import annotations

import re

from gspo_hpc.config import plugins
from gspo_hpc.planning.rules import planned_only
from tests import pages

TOLD = {
    "engine_over_nodes": "**An engine over several nodes**",
    "gpu_before_turing": "**GPUs before Turing**",
    "model_family": "**Some families of models**",
    "load_format_of_fp8": "**Engines with weights in FP8**",
}


def test_the_list_has_what_is_planned_only() -> None:
    text = (pages.PROJECT / "docs" / "faq.md").read_text("utf-8").split("## What gspo_hpc does not do")[1]
    assert set(TOLD) == set(planned_only._features)
    assert [words for words in TOLD.values() if f"- {words}" not in text] == []
    (line,) = re.findall(r"`algorithm\.name` takes (.*), or one of your own", text)
    assert set(re.findall(r"`(\w+)`", line)) == set(plugins.algorithms())
