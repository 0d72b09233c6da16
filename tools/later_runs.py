"""Published runs that were found when all constants of the time estimate but one were as they are.

That one is EXPERT_LAUNCH: the utilizations here decided its form, and a calibration row its value. tools/estimates.py
writes what the estimates of these runs are into docs/estimates.md, below those of tools/published_runs.py.
"""

from __future__ import annotations

from typing import Any

from published_runs import Run, nemo, sections

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.estimates.time import Times
from gspo_hpc.planning.plan import make_plan

VERL_MIXTURE = "https://github.com/verl-project/verl/blob/main/docs/perf/dpsk.md"
PUBLISHED_MFU = {1: 0.40, 2: 0.37, 4: 0.31}  # of updates of Qwen3-30B-A3B, by nodes of H20 (TP 1, EP 8)


def _deepseek() -> Run:
    """Return verl's run of DeepSeek-V3 on 96 H20: 96 prompts of 8 in three updates, engines of 32 in eager mode."""
    config: dict[str, Any] = sections("H20", 12, 8, "DeepSeek-V3", (8, 1, 8, 12), 32, 0)
    config["parallel"]["num_layers_in_last_pipeline_stage"] = 6
    config["batch"] = {
        "micro_batch_tokens": 11680,
        "global_batch_size": 256,
        "steps_per_generation": 3,
        "num_generations": 8,
        "share_prompts": False,
    }
    engine = {"gpu_memory_utilization": 0.6, "enforce_eager": True}
    config["rollout"] |= {"max_prompt_length": 2048, "max_response_length": 9632, "engine": engine}
    config["algorithm"] = {"kl_beta": 0.001}
    config["memory"] = {"recompute_granularity": "full", "offload_optimizer": True}
    return Run("verl_deepseek_v3_96_h20", "DeepSeek-V3, 96 H20", VERL_MIXTURE, 1700.0, config, 1960.0)


# NeMo-RL 0.4 and verl, read on 2026-11-28.
LATER: tuple[Run, ...] = (
    nemo("0.4.0", "Llama-3.1-8B", 16, 97.7, (1, 1, 1, 2), 1, 1060, 4096),
    nemo("0.4.0", "Llama-3.1-8B", 16, 74.6, (1, 1, 1, 2), 1, 1129, 4096, apart=1),
    nemo("0.4.0", "Qwen3-32B", 32, 393, (4, 1, 1, 4), 4, 3206, 4096, recompute=None),
    nemo("0.4.0", "Qwen3-32B", 64, 215, (4, 1, 1, 4), 4, 3207, 4096, apart=4, recompute=None),
    nemo("0.4.0", "Qwen3-30B-A3B", 32, 225, (2, 1, 8, 1), 4, 3154, 4096, recompute=None),
    nemo("0.4.0", "Qwen3-30B-A3B", 32, 244, (1, 1, 8, 2), 2, 3158, 4096, apart=2, recompute=None),
    nemo("0.4.0", "Qwen3-235B-A22B", 256, 241, (4, 1, 16, 8), 8, 5691, 8192, apart=16, updates=1, ends=(11, 11)),
    _deepseek(),
)


def estimated(run: Run) -> Times:
    """Return the estimate of such a run for its system."""
    config = from_dict(run.config)
    assert run.tokens is not None
    return run.estimate_of(config, make_plan(config), run.tokens)


def utilization(nodes: int) -> float:
    """Return the share of the card's operations (MFU) that the estimate gives an update of PUBLISHED_MFU.

    Its lengths are not published: responses are taken to have 2,000 tokens.
    """
    config: dict[str, Any] = sections("H20", nodes, 8, "Qwen3-30B-A3B-Base", (1, 1, 8, 1), 1, 0)
    config["batch"] = {
        "micro_batch_tokens": 30720,
        "global_batch_size": 1024,
        "steps_per_generation": 4,
        "num_generations": 8,
        "share_prompts": False,
    }
    config["rollout"] |= {"max_prompt_length": 2048, "max_response_length": 8192}
    config["memory"] = {"recompute_granularity": "full", "offload_optimizer": True}
    run = Run(
        f"verl_qwen3_30b_a3b_{8 * nodes}_h20", f"Qwen3-30B-A3B, {8 * nodes} H20", VERL_MIXTURE, 1.0, config, 2000.0
    )
    return float(estimated(run).to_json()["update_mfu"])
