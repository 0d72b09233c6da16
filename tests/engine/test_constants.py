"""Constants of an engine and of a trainer: what differs is told by value, and with the settings that give it.

Takes half a minute: one process that makes vLLM's own rotary embeddings, and four starts of an engine. Catches one
that reads other rotary embeddings, norms or scales than the trainer, in a model whose log-probs hide it; an equal one
that is told as different; and a version of vLLM in which nothing is found to compare.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.engine.constants.held import Held, Rotary
from gspo_hpc.engine.engine import Engine, EngineSettings
from gspo_hpc.models import architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops.constants import Constants
from gspo_hpc.ops.rope import inverse_frequencies
from gspo_hpc.training.agreement.constants import differing

HEAD, POSITIONS = 32, 256
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "factor": 8.0}
ROPES: dict[str, dict[str, Any]] = {  # by what an engine that has it is told to compute with
    "rope_theta 5000": {"rope_type": "default", "rope_theta": 5000.0},
    "rope_theta 10000": {"rope_type": "default", "rope_theta": 10000.0},
    "a rope_theta of about 1.23e+04": {"rope_type": "default", "rope_theta": 12345.0},
    "linear rope scaling by 4": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "yarn rope scaling by 4 of a context of 64 tokens": YARN,
    "llama3 rope scaling by 8 of a context of 8192 tokens": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3},
}
PARTIAL = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}

_PROGRAM = """
import json, sys, torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from gspo_hpc.engine.constants import held

head, positions, ropes = json.loads(sys.argv[1])
found = []
with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rope in ropes:
            longest = max(positions, rope.get("original_max_position_embeddings", 0))
            made = get_rope(head, longest, rope_parameters=rope, dtype=dtype)
            ((size, halves, (count, rows, step)),) = held.of(torch.nn.Sequential(made))["rotary"]
            found.append([size, halves, count, rows.hex(), step])
