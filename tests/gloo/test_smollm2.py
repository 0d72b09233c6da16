"""SmolLM2-135M-Instruct itself: against transformers, on one rank and on more; its weights there and back; what the
gate after a weight sync makes of faults in it; and what it and the quickstart's tiny model take of memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_hpc.models import architecture
from tests.gloo import cases, ranks
from tests.gloo.layouts import DISTRIBUTED, LAYOUTS, Arrays
from tests.gloo.reference import assert_takes_what_is_planned, huggingface_logprobs

TP3 = {
    "parallel": {"tensor_model_parallel_size": 3, "sequence_parallel": True}
}  # of nine heads two cannot have equal parts
SPLIT = ("pp2", "cp2", "tp3-sp")
HELD: dict[str, tuple[int, str, dict[str, Any]]] = {  # ranks, model, layout
    "smollm2-one": (1, "smollm2", {}),
    "smollm2-tp3-sp": (3, "smollm2", TP3),
    "tiny-one": (1, "tiny", {}),
    "tiny-tp2": (2, "tiny", LAYOUTS["tp2"]),
    "tiny-dp2-distributed": (2, "tiny", DISTRIBUTED),
}


@pytest.fixture(scope="module")
def smollm2(project: Path) -> Path:
    """The folder that the quickstart uses, made by the same tool."""
    folder = Path(os.environ.get("GSPO_HPC_CACHE", project / ".cache")) / "smollm2-135m-instruct"
    subprocess.run([sys.executable, str(project / "tools" / "prepare_smollm2.py"), "--out", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def folders(smollm2: Path, tiny_folder: Path) -> dict[str, Path]:
    """Both models."""
    return {"smollm2": smollm2, "tiny": tiny_folder / "model"}


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arrays]:
    """The arrays of every case of this file."""
    smollm2 = folders["smollm2"]
    folder, model = tmp_path_factory.mktemp("smollm2"), {"model": str(smollm2)}
    one: dict[str, ranks.Case] = {"logprobs-one": ("logprobs", model), "same-one": ("same", model)}
    two: dict[str, ranks.Case] = {f"logprobs-{name}": ("logprobs", model | LAYOUTS[name]) for name in SPLIT[:2]}
    two["same-pp2"] = ("same", model | LAYOUTS["pp2"])
    three: dict[str, ranks.Case] = {"logprobs-tp3-sp": ("logprobs", model | TP3), "same-tp3-sp": ("same", model | TP3)}
    worlds = {1: one, 2: two, 3: three}
    for name, (world, kind, sections) in HELD.items():
        worlds[world][f"held-{name}"] = ("held", {"model": str(folders[kind]), **sections})
    one["gate"] = ("gate", model)
    return ranks.run(1, folder, one) | ranks.run(2, folder, two) | ranks.run(3, folder, three)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Arrays:
    """What transformers says."""
    return huggingface_logprobs(smollm2)


@pytest.mark.parametrize("layout", ["one", *SPLIT])
def test_logprobs_and_logits_equal_hugging_face(layout: str, computed: dict[str, Arrays], reference: Arrays) -> None:
    ours = computed[f"logprobs-{layout}"]
    assert ours.keys() == reference.keys()
    assert max(float(np.abs(reference[key]).max()) for key in ours) > 5.0  # it has opinions
    assert max(float(np.abs(ours[key] - reference[key]).max()) for key in ours) < 1e-4


@pytest.mark.parametrize("layout", ["one", "pp2", "tp3-sp"])
def test_weights_stream_back_bit_for_bit(layout: str, computed: dict[str, Arrays]) -> None:
    assert computed[f"same-{layout}"]["different"].size == 0
    assert computed[f"same-{layout}"]["count"] == [272]


@pytest.mark.parametrize("name", HELD)
def test_the_model_takes_what_the_plan_says(name: str, folders: dict[str, Path], computed: dict[str, Arrays]) -> None:
    world, kind, sections = HELD[name]
    arch, settings = architecture.read(folders[kind]), cases.config(str(folders[kind]), world, **sections)
    assert_takes_what_is_planned(computed[f"held-{name}"]["held"], arch, settings)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("layers-first", "disagree on the probe"),
        ("layers-middle", "disagree on the probe"),
        ("layers-apart", "disagree on the probe"),
        ("weights", "disagree on the probe.*all tokens differ"),
        ("stale", "stale prefix cache: .* took 64 tokens"),
        ("head", r"rounds its logits to 16 bits: they are multiples of 0\.\d+, although"),
        ("rope", "wrong rotary embeddings: the engine computes as the trainer would with rope_theta 200000"),
    ],
)
def test_the_gate_tells_faults_of_a_trained_model_in_bfloat16(
    fault: str, said: str, computed: dict[str, Arrays]
) -> None:
    assert re.search(said, str(computed["gate"][fault]))


def test_the_gate_passes_a_healthy_engine_of_a_trained_model_whatever_the_tokens(computed: dict[str, Arrays]) -> None:
    """Probes of a text, and eight of random tokens, of which half were refused for rounding alone."""
    assert computed["gate"]["healthy"].tolist() == [""] * 9
