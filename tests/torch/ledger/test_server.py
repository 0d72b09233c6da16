"""Server mode on cards that count: no card of either role is asked for more than it has, and the plan's figures are it.

Costs a minute. Catches: a trainer that keeps the buckets of a sync into its next update, a plan that has other
buckets for one of the roles, forgets a vocabulary that an engine keeps, or counts the kept weights wrongly, and a
transfer whose copies keep memory that it frees.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gspo_hpc.config import loader, paths
from gspo_hpc.config.schema import Config
from gspo_hpc.exchange.weight_broadcast import SentMemory
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import memory, parameters
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.runs.cursor import Cursor
from tests.torch.ledger.node import CardFull, Node
from tests.torch.ledger.parts import Job, Processes
from tests.torch.ledger.random_layouts import random_configs
from tests.torch.ledger.runs import EVENTS, agree, host_of, odd_vocabulary
from tests.torch.ledger.serving import Both, Generating
from tests.torch.ledger.world import World

APART = ["rollout.mode=server"]


@pytest.fixture
def model(tiny_folder: Path) -> Path:
    return tiny_folder / "model"


def planned(preset: str, *more: str) -> Config:
    return loader.load(paths.PRESETS / f"{preset}.yaml", [*EVENTS, *APART, *more])


def both(config: Config, model: Path, seed: int, folder: Path, script: Mapping[int, str], delay: float = 1e-3) -> Both:
    plan = make_plan(config)
    assert plan.valid and plan.memory is not None, [broken.message for broken in plan.broken]
    tensors = load_file(model / "model.safetensors")
    arch = architecture.find(config)
    if arch is not None and not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    training = config.training_gpus_per_node
    generating = (
        config.cluster.gpus_per_node if config.cluster.generation_nodes else (config.cluster.gpus_per_node - training)
    )
    card = plan.memory.card
    trainers = Job(config, plan.memory, Node(training, card), World(training, seed, delay), tensors)
    scoring = [gpu for gpu in range(generating) if gpu % config.gpus_per_engine >= config.rollout.tensor_parallel_size]
    node = Generating(generating, card, scoring)
    engines = Job(config, plan.memory, node, World(generating, seed + 1, delay), tensors, script)
    return Both(trainers, engines, folder)


def wrong(run: Both, again: Both | None = None) -> dict[str, Any]:
    """Phases whose figure in the plan is not the ledger's."""
    found = {}
    for phase in run.trainers.estimate.phases:
        if phase.name == "evaluation":  # of which the plan has what the phase "generation" has
            continue
        starts = [one for one in (run, again) if one is not None]
        apart = phase.name in ("generation", "reward_model")
        nodes = [one.generators.node if apart else one.trainers.node for one in starts]
        peak = max(node.peaks[phase.name] for node in nodes)
        if not (peak or phase.name in ("logprobs", "load")):
            found[phase.name] = (0, phase.total)
        elif peak and not agree(run.trainers, phase, peak):
            found[phase.name] = (peak / 2**30, phase.total / 2**30)
    return found


# Calls of generation: the evaluation before the first step, a rollout, an evaluation after every step.
SCRIPT = {1: "death", 3: "death", 6: "stop"}
DEATHS = {1: "finish_weight_update", 3: "update_weights"}
CALLS = ("finish_weight_update", "start_weight_update", "update_weights")


