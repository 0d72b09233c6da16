"""Layouts of two ranks against one: log-probs, gradients and weights, by the cases of tests/gloo, on NCCL."""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import torch

from tests.gloo import layouts, ranks

from .. import models
from ..environment import Environment
from ..references import relative
from ..rows import Recorder

PLATFORM = "GSPO_HPC_TEST_PLATFORM"  # read by tests.gloo.cases
DENSE = ("dp2", "tp2", "tp2-sp", "cp2", "pp2", "dp2-distributed")
EXPERTS = ("ep2", "etp2")
LIMIT = 1e-4  # relative, in float32
KINDS = ("gradient", "logprobs", "logits")


def run(env: Environment, record: Recorder) -> None:
    """Run all layouts on one pair of ranks."""
    os.environ[PLATFORM] = env.platform
    folder = env.work / "layouts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dense, mixture = (str(models.small(env, kind)) for kind in ("llama", "qwen3_moe"))
    common: dict[str, Any] = {"count": 1}
    one: dict[str, ranks.Case] = {
        "one-dense": ("steps", {"model": dense, **common}),
        "one-experts": ("steps", {"model": mixture, **common}),
        "one-weights": ("exported", {"model": mixture}),
    }
    two: dict[str, ranks.Case] = {
        name: ("steps", {"model": dense, **common, **layouts.LAYOUTS[name]}) for name in DENSE
    }
    two |= {name: ("steps", {"model": mixture, **common, **layouts.EXPERT_LAYOUTS[name][1]}) for name in EXPERTS}
    two["ep2-weights"] = ("exported", {"model": mixture, **layouts.EXPERT_LAYOUTS["ep2"][1]})
    single = ranks.run(1, folder, one)
    pairs = ranks.run(2, folder, two)
    stored, gathered = single["one-weights"], pairs.pop("ep2-weights")
    different = [name for name in stored if not np.array_equal(stored[name], gathered[name])]
    record.at_most("ep2: weights that arrive differently, whole or in pieces", len(different), 0, " tensors")
    for name, found in pairs.items():
        expected = single["one-experts" if name in EXPERTS else "one-dense"]
        for kind in KINDS:
            _compare(record, f"{name}: {kind}", found, expected, kind)


def _compare(
    record: Recorder, what: str, found: dict[str, np.ndarray], expected: dict[str, np.ndarray], kind: str
) -> None:
    names = [name for name in expected if name.startswith(f"{kind}/")]
    assert names and all(name in found for name in names), f"{what} is not there"
    worst = max(relative(*(_tensor(arrays[name]) for arrays in (found, expected))) for name in names)
    record.at_most(f"{what}, largest relative error", worst, LIMIT)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
