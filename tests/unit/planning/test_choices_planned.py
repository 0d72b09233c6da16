"""Choices of experts in a node's own memory, in numbers made by hand; tests/torch/ledger compares with the real code.

Costs a second. Catches choices that are counted for the wrong nodes of server mode, or in a run that repeats none, and
a plan that is refused for completions which need not be so long.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, memory
from gspo_hpc.planning.plan import make_plan

TOKEN = 48 * 8  # choices of a token: layers, experts of a token
PROMPTS, GROUP = 64, 1024 + 16 * 7167  # of a rollout; tokens of a group


def made(replay: str, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "cluster": {"gpus_per_node": 8, "gpu": "H200"},
        "model": {"path": "Qwen3-30B-A3B"},
        "parallel": {"expert_model_parallel_size": 8},
        "memory": {"recompute_granularity": "full"},
        "moe": {"router_replay": replay},
        "batch": {
            "num_generations": 16,
            "global_batch_size": 256,
            "steps_per_generation": 4,
            "micro_batch_tokens": 16384,
        },
        "rollout": {"max_prompt_length": 1024, "max_response_length": 7168, "engine": {"gpu_memory_utilization": 0.8}},
        "optimizer": {"distributed": True},
        "data": {"train": "train.jsonl"},
        "reward": {"functions": [{"function": "number_match"}]},
    }
    return from_dict({**base, **{name: base.get(name, {}) | section for name, section in sections.items()}})


def planned(config: Config) -> tuple[int, int, memory.Estimate]:
    """The bytes with ranks that train, and with engines."""
    arch = architecture.find(config)
    assert arch is not None and arch.experts is not None and arch.num_layers * arch.experts.top_k == TOKEN
    found = memory.estimate(arch, config, devices.find("H200"))
    return found.host.get("experts_to_replay", 0), found.host.get("experts_of_engines", 0), found


def packed(completions: int) -> int:
    """Bytes of what all ranks fetch and pack, where two completions of a group have a micro-batch."""
    return TOKEN * (completions * 7167 + completions // 16 * 1024 + 2 * (completions * 7167 + completions // 2 * 1024))


def test_one_node_has_a_rollout_and_the_largest_pass() -> None:
    trainers, of_engines, found = planned(made("rollout"))
    assert trainers == TOKEN * PROMPTS * GROUP + packed(3 * 256)  # the pass over all but the first update's
    assert of_engines == TOKEN * found.cache_tokens * 8
    whole = 3 * 256 * 7167 + 3 * 128 * 1024
    assert planned(made("old_logprobs"))[:2] == (4 * TOKEN * whole, 0)  # noted, and whole micro-batches: two bytes each


@pytest.mark.parametrize(
    ("replay", "sections"),
    [
        ("off", {}),
        ("old_logprobs", {"batch": {"steps_per_generation": 1}}),
        ("old_logprobs", {"algorithm": {"correction": "bypass"}}),
    ],
)
def test_what_repeats_nothing_has_none(replay: str, sections: dict[str, Any]) -> None:
    trainers, of_engines, found = planned(made(replay, **sections))
    assert trainers == of_engines == 0 and not any("experts" in phase.parts for phase in found.phases)


def test_server_mode_counts_for_both_kinds_of_gpus() -> None:
    """One update a rollout, so that no pass but it repeats anything."""
    server: dict[str, Any] = {"mode": "server", "engines_per_node": 4}
    settings: dict[str, Any] = {"parallel": {"expert_model_parallel_size": 4}, "batch": {"steps_per_generation": 1}}
    rollout = TOKEN * PROMPTS // 4 * GROUP
    trainers, of_engines, found = planned(made("rollout", rollout=server, **settings))
    assert trainers == rollout + packed(256)
    assert of_engines == rollout + TOKEN * found.cache_tokens * 4, "what they have sampled is theirs until all is"


def test_what_is_sampled_ahead_is_held_with_dynamic_sampling() -> None:
    server: dict[str, Any] = {"mode": "server", "engines_per_node": 4, "max_staleness": 3}
    settings: dict[str, Any] = {"parallel": {"expert_model_parallel_size": 4}, "batch": {"steps_per_generation": 1}}
    rollout = TOKEN * PROMPTS // 4 * GROUP
    plain = planned(made("rollout", rollout=server, **settings))[0]
    dynamic = planned(made("rollout", rollout=server | {"dynamic_sampling": True}, **settings))[0]
    assert (plain, dynamic) == (rollout + packed(256), 3 * rollout + packed(256))


def test_the_command_that_evaluates_has_those_of_engines_alone() -> None:
    config = made("rollout")
    arch = architecture.find(config)
    assert arch is not None
    host = memory.of_evaluation(arch, config, devices.find("H200")).host
    assert "experts_of_engines" in host and "experts_to_replay" not in host


def test_a_plan_is_not_refused_for_completions_that_may_be_shorter() -> None:
    found = planned(made("rollout"))[2]
    total, processes = sum(found.host.values()), found.host["processes"]
    choices = found.host["experts_to_replay"] + found.host["experts_of_engines"]
    warned = make_plan(made("rollout", slurm={"mem": f"{(total - processes - choices // 2) >> 20}"}))
    assert warned.valid and any("of its own memory" in text for text in warned.warnings)
    refused = make_plan(made("rollout", slurm={"mem": f"{(total - processes - 2 * choices) >> 20}"}))
    assert [broken.rule for broken in refused.broken] == ["node_memory_suffices"]
