"""An engine's weights and its cache in the plan, against vLLM's own models and its specification of a cache.

Costs the import of vLLM and ten models without memory (half a minute). Catches a matrix that the plan leaves out or
divides otherwise than vLLM, heads that are copied where ranks are more than they, and a cache with another size.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning.estimates import memory, parameters

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
CASES = [
    *(("Qwen2.5-7B", ranks) for ranks in (1, 2, 4)),
    *(("Qwen3-0.6B", ranks) for ranks in (1, 2)),
    *(("Llama-3.1-8B", ranks) for ranks in (1, 8, 16)),
    *(("Qwen3-30B-A3B", ranks) for ranks in (1, 8)),
]
WITHIN = 0.004  # norms and biases are on every rank, and so are routers, which are 0.3 % of eight ranks' mixture


def test_weights_and_cache_are_those_of_vllm() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.ledger.vllm_sizes", json.dumps(CASES)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for (name, ranks), (count, token) in zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        arch = architecture.parse(catalog.content(name))
        config = from_dict({"rollout": {"tensor_parallel_size": ranks}, "model": {"dtype": "bfloat16"}})
        assert 0 <= count / parameters.of_engine(arch, ranks) - 1 < WITHIN, (name, ranks, count)
        assert memory.cache_bytes_per_token(arch, config) == token, (name, ranks)
