"""Choices of experts that are repeated, in the memory of nodes and cards, against the plan.

Costs a minute. Catches a plan that forgets where choices wait (with the groups of a rollout, with what ranks fetch
and pack, with what routers note), or counts too many bytes of one; code that holds them for longer than it needs them;
and a rollout that is still there while the next one is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader, paths
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import moments
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training import update
from gspo_hpc.training.progress import Progress
from tests.torch.ledger.choices import Node
from tests.torch.ledger.runs import EVENTS, agree, host_of, job_of, run

LAYERS, TOP_K = 12, 32
TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
APART = {"mode": "server"}
CASES: dict[str, tuple[str, dict[str, dict[str, Any]], int]] = {  # whose choices, settings, experts of a layer
    "DP 4": ("rollout", {}, 128),
    "DP 4, noted": ("old_logprobs", {}, 128),
    "one rank": ("rollout", {"cluster": {"gpus_per_node": 1}}, 128),
    "one rank, noted": ("old_logprobs", {"cluster": {"gpus_per_node": 1}}, 128),
    "TP 2, two bytes": ("rollout", {"parallel": TENSORS, "rollout": {"tensor_parallel_size": 2}}, 300),
    "TP 2, noted, two bytes": ("old_logprobs", {"parallel": TENSORS}, 300),
    "PP 4, noted": ("old_logprobs", {"parallel": {"pipeline_model_parallel_size": 4}}, 128),
    "prompts not shared": ("rollout", {"batch": {"share_prompts": False}}, 128),
    "parts of groups": ("rollout", {"batch": {"micro_batch_tokens": None, "micro_batch_size": 2}}, 128),
    "one update": ("rollout", {"batch": {"steps_per_generation": 1}}, 128),
    "one update, nothing to note": ("old_logprobs", {"batch": {"steps_per_generation": 1}}, 128),
    "engines apart": ("rollout", {"cluster": {"gpus_per_node": 5}, "rollout": {**APART, "engines_per_node": 3}}, 128),
    "engines apart, noted": ("old_logprobs", {"rollout": {**APART, "engines_per_node": 2}}, 128),
    "engines apart and ahead": ("rollout", {"rollout": {**APART, "engines_per_node": 2, "max_staleness": 1}}, 128),
    "two passes over a rollout": ("old_logprobs", {"batch": {"num_iterations": 2}}, 128),
}


def config_of(case: str) -> Config:
    replay, more, _ = CASES[case]
    given: dict[str, dict[str, Any]] = {
        "cluster": {"gpus_per_node": 4, "gpu": "H100-80GB"},
        "model": {"path": "models/Qwen3-30B-A3B"},
        "moe": {"router_replay": replay},
        "batch": {
            "num_generations": 4,
            "global_batch_size": 16,
            "steps_per_generation": 2,
            "micro_batch_tokens": 600,
        },
        "data": {"train": "train.jsonl"},
        "reward": {"functions": [{"function": "number_match"}]},
        "rollout": {"max_prompt_length": 64, "max_response_length": 129},
    }
    return loader.from_dict(given | {name: given.get(name, {}) | values for name, values in more.items()})


def missed(case: str) -> float:
    """Return what a node's ranks hold beside what the plan says, as a share of it; 0 where neither is anything."""
    config, count = config_of(case), CASES[case][2]
    arch = architecture.find(config)
    assert arch is not None and arch.experts is not None
    arch = replace(arch, num_layers=LAYERS, experts=replace(arch.experts, count=count, top_k=TOP_K))
    planned, held = moments.choices(arch, config, 0).trainers, Node(config, LAYERS, TOP_K, count).run()
    return held / planned - 1 if planned else float(held)


def matches(share: float) -> bool:
    """Return True if no more is held than 2 % above the plan (what travels beside), or 6 % below (what need not)."""
    return -0.06 < share < 0.02


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_what_is_planned(case: str) -> None:
    share = missed(case)
    assert matches(share), share


def _keeps_what_it_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    real, kept = update._pack_own, list[Any]()
    monkeypatch.setattr(update, "_pack_own", lambda *a, **k: kept.append(real(*a, **k)) or kept[-1])


PLANTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "packed ones forgotten": ("DP 4", lambda plan: plan.setattr(moments, "_PACKED", 0)),
    "a byte for two": ("DP 4, noted", lambda plan: plan.setattr(moments, "_PACKED", 1)),
    "groups forgotten": ("one update", lambda plan: plan.setattr(moments, "_held_prompts", lambda *a: 0)),
    "noted ones forgotten": ("one rank, noted", lambda plan: plan.setattr(moments, "_of_pass", lambda *a: 0)),
    "prompts once": (
        "prompts not shared",
        lambda plan: plan.setattr(moments, "_tokens", lambda *a, real=moments._tokens: _once(real(*a))),
    ),
    "micro-batches that stay": ("DP 4", _keeps_what_it_fetched),
}


def _once(tokens: Any) -> Any:
    return tokens._replace(packed=tokens.fetched)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_wrong_figure_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plant = PLANTED[fault]
    plant(monkeypatch)
    assert not matches(missed(case))


MIXTURES = ["qwen3_30b_a3b_ep8", "qwen3_30b_a3b_tp2_ep4_etp2", "qwen3_235b_a22b_tp4_pp2_ep32"]


@pytest.mark.parametrize("replay", ["rollout", "old_logprobs"])
@pytest.mark.parametrize("preset", MIXTURES)
def test_runs_that_repeat_choices_take_what_is_planned(
    preset: str, replay: str, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    """All phases of a card, and the node, through rollouts, updates, saves and evaluations."""
    job = job_of(
        loader.load(paths.PRESETS / f"{preset}.yaml", [*EVENTS, f"moe.router_replay={replay}"]), *_run(tiny_folder)
    )
    assert run(job, Cursor(), monkeypatch, tiny_folder / "model").step == 9
    for phase in job.estimate.phases:
        if phase.name in job.node.peaks and phase.name != "load":
            peak = job.node.peaks[phase.name]
            assert agree(job, phase, peak), (phase.name, peak, phase.total)
    assert job.estimate.phase("update").parts["experts"] > 0
    planned = host_of(job)
    assert -1e-3 * planned < job.node.host - planned < 1e-4 * planned, (job.node.host, planned, job.estimate.host)


def _run(tiny_folder: Path) -> tuple[Path, int, dict[int, str], float]:
    return tiny_folder / "model", 1, {}, 1e-5


def test_a_rollout_that_stays_is_seen(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    """As it did until the next one had been sampled beside it."""
    begin, kept = Progress.begin_rollout, list[Any]()

    def keeping(self: Progress, rollout: Any, *others: Any) -> None:
        kept.append(rollout)
        begin(self, rollout, *others)

    monkeypatch.setattr(Progress, "begin_rollout", keeping)
    settings = [*EVENTS, "moe.router_replay=rollout"]
    job = job_of(loader.load(paths.PRESETS / f"{MIXTURES[0]}.yaml", settings), *_run(tiny_folder))
    run(job, Cursor(), monkeypatch, tiny_folder / "model")
    assert job.node.host > host_of(job) + job.estimate.host["experts_to_replay"] // 4
