"""An engine of a mixture of experts has exactly the weights that it was sent, many experts at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo_hpc.engine.engine import Engine, EngineSettings
from gspo_hpc.ops.weight_parts import Memory, Part, Stream
from tests.gloo.conftest import make

PROBE = [list(range(5, 40)), list(range(60, 90))]
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


def stacked(weights: dict[str, torch.Tensor], each: int, misplaced: bool = False) -> Stream:
    """Return a stream with stacks of `each` experts; `misplaced`: two experts of one layer have each other's places."""
    kinds: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    rest: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if found := EXPERT.fullmatch(name):
            kinds[f"{found[1]}{{}}{found[3]}"][int(found[2])] = tensor
        else:
            rest[name] = tensor
    parts = [(name, (), tensor) for name, tensor in rest.items()]
    for kind, tensors in kinds.items():
        for first in range(0, len(tensors), each):
            numbers = tuple(sorted(tensors))[first : first + each]
            placed = numbers[::-1] if misplaced and ".1.mlp" in kind else numbers
            parts.append((kind, placed, torch.stack([tensors[number] for number in numbers])))

    def stream(memory: Memory) -> Iterator[Sequence[Part]]:
        for name, numbers, tensor in parts:
            place = memory.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            yield [Part(name, tuple(tensor.shape), place, numbers)]

    return stream


@pytest.fixture(scope="module", params=[64, 48])
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, dict[str, torch.Tensor], Any]:
    """An engine, the weights that it has from its folder, and what it says of the probe.

    vLLM's kernel takes experts of 64 as they are, so they are packed as they come, and pads those of 48.
    """
    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": request.param}
    folder: Path = make(tmp_path_factory.mktemp("mixture") / "model", "qwen3moe", False, **sizes)
    log = folder.parent / "log"
    settings = EngineSettings(
        str(folder), max_model_len=64, kv_cache_gb=0.1, threads=1, bucket_bytes=30_000, log_path=log
    )
    engine = Engine(settings)
    engine.start()
    yield engine, load_file(folder / "model.safetensors"), engine.prompt_logprobs(PROBE)
    engine.close()


def said(engine: Engine) -> list[bytes]:
    return [one.tobytes() for one in engine.prompt_logprobs(PROBE)]


def test_it_has_exactly_what_it_was_sent(mixture: Any) -> None:
    """In stacks of all experts, of some, of one; what comes from the folder goes vLLM's own way."""
    engine, weights, at_first = mixture
    expected = [one.tobytes() for one in at_first]
    for each in (8, 3, 1):
        engine.update_weights(stacked({name: tensor * 1.25 for name, tensor in weights.items()}, each))
        assert said(engine) != expected
        engine.update_weights(stacked(weights, each))
        assert said(engine) == expected, each


def test_two_experts_that_are_exchanged_show(mixture: Any) -> None:
    engine, weights, at_first = mixture
    engine.update_weights(stacked(weights, 8, misplaced=True))
    assert said(engine) != [one.tobytes() for one in at_first]
    engine.update_weights(stacked(weights, 8))
    assert said(engine) == [one.tobytes() for one in at_first]
