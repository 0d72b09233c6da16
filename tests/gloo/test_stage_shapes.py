"""Pipeline stages know the shapes of what they receive, and send none ahead (a minute).

Catches a shape that is sent, and one that is given to another micro-batch: gloo then fails, or the steps differ.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.gloo.layouts import LAYOUTS, PRODUCTS, SHAPED
from tests.gloo.ranks import run

PIPELINES = {
    "pp2": (2, "llama-tied", LAYOUTS["pp2"]),
    "pp2-vpp2": (2, "llama-tied", LAYOUTS["pp2-vpp2"]),
    "six-pp2-vpp2": (2, "llama-six", SHAPED["six-pp2-vpp2"][2]),
    "tp2-sp-pp2-vpp2": (4, "llama-tied", PRODUCTS["tp2-sp-pp2-vpp2"]),
    "six-pp4": (4, "llama-six", SHAPED["six-pp4"][2]),
}


def test_stages_send_no_shapes_and_change_no_bit(models: dict[str, Path], tmp_path: Path) -> None:
    found = {}
    for world in (2, 4):
        cases = {}
        for name, (ranks, model, sections) in PIPELINES.items():
            for how in ("asked", "known") if ranks == world else ():
                given = {"model": str(models[model]), "known": how == "known", **sections}
                cases[f"{name}-{how}"] = ("exchanged", given)
        found |= run(world, tmp_path, cases)
    for name in PIPELINES:
        asked, known = found[f"{name}-asked"], found[f"{name}-known"]
        shapes, exchanges = asked.pop("counts")
        assert shapes == exchanges > 0
        assert known.pop("counts").tolist() == [0, exchanges]
        seconds, whole = asked.pop("time")
        print(f"{name}: {shapes} shapes, {1e6 * seconds / shapes:.0f} us each, {seconds / whole:.1%} of the time")
        known.pop("time")
        assert asked.keys() == known.keys()
        assert [key for key in known if not np.array_equal(asked[key], known[key], equal_nan=True)] == []
