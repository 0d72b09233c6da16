"""No card is ever asked for more than it has, in any order of events; and the plan's figures are the ledger's.

Costs three minutes. Catches: an engine that starts or wakes beside the trainer, a save beside an awake engine, ranks
that do not wait for the engine of their neighbour, vLLM's memory mapped twice, phases that the plan sums up wrongly,
buffers of a save that the plan forgets or the code holds for too long.
"""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gspo_hpc.checkpoint import shared_optimizer
from gspo_hpc.config import derived, loader, paths
from gspo_hpc.config.constants import LOGITS_BLOCK_BYTES
from gspo_hpc.engine import engine as engines
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, memory, parameters
from gspo_hpc.planning.estimates.head import Head
from gspo_hpc.policy import offload
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training import bringup, probe, sync
from gspo_hpc.training.agreement import explain
from gspo_hpc.training.jobs import evaluate, one_rank, train
from gspo_hpc.training.sync import EngineWeights
from tests.torch.ledger import parts
from tests.torch.ledger.node import CardFull, Node
from tests.torch.ledger.parts import Job, LedgerPolicy, LedgerWorker
from tests.torch.ledger.random_layouts import random_configs
from tests.torch.ledger.runs import (
    EVENTS,
    PRESETS,
    absent,
    agree,
    host_of,
    job_of,
    odd_vocabulary,
    prompt,
    run,
    simulate,
)
from tests.torch.ledger.world import World

STATE = parameters.state
# Calls of generation: the evaluation before the first step, a rollout, an evaluation after every step.
SCRIPT = {1: "death", 3: "death", 6: "stop"}


@pytest.fixture
def model(tiny_folder: Path) -> Path:
    return tiny_folder / "model"


EMBEDDED = ("qwen2.5_72b_lora_tp8", ["adapter.targets=[all-linear,embed_tokens]"])  # merged, a part of it on each rank


