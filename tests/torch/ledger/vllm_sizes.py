"""Print an engine's size by vLLM's own code: `python vllm_sizes.py CASES`, a JSON list of [model, ranks] each.

Its models are built without memory, as one of so many tensor-parallel ranks; a cache's page has the size that vLLM's
specification of it computes. The answer is a list of [parameters, bytes of a token in the cache].
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gspo_hpc.models import catalog

KINDS = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
KINDS |= {"LlamaForCausalLM": "llama"}


def group(size: int) -> Any:
    """Return a group of ranks, of which this is the first."""
    ranks = list(range(size))
    device = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return SimpleNamespace(
        world_size=size, rank_in_group=0, rank=0, ranks=ranks, device_group=device, cpu_group=device, size=lambda: size
    )


def sizes(name: str, ranks: int) -> tuple[int, int]:
    """Return the parameters of one rank, and the bytes of a token in its cache, in bfloat16."""
    content = catalog.content(name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps({"model_type": KINDS[content["architectures"][0]]} | content)
        )
        made = EngineArgs(
            model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=2048, enforce_eager=True
        ).create_engine_config()
    made.parallel_config.tensor_parallel_size = ranks
    places: Any = parallel_state
    places._TP, one = group(ranks), group(1)
    places._PP = places._EP = places._DP = places._DCP = places._PCP = one
    one.is_first_rank = one.is_last_rank = True
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(made), torch.device("meta"):
        model = initialize_model(made)
    count = sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())
    heads = ModelConfig.get_num_kv_heads(made.model_config, made.parallel_config)
    page = FullAttentionSpec(
        block_size=16, num_kv_heads=heads, head_size=made.model_config.get_head_size(), dtype=torch.bfloat16
    )
    layers = made.model_config.get_total_num_hidden_layers()
    return count, page.page_size_bytes // 16 * layers


if __name__ == "__main__":
    print(json.dumps([sizes(*case) for case in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)