ONE = ["rollout.engines_per_node=1"]
NODES = ["rollout.engines_per_node=0", "cluster.generation_nodes=1"]
LAYOUTS = {
    "two engines": ("qwen2.5_7b_tp2", ["rollout.tensor_parallel_size=1", "rollout.engines_per_node=2"]),
    "one step off": ("qwen2.5_7b_tp2", ["rollout.tensor_parallel_size=2", *ONE, "rollout.max_staleness=1"]),
    "reward models of one GPU and of two": (
        "qwen2.5_7b_tp2",
        [
            *("cluster.gpus_per_node=6", "rollout.tensor_parallel_size=1", *ONE, "rollout.max_staleness=1"),
            "reward.models=[{name: a, path: Qwen2.5-7B, placement: apart, gpu_memory_utilization: 0.85}, {name: b, "
            "path: Qwen2.5-14B, placement: apart, gpu_memory_utilization: 0.9, tensor_parallel_size: 2}]",
            "reward.functions=[{function: reward_model, args: {model: a}}, {function: reward_model, args: {model: b}}]",
        ],
    ),
    "small and tied": ("qwen3_0.6b_1gpu", ["cluster.gpus_per_node=2", *ONE]),
    "nodes of their own": (
        "qwen3_30b_a3b_ep8",
        ["cluster.nodes=2", "cluster.generation_nodes=1", "rollout.tensor_parallel_size=4"],
    ),
    "pieces of experts": ("qwen3_235b_a22b_tp4_pp2_ep32", ["cluster.nodes=9", "cluster.generation_nodes=1"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_roles_never_pass_their_cards(
    layout: str, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """A start, evaluations, deaths in rollouts and in syncs, saves, a stop in a rollout, and a resume."""
    preset, more = LAYOUTS[layout]
    config = planned(preset, "faults.max_engine_restarts=99", *more)
    first = both(config, model, 1, tmp_path / "first", SCRIPT)
    first.generators.deaths = DEATHS
    end = first.run(Cursor(), monkeypatch, model)
    assert end.step < 9 and first.generators.syncs > max(DEATHS)
    again = both(config, model, 3, tmp_path / "again", {})
    again.trainers.groups = first.trainers.groups
    assert again.run(end, monkeypatch, model).step == 9
    assert not wrong(first, again)
    nodes = [again.host]
    if config.cluster.generation_nodes:
        nodes = [again.trainers.node.host, again.generators.node.host]
    assert max(nodes) == pytest.approx(host_of(again.trainers), abs=again.trainers.world.size)


def test_random_layouts_never_pass_their_cards(model: Path, tmp_path: Path) -> None:
    """Eighteen that the plan accepts: engines beside the ranks of each node and on nodes of their own, ahead or not.

    With deaths in rollouts and in syncs, saves, evaluations, a stop and a resume; each phase takes what the plan says.
    """
    chance, died, kinds = random.Random(7), 0, set()
    for number, config in enumerate(random_configs(18, apart=True)):
        script = {call: chance.choice(["", "", "death"]) for call in range(6)} | {chance.randrange(2, 9): "stop"}
        with pytest.MonkeyPatch.context() as monkeypatch:
            first = both(config, model, number, tmp_path / f"{number}", script, delay=1e-5)
            first.generators.deaths = dict(zip(chance.sample(range(1, 5), 2), chance.choices(CALLS, k=2), strict=True))
            end = first.run(Cursor(), monkeypatch, model)
            died += sum(sync < first.generators.syncs for sync in first.generators.deaths)
            again = None
            if end.step < 5:
                again = both(config, model, number, tmp_path / f"{number}-again", {}, delay=1e-5)
                again.trainers.groups = first.trainers.groups
                assert again.run(end, monkeypatch, model).step == 5
            assert not wrong(first, again), config
        kinds.add((config.cluster.generation_nodes > 0, config.rollout.max_staleness))
    assert died and len(kinds) == 6, (died, kinds)


def test_the_memory_of_a_node_is_that_of_the_kind_that_needs_more(model: Path, tmp_path: Path) -> None:
    """Engines of a large model on nodes of their own keep more than what others copy to save."""
    _, more = LAYOUTS["pieces of experts"]
    config = planned("qwen3_235b_a22b_tp4_pp2_ep32", *more)
    run = both(config, model, 1, tmp_path, {})
    assert set(run.trainers.estimate.host) == {"processes", "weights_kept_for_engines"}


def of(layout: str, model: Path, folder: Path, *more: str, delay: float = 1e-5) -> Both:
    preset, settings = LAYOUTS[layout]
    return both(planned(preset, *settings, *more), model, 1, folder, {5: "stop"}, delay)


FORGOTTEN: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "layers that are loaded": ((memory, "_loading", lambda *a: 0), {"generation"}),
    "halves": ((memory, "_transfer", lambda *a: 1 << 30), {"generation", "sync"}),
    "the group of the ranks that receive": ((memory, "NCCL_BYTES", 0), {"generation"}),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_plan_that_forgets_a_part_is_caught(
    forgotten: str, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    changed, expected = FORGOTTEN[forgotten]
    right = of("one step off", model, tmp_path)
    with monkeypatch.context() as planted:
        planted.setattr(*changed)
        run = of("one step off", model, tmp_path)
    run.generators.estimate = right.generators.estimate  # from which a rank takes what its context needs
    run.run(Cursor(), monkeypatch, model)
    assert set(wrong(run)) == expected


@pytest.mark.parametrize("forgotten", [False, True], ids=["planned", "forgotten"])
def test_a_padded_vocabulary_is_kept_beside_the_cache(
    forgotten: bool, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """An engine on a GPU of its own has its cache during a sync, too."""
    folder = tmp_path / "odd"
    folder.mkdir()
    odd = odd_vocabulary(folder)
    with monkeypatch.context() as planted:
        if forgotten:
            planted.setattr(parameters, "waiting_vocabulary", lambda arch: 0)
        run = of("one step off", model, tmp_path, odd)
    run.run(Cursor(), monkeypatch, model)
    assert set(wrong(run)) == ({"generation"} if forgotten else set())


@pytest.mark.parametrize("fault", ["keeps buckets", "is not ended"])
def test_what_stays_on_a_card_is_caught(
    fault: str, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """A trainer whose buckets stay beside its next update; an engine that starts again beside what is left of it."""
    run = of("one step off", model, tmp_path)
    if fault == "keeps buckets":
        monkeypatch.setattr(SentMemory, "release", lambda self: None)
        run.run(Cursor(), monkeypatch, model)
        assert {"update", "head_backward", "optimizer_step"} & set(wrong(run))
        return
    run.generators.script = {1: "death"}
    monkeypatch.setattr(Processes, "kill", lambda self: None)
    with pytest.raises((CardFull, ValueError, AssertionError), match=r"Free memory on device|mapped a second time"):
        run.run(Cursor(), monkeypatch, model)