print(json.dumps(found))
"""


def raw(rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the content of a config.json."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 101, "head_dim": HEAD}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}
    return {"architectures": ["LlamaForCausalLM"], **sizes, **heads, "rope_parameters": rope, **more}


def trainers(arch: Architecture) -> Constants:
    """Return what a trainer of this architecture says, as gspo_hpc.policy.model has it."""
    return Constants(
        arch.rope,
        arch.max_position_embeddings,
        tuple(inverse_frequencies(arch.rope, arch.head_dim).tolist()),
        arch.head_dim,
        arch.head_dim**-0.5 * arch.rope.magnitude**2,
        arch.norm_eps,
    )


@pytest.fixture(scope="module")
def tables() -> dict[tuple[str, str], Rotary]:
    """vLLM's rotary embeddings by type and name."""
    env = os.environ | {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    asked = json.dumps([HEAD, POSITIONS, [*ROPES.values(), PARTIAL]])
    run = subprocess.run([sys.executable, "-c", _PROGRAM, asked], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    names = itertools.product(("float32", "bfloat16", "float16"), (*ROPES, "partial"))
    found = json.loads(run.stdout.splitlines()[-1])
    return {
        name: Rotary(size, halves, (count, bytes.fromhex(rows), step))
        for name, (size, halves, count, rows, step) in zip(names, found, strict=True)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rotary_embeddings_of_an_engine_are_told_by_value(tables: dict[tuple[str, str], Rotary], dtype: str) -> None:
    for (mine, rope), name in itertools.product(ROPES.items(), ROPES):
        ours = trainers(architecture.parse(raw(rope)))
        said = differing(ours, [Held(rotary=[tables[dtype, name]])], POSITIONS)
        if name == mine:
            assert said == ""
        else:
            assert said.startswith("wrong rotary embeddings: "), (mine, name, said)
        if mine == "rope_theta 5000" and name != mine:
            assert said == f"wrong rotary embeddings: the engine computes as the trainer would with {name}"
        if name == "rope_theta 5000" and mine.startswith(("linear", "yarn", "llama3")):
            assert said.endswith("with no rope scaling")
    ours = trainers(architecture.parse(raw(ROPES["rope_theta 5000"])))
    half = differing(ours, [Held(rotary=[tables[dtype, "partial"]])], POSITIONS)
    assert half.endswith("the engine rotates 16 of the 32 numbers of a head, the trainer 32")
    turned = replace(tables[dtype, "rope_theta 5000"], by_halves=False)
    assert "each number of a head with its neighbour" in differing(ours, [Held(rotary=[turned])], POSITIONS)


def test_a_table_that_lost_its_values_is_told(tables: dict[tuple[str, str], Rotary]) -> None:
    """As memory holds them that slept without being kept."""
    rotary = tables["bfloat16", "rope_theta 5000"]
    count, rows, step = rotary.rows
    ours = trainers(architecture.parse(raw(ROPES["rope_theta 5000"])))
    for values in (bytes(len(rows)), rows[:-4] + b"\0\0\xc0\x7f", bytes(4) + rows[4:]):  # zeros, one NaN, a zero
        said = differing(ours, [Held(rotary=[replace(rotary, rows=(count, values, step))])], POSITIONS)
        assert said.startswith("wrong rotary embeddings: "), said


def test_other_constants_are_told(tables: dict[tuple[str, str], Rotary]) -> None:
    yarn = "yarn rope scaling by 4 of a context of 64 tokens"
    ours, scale = trainers(architecture.parse(raw(ROPES[yarn]))), HEAD**-0.5
    same = Held([tables["bfloat16", yarn]], [(scale, 0, 0.0)], [1e-6], [(1.0, 0.0)])
    assert differing(ours, [same, same], POSITIONS) == ""
    assert differing(ours, [replace(same, attention=[(scale, POSITIONS, 0.0)])], POSITIONS) == ""
    for wrong, said in (
        (replace(same, attention=[(2 * scale, 0, 0.0)]), "attention scaled by 0.45.. in the engine, by 0.22.. here"),
        (replace(same, attention=[(scale, 64, 0.0)]), "a sliding window of 64 tokens in the engine, none here"),
        (replace(same, attention=[(scale, 0, 50.0)]), "scores of attention bounded by 50 in the engine, not here"),
        (replace(same, norm_eps=[1e-6, 1e-5]), "norms with rms_norm_eps 1e-05 in the engine, 1e-06 here"),
        (replace(same, logits=[(0.5, 30.0)]), "logits multiplied by 0.5 and bounded by 30 in the engine"),
    ):
        found = differing(ours, [same, wrong, wrong], POSITIONS)
        assert [a if b == "." else b for a, b in zip(found, said, strict=True)] == list(found), found
    assert differing(ours, [Held()], POSITIONS) == "", "what an engine does not say is not compared"


def test_an_engine_says_all_of_them_and_they_are_the_trainers(engine: Engine, model_path: Path) -> None:
    (held,) = engine.constants()
    ours = trainers(architecture.read(str(model_path)))
    assert held.attention == [(ours.attention_scale, 0, 0.0)] and held.logits == [(1.0, 0.0)]
    assert held.norm_eps == [ours.norm_eps] and [one.size for one in held.rotary] == [ours.head_dim]
    assert differing(ours, [held], engine.settings.max_model_len) == ""
    assert Constants.from_values(json.loads(json.dumps(ours.values()))) == ours


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, "would with rope_theta 20000"),
        (
            {"rope_parameters": YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 512}},
            "would with rope_theta 1e+06 and yarn rope scaling by 4 of a context of 512 tokens",
        ),
        ({"rms_norm_eps": 1e-4}, "norms with rms_norm_eps 0.0001 in the engine, 1e-06 here"),
    ],
)
def test_what_the_user_overrides_is_told(
    settings: EngineSettings, model_path: Path, overrides: dict[str, Any], said: str
) -> None:
    engine = Engine(replace(settings, engine_args={"hf_overrides": overrides}))
    engine.start()
    try:
        ours = trainers(architecture.read(str(model_path)))
        assert differing(ours, engine.constants(), settings.max_model_len).endswith(said)
    finally:
        engine.close()