@pytest.mark.parametrize(("preset", "more"), [*((preset, []) for preset in PRESETS), EMBEDDED])
def test_presets_never_pass_their_cards(
    preset: str, more: list[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """A start, evaluations, deaths in a rollout and in an evaluation, saves, a stop in a rollout, and a resume."""
    config = loader.load(paths.PRESETS / f"{preset}.yaml", [*EVENTS, *more])
    job = job_of(config, model, 1, SCRIPT)
    end = run(job, Cursor(), monkeypatch, model)
    assert end.step < 9
    if "weights" in derived.offloaded_parts(config):  # the stop in a rollout comes while the trainer is away
        assert job.saved_away == set(range(job.world.size))
    again = job_of(config, model, 2, {})
    assert run(again, end, monkeypatch, model).step == 9
    assert {"head_backward", "update", "probe", "evaluation"} - {one.name for one in job.estimate.phases} <= absent(job)
    for plan in job.estimate.phases:
        peak = max(job.node.peaks[plan.name], again.node.peaks[plan.name])
        if plan.name in job.node.peaks or plan.name != "logprobs":  # a pass that not every run makes
            assert agree(job, plan, peak), (plan.name, peak / 2**30, plan.total / 2**30)
    host = host_of(job)
    assert again.node.host == pytest.approx(host, abs=job.world.size), (again.node.host / 2**30, host / 2**30)


TAUGHT = {  # preset, teacher, other settings
    "tp2": ("qwen2.5_7b_tp2", "Qwen2.5-14B", ()),
    "tp2_pp2_weights_stay": ("qwen2.5_7b_tp2_pp2", "Qwen2.5-14B", ("memory.offload_parts=[optimizer,gradients]",)),
    "adapters": ("qwen3_4b_lora_1gpu", "Qwen3-8B", ()),
}


@pytest.mark.parametrize("case", TAUGHT)
def test_a_teacher_computes_while_the_trainer_is_away(case: str, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Would miss a teacher that stays on the card beside an update or an engine, and one whose size is the model's."""
    preset, teacher, more = TAUGHT[case]
    taught = [f"algorithm.teacher={teacher}", "algorithm.kl_beta=1.0", *more]
    job = job_of(loader.load(paths.PRESETS / f"{preset}.yaml", [*EVENTS, *taught]), model, 1, SCRIPT)
    end = run(job, Cursor(), monkeypatch, model)
    again = job_of(job.config, model, 2, {})
    assert run(again, end, monkeypatch, model).step == 9
    own = parameters.of_rank(job.arch, job.config, job.estimate.stage)
    assert parameters.teacher_weights(job.config, job.estimate.stage) > 1.5 * 2 * (own.dense + own.experts)
    for plan in job.estimate.phases:
        peak = max(job.node.peaks[plan.name], again.node.peaks[plan.name])
        if plan.name in job.node.peaks or plan.name != "logprobs":
            assert agree(job, plan, peak), (plan.name, peak / 2**30, plan.total / 2**30)
    # The plan has the stage with most of the teacher, and this ledger that with most of the trainer.
    kept = job.world.size * parameters.teacher_weights(job.config, job.estimate.stage)
    assert 0 <= job.estimate.host["teacher"] - kept < 1e-3 * kept
    others = host_of(job) - job.estimate.host["teacher"]
    assert again.node.host == pytest.approx(others + kept, abs=job.world.size)


# Syncs of the run, and the call of each that rank 0's engine does not survive.
DEATHS = {1: "finish_weight_update", 4: "wake_up", 7: "start_weight_update", 10: "update_weights"}
CALLS = sorted(DEATHS.values())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("level", [1, 2])
def test_engines_that_die_in_a_sync_leave_room_for_the_next(
    level: int, preset: str, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """It begins again for all, and brings the trainer's weights back: engines that have been filled must leave."""
    more = [f"rollout.sleep_level={level}", "faults.max_engine_restarts=9"]
    job = job_of(loader.load(paths.PRESETS / f"{preset}.yaml", [*EVENTS, *more]), model, 3, {7: "stop"})
    job.deaths = DEATHS
    if level == 1 and job.config.adapter.type is not None:  # weights stay: after the first sync only adapters travel
        job.deaths = DEATHS | {7: "collective_rpc", 10: "reset_prefix_cache"}
    run(job, Cursor(), monkeypatch, model)
    assert job.syncs > max(DEATHS), "not every death came"
    planned = next(one for one in job.estimate.phases if one.name == "sync")
    assert agree(job, planned, job.node.peaks["sync"])


# Calls of generation that are rollouts, after the first one, by updates of each; the others are evaluations.
ROLLOUTS = {1: [2, 3, 5, 6], 2: [2, 4]}


def test_random_layouts_never_pass_their_cards(model: Path) -> None:
    """A hundred that the plan accepts: each with deaths in a rollout and maybe in syncs, saves, evaluations, a stop in
    the middle of a rollout, and a resume.

    Each phase takes what the plan says, whatever of the trainer stays on the card, and whosever choices of experts
    updates repeat.
    """
    chance, died = random.Random(7), 0
    for number, config in enumerate(random_configs(100)):
        script = {call: chance.choice(["", "", "death"]) for call in range(6)} | {1: "death"}
        script[chance.choice(ROLLOUTS[config.batch.steps_per_generation or 1])] = "stop"
        with pytest.MonkeyPatch.context() as monkeypatch:
            job = job_of(config, model, number, script, delay=1e-5)
            job.deaths = dict(zip(chance.sample(range(1, 5), 2), chance.choices(CALLS, k=2), strict=True))
            end = run(job, Cursor(), monkeypatch, model)
            again = job_of(config, model, number, {}, delay=1e-5)
            again.groups = job.groups
            died += sum(sync < job.syncs for sync in job.deaths)
            assert job.stopped_in == "generation" and end.step < 5, number
            assert run(again, end, monkeypatch, model).step == 5
        for phase in job.estimate.phases:
            peak = max(job.node.peaks[phase.name], again.node.peaks[phase.name])
            if peak or phase.name != "logprobs":  # a pass that not every run makes
                assert agree(job, phase, peak), (number, phase.name, peak / 2**30, phase.total / 2**30)
        # Beside choices of experts travels what says whose they are.
        planned = host_of(job) * (1 + 1e-4 * (job.choices is not None))
        assert job.node.host <= planned, (number, job.node.host / 2**30, planned / 2**30)
    assert died > 100, "deaths in syncs did not come"


@pytest.mark.parametrize("kept", [False, True], ids=["real", "planted"])
@pytest.mark.parametrize("what", ["load", "save"])
def test_a_rank_that_keeps_what_arrives_is_caught(
    what: str, kept: bool, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """A second copy of the optimizer's state beside the first, until the load or the save ends."""
    config = loader.load(paths.PRESETS / "qwen2.5_7b_tp2.yaml", [*EVENTS, "optimizer.distributed=true"])
    exchange, copies = shared_optimizer._exchange_batch, []

    def keeping(members: Any, moves: Any, send: Any, landing: Any, receive: Any, **options: Any) -> None:
        def kept(move: Any, values: Any) -> None:
            copies.append(values)
            receive(move, values)

        exchange(members, moves, send, landing, kept, **options)

    if kept:
        monkeypatch.setattr(shared_optimizer, "_exchange_batch", keeping)
    job = job_of(config, model, 1, {})
    world, node = job.world, job.node
    monkeypatch.setattr(shared_optimizer, "torch", parts.Torch(job))
    monkeypatch.setattr(shared_optimizer, "dist", parts.Sends())
    monkeypatch.setattr(shared_optimizer, "shares", lambda part: part.every)

    def rank() -> None:
        place = world.rank
        ranks = Ranks(place, world.size, place, torch.device("cuda", place), place, world.size, 0, 1, 0, 1, 0, 1, 1)
        policy = LedgerPolicy(job, ranks)
        parts.load(policy) if what == "load" else parts.gather_optimizer(policy)

    world.run(rank)
    copies.clear()
    planned = job.estimate.phase("load").total if what == "load" else job.estimate.host["save_transit"]
    taken = node.peaks["load"] if what == "load" else node.host
    assert taken > planned if kept else taken == planned


@pytest.mark.parametrize("trains", [False, True], ids=["planned", "with gradients"])
@pytest.mark.parametrize("preset", ["qwen2.5_7b_tp2", "qwen3_0.6b_1gpu", "qwen3_30b_a3b_ep8"])
def test_the_command_that_evaluates_takes_what_is_planned(
    preset: str, trains: bool, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """The real job on one GPU; buffers of gradients, which nothing needs there, would be more than the weights."""
    more = ["data.eval=eval.jsonl", "cluster.gpu=B300", "model.fp8=hybrid", *bringup.ONE_RANK]
    config = loader.load(paths.PRESETS / f"{preset}.yaml", more)
    arch = architecture.find(config)
    assert arch is not None
    found = memory.of_evaluation(arch, config, devices.find("B300"))
    job = Job(config, found, Node(1, found.card), World(1, 1), load_file(model / "model.safetensors"))
    simulate(job, monkeypatch, model)
    make = bringup.start_rollout_worker

    def worker(*places: Any, **options: Any) -> LedgerWorker:
        started = make(*places, **options)
        own = LedgerWorker(**{name: vars(started)[name] for name in LedgerWorker.__dataclass_fields__})
        own.job = job
        return own

    ranks = Ranks(0, 1, 0, torch.device("cuda", 0), 0, 1, 0, 1, 0, 1, 0, 1, 1)
    planted = {"trains": True} if trains else {}
    replaced: dict[str, Any] = {
        "read_config": lambda *a: config,
        "start": lambda config: ranks,
        "stop": lambda: None,
        "read_architecture": lambda config: arch,
        "Policy": lambda arch, config, ranks, **options: LedgerPolicy(job, ranks, **(options | planted)),
        "start_rollout_worker": worker,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(one_rank, name, value)
    monkeypatch.setattr(evaluate, "_complete", lambda config: config)
    monkeypatch.setattr(evaluate, "read_prompts", lambda config: ([], {"": [prompt(0)]}))
    job.world.run(lambda: evaluate.evaluate(Path("none"), None, [], True, None, lambda text: None))
    wrong = {one.name for one in found.phases if not agree(job, one, job.node.peaks[one.name])}
    assert ("load" in wrong) == trains and (trains or not wrong)
    assert {one.name for one in found.phases} == {"load", "engine_start", "sync", "probe", "evaluation"}


@pytest.mark.parametrize(
    ("preset", "more", "told"),
    [
        ("qwen2.5_7b_tp2", [], None),
        ("qwen3_30b_a3b_ep8", [], None),
        ("qwen3_30b_a3b_ep8", ["cluster.gpu=A100-40GB"], "may run out of memory: "),
        ("qwen3_30b_a3b_ep8", ["cluster.gpu=A100-40GB", "cluster.platform=cpu"], None),
        ("tiny_cpu", [], None),
    ],
)
def test_who_evaluates_is_told_if_one_gpu_has_too_little(preset: str, more: list[str], told: str | None) -> None:
    config = loader.load(paths.PRESETS / f"{preset}.yaml", [*more, *bringup.ONE_RANK])
    found = one_rank.lack_of_memory(config)
    assert (found is None) == (told is None) and (told or "") in (found or "")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("forgotten", [False, True], ids=["planned", "forgotten"])
def test_a_padded_vocabulary_is_kept_until_a_sync_ends(
    tied: bool, forgotten: bool, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """A plan without it has another peak than the ledger."""
    if forgotten:
        monkeypatch.setattr(parameters, "waiting_vocabulary", lambda arch: 0)
    config = loader.load(paths.PRESETS / "qwen2.5_7b_tp2.yaml", [*EVENTS, odd_vocabulary(tmp_path, tied=tied)])
    job = job_of(config, model, 1, {2: "stop"})
    run(job, Cursor(), monkeypatch, model)
    planned = next(one for one in job.estimate.phases if one.name == "sync")
    missed = job.node.peaks["sync"] - planned.total
    assert missed == (2 - tied) * 152_065 * 3584 * 2 * forgotten


def of_head(name: str, size: int) -> tuple[type, str, property]:
    """Return a figure of the plan's head, and another one."""
    return Head, name, property(lambda head: size)


FORGOTTEN: dict[str, tuple[Any, set[str]]] = {
    "layers that are loaded": ((memory, "_loading", lambda *a: 0), {"sync"}),
    "the head's gradient": (of_head("gradient", 0), {"head_backward"}),
    "copies of the head's input": (of_head("inputs", 0), {"head_backward"}),
    "logits": (of_head("backward_blocks", LOGITS_BLOCK_BYTES["cuda"]), {"head_backward"}),
    "logits of log-probs": (of_head("forward_blocks", 0), {"logprobs", "probe"}),
    "copies of gradients": (
        (parameters, "state", lambda *a: STATE(*a)._replace(gradient_copies=STATE(*a).gradient_copies // 2)),
        {"optimizer_step"},
    ),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_plan_that_forgets_a_part_is_caught(forgotten: str, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """What the code allocates is charged, so a plan that has less of it has another peak than the ledger."""
    settings = [*EVENTS, "optimizer.grad_reduce_in_fp32=false", "batch.steps_per_generation=4"]
    config = loader.load(paths.PRESETS / "qwen2.5_7b_tp2.yaml", settings)
    changed, wrong = FORGOTTEN[forgotten]
    monkeypatch.setattr(*changed)
    job = job_of(config, model, 1, {3: "stop"}, delay=1e-5)
    run(job, Cursor(), monkeypatch, model)
    phases = [one for one in job.estimate.phases if one.name != "load"]
    assert {one.name for one in phases if not agree(job, one, job.node.peaks[one.name])} == wrong


def test_copies_of_gradients_that_stay_are_caught(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """As they did until a step dropped them: beside the engine in every sync, rollout and save."""
    settings = [*EVENTS, "optimizer.grad_reduce_in_fp32=false"]
    config = loader.load(paths.PRESETS / "qwen2.5_7b_tp2.yaml", settings)
    monkeypatch.setattr(parts.Optimizer, "zero_grad", lambda self: None)
    job = job_of(config, model, 1, {}, delay=1e-5)
    with contextlib.suppress(CardFull):
        run(job, Cursor(), monkeypatch, model)
        assert job.node.peaks["save"] > job.estimate.phase("save").total
        assert job.node.peaks["generation"] > job.estimate.phase("generation").total


@pytest.mark.parametrize("fault", ["start", "sync", "save", "wait", "wake"])
def test_faults_in_the_order_of_events_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Each is an order of events that this package once had, and that no run on a CPU could show."""
    preset = "qwen3_235b_a22b_tp4_pp2_ep32" if fault == "sync" else "qwen2.5_7b_tp2"  # the one whose state is large
    config = loader.load(paths.PRESETS / f"{preset}.yaml", [*EVENTS, "rollout.tensor_parallel_size=4"])
    leave, sleep = offload.leave_to_engines, EngineWeights.sleep
    if fault == "start":  # an engine starts beside the trainer
        monkeypatch.setattr(train, "offload", SimpleNamespace(leave_to_engines=lambda policy: None))
    elif fault == "sync":  # weights wake beside gradients and optimizer
        only_all = {"leave_to_engines": lambda policy, **options: None if options else leave(policy)}
        monkeypatch.setattr(sync, "offload", SimpleNamespace(**vars(offload) | only_all))
    elif fault == "save":  # a save beside an engine that is awake
        monkeypatch.setattr(EngineWeights, "sleep", lambda self, level=None: None if level else sleep(self))
    elif fault == "wait":  # no rank waits for its neighbours
        monkeypatch.setattr(offload, "wait_for_all", lambda policy: None)
    else:  # memory that is awake is asked for again
        monkeypatch.setattr(engines.Engine, "wake_up", lambda self, tags=None: self._llm("wake_up", tags))
    errors = (CardFull, ValueError, AssertionError)
    with pytest.raises(errors, match=r"does not fit|Free memory on device|mapped a second time"):
        for seed in range(5):
            run(job_of(config, model, seed, {2: "stop"}), Cursor(), monkeypatch, model)


@pytest.mark.parametrize("waits", [True, False], ids=["real", "planted"])
def test_a_mismatch_is_told_though_the_engine_fills_the_cards(
    waits: bool, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """To name the cause the trainer computes again, on cards that one engine still has: only its owner sees it leave.

    A rank that does not wait for that runs out of memory, and the user sees this error in place of the mismatch.
    """
    large = ["rollout.tensor_parallel_size=4", "rollout.engine.gpu_memory_utilization=0.9"]
    config = loader.load(paths.PRESETS / "qwen2.5_7b_tp2.yaml", [*EVENTS, *large])
    job = job_of(config, model, 1, {})

    def answers(self: engines.Engine, sequences: Any) -> list[np.ndarray]:
        time.sleep(0.1)  # engines take longer to answer than ranks to go on
        return [np.full(len(tokens) - 1, 9.0, np.float32) for tokens in sequences]

    def scored(policy: Any, sequences: Any, *unused: Any, **options: Any) -> Any:
        parts.logprob_pass(policy)
        return SimpleNamespace(logprobs=[np.zeros(len(tokens) - 1, np.float32) for tokens in sequences], experts=[])

    if not waits:
        monkeypatch.setattr(explain, "offload", SimpleNamespace(wait_for_all=lambda policy: None))
    monkeypatch.setattr(explain, "score", scored)
    monkeypatch.setattr(engines.Engine, "prompt_logprobs", answers)
    full = (CardFull, "the trainer.s weights does not fit")
    expected: Any = (probe.ProbeMismatch, "disagree on the probe") if waits else full
    with pytest.raises(expected[0], match=expected[1]):
        run(job, Cursor(), monkeypatch, model)
