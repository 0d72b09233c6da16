"""What a rank can be asked to do: train, export, evaluate. Puts the parts together; the loop itself is trainer.py.

Floor 4.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from gspo_hpc import (
    algorithms,
    checkpoint,
    commit,
    config_file,
    convert,
    hf_folder,
    model_config,
    passes,
    plan,
    prompts,
    sync,
    trainer,
    update,
)
from gspo_hpc import (
    evaluate as evaluation,
)
from gspo_hpc.accelerator import Accelerator
from gspo_hpc.collective_time import CollectiveTime
from gspo_hpc.config import Config, Parallel
from gspo_hpc.console import Console
from gspo_hpc.control import Client, mark
from gspo_hpc.engine import Engine, EngineDied, EngineSettings
from gspo_hpc.meter import Meter
from gspo_hpc.model_config import Architecture
from gspo_hpc.outlet import Files, Silent, read_start
from gspo_hpc.policy import Policy
from gspo_hpc.preemption import StopFlag, signals_default_in_children
from gspo_hpc.process_groups import Ranks, barrier, broadcast_bytes, start, stop, store
from gspo_hpc.records import Prompt
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rollout import Station
from gspo_hpc.rundir import Attempt, RunDir
from gspo_hpc.saver import Saver
from gspo_hpc.tracking import Tracker

_OTHER_LAYOUT = "weights, optimizer and prompts are the same, but sums round in another order: not bit for bit"
# Exporting and evaluating need one rank, whatever the layout of the run was.
ONE_RANK = (
    "cluster.nodes=1",
    "cluster.gpus_per_node=1",
    *(f"parallel.{one.name}={json.dumps(one.default)}" for one in dataclasses.fields(Parallel)),
    "optimizer.distributed=false",
    "rollout.tensor_parallel_size=1",
    "rollout.engines_per_node=1",
)


_ON_ANY_MACHINE = ("cluster.platform=cpu", "model.layers=torch", "model.fp8=null")


def train(run: RunDir, attempt: Attempt, flag: StopFlag, terminal: TextIO, control: Client | None) -> str:
    """Train from where the run directory stands; "done" or "stopped". Rank 0 talks to the person at `terminal`, every
    rank through `control` to whoever watches it."""
    config = config_file.load(attempt.config)
    collectives = CollectiveTime(config.cluster.platform)  # before there are any
    ranks = start(config, control=control)
    _threads(config)
    console = Console(terminal, config.run.max_steps or 0)
    station = None
    tracker: Tracker | None = None
    code = 1
    try:
        tokenizer = _tokenizer(config)
        train_prompts, eval_prompts = _prompts(config, tokenizer)
        _say(ranks, console, f"{len(train_prompts)} training prompts, {len(eval_prompts)} unseen prompts")
        arch = _architecture(config)
        whole = _newest_checkpoint(run, ranks, console)
        mark("loading")
        policy = Policy(arch, config, ranks)
        policy.stop_requested = lambda: flag.requested is not None
        reference = None
        needed = passes.passes_needed(config)
        if whole is None or needed.reference:
            _say(ranks, console, f"loading {config.model.path}")
            policy.load(str(config.model.path))
        if needed.reference:
            reference = update.Reference(policy)
        policy.make_optimizer()
        barrier(ranks.device)
        logged = _broadcast_int(_cut_metrics(run, whole) if ranks.rank == 0 else 0, ranks)
        begin = trainer.Start(evaluated=logged >= 0)
        if whole is not None:
            _say(ranks, console, f"resuming from {whole.name}")
            if (before := commit.read_extra(whole)["layout"]) != config.layout:
                _say(ranks, console, f"{_layout(before)} became {_layout(config.layout)}: {_OTHER_LAYOUT}")
            checkpoint.load(policy, whole)
            cursor, groups, record = read_start(whole)
            begin = trainer.Start(cursor, groups, record if logged < cursor.step else None, True)
        if begin.cursor.step >= (config.run.max_steps or 0) and begin.record is None:
            _say(ranks, console, f"all {begin.cursor.step} steps are done; for more, raise run.max_steps")
            code = 0
            return "done"
        probe = sync.probe_sequences(train_prompts, config.rollout.probe_tokens)
        station = _station(config, ranks, policy, probe, lambda: flag.requested is not None, console)
        outlet: Files | Silent = Silent()
        if ranks.rank == 0:
            # Its process inherits the blocked signals: Slurm sends them to every process, and what was logged counts.
            settings = dataclasses.asdict(config)
            run_id = run.read_info()["run_id"]
            tracker = Tracker(config.tracking, run.path, run_id, config.run.name, settings, True, console.warn)
            outlet = Files(run, console, tracker, station, config)
        quantities = plan.make_plan(config).quantities
        num_rollout_prompts = int(quantities["num_rollout_prompts"])
        session = trainer.Session(
            config=config,
            objective=algorithms.resolve(config.algorithm),
            passes=needed,
            num_rollout_prompts=num_rollout_prompts,
            updates_per_rollout=int(quantities["steps_per_generation"]) * config.batch.num_iterations,
            policy=policy,
            station=station,
            stream=prompts.PromptStream(
                len(train_prompts), config.run.seed, config.data.shuffle, window=num_rollout_prompts
            ),
            prompts=train_prompts,
            eval_prompts=eval_prompts,
            probe=probe,
            rollouts=run.rollouts,
            new_staging=lambda step: _new_staging(run, step, ranks),
            saver=Saver(policy, background=config.checkpoint.async_save),
            outlet=outlet,
            attempt=attempt.number,
            reference=reference,
            control=control,
            meter=Meter(collectives, Accelerator(ranks.device), ranks.device),
            traces=attempt.traces,
        )
        mark("ready")
        reason = trainer.train(session, begin)
        code = 0 if reason == "done" else 75
        return reason
    finally:
        _close(station, tracker, code)
        stop()


def export(run_dir: Path, step: int | None, out: Path) -> None:
    """Write a checkpoint of a run as a Hugging Face folder."""
    run = RunDir(run_dir)
    config = config_file.load(_newest_config(run), ONE_RANK)
    known = config.model.provider == "own"
    if known:
        config = config_file.load(_newest_config(run), (*ONE_RANK, *_ON_ANY_MACHINE))
    ranks = start(config)
    try:
        arch, whole = _architecture(config), _whole_checkpoint(run, step)
        if known:
            convert.to_hugging_face(whole / "megatron", arch, config, out)
        else:
            policy = Policy(arch, config, ranks)
            checkpoint.load_weights(policy, whole)
            shapes = [(name, tuple(tensor.shape)) for name, tensor in policy.stream()]
            dtype = next(policy.parameters()).dtype
            hf_folder.write(out, str(config.model.path), shapes, dtype, policy.stream())
        print(f"wrote {out}", flush=True)
    finally:
        stop()


def evaluate(target: Path, step: int | None, overrides: Sequence[str], as_json: bool) -> None:
    """Print the scores of a run's checkpoint, or of the model a configuration names, on data.eval."""
    run = RunDir(target) if (target / "run.json").exists() else None
    if run is not None:
        config = config_file.load(_newest_config(run), [*overrides, *ONE_RANK])
    elif target.is_dir():
        config = config_file.load(None, [f"model.path={target}", *overrides, *ONE_RANK])
    else:
        config = config_file.load(target, [*overrides, *ONE_RANK])
    if not config.data.eval:
        raise ValueError("data.eval is not set: give the file of unseen prompts, data.eval=FILE")
    if not config.reward.functions:
        raise ValueError("reward.functions is not set: give a grader, reward.functions=[{function: number_match}]")
    terminal = os.dup(1)
    os.dup2(2, 1)  # libraries' chatter must not mix with --json
    ranks = start(config)
    station = None
    try:
        arch = _architecture(config)
        if run is not None:
            policy = Policy(arch, config, ranks)
            checkpoint.load_weights(policy, _whole_checkpoint(run, step))
        else:
            policy = Policy(arch, config, ranks)
            policy.load(str(config.model.path))
        _, eval_prompts = _prompts(config, _tokenizer(config))
        probe = sync.probe_sequences(eval_prompts, config.rollout.probe_tokens)
        station = _station(config, ranks, policy, probe, lambda: False, None)
        if (death := station.give_weights(station.engine)) is not None:
            raise death
        scores, _ = evaluation.run(station, eval_prompts, config)
        with os.fdopen(terminal, "w") as out:
            if as_json:
                print(json.dumps({"prompts": len(eval_prompts)} | scores), file=out)
            else:
                for name, value in scores.items():
                    print(f"{name.removeprefix('eval/'):<18} {value:.4f}", file=out)
    finally:
        _close(station, None, 0)
        stop()


def _architecture(config: Config) -> Architecture:
    read = model_config.read if config.model.provider == "own" else model_config.outline
    return read(str(config.model.path))


def _layout(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _newest_config(run: RunDir) -> Path:
    """The configuration of the newest attempt."""
    attempts = run.read_attempts()
    return run.attempt(attempts[-1]["attempt"]).config if attempts else run.config


def _whole_checkpoint(run: RunDir, step: int | None) -> Path:
    """That of a step, or the newest whole one."""
    if step is None:
        whole, remarks = commit.newest_whole(run.checkpoints)
        for remark in remarks:
            print(remark, flush=True)
        if whole is None:
            raise ValueError(f"{run.path} has no whole checkpoint")
        return whole
    path = run.checkpoints / f"{step:06d}"
    if problems := commit.verify(path):
        steps = [path.name for path in commit.list_committed(run.checkpoints)]
        raise ValueError(f"checkpoint of step {step}: {problems[0]}; there are: {', '.join(steps) or 'none'}")
    return path


def _threads(config: Config) -> None:
    if config.cluster.threads_per_rank:
        torch.set_num_threads(config.cluster.threads_per_rank)
    if config.cluster.platform == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # helps to find bugs, and costs a twentieth of an update


def _tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(config.model.path), local_files_only=True)


def _prompts(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[Prompt]]:
    def read(path: str | None) -> list[Prompt]:
        if path is None:
            return []
        rows = prompts.load_rows(path, config.data)
        return prompts.build_prompts(rows, tokenizer, config.data, config.rollout.max_prompt_length)

    return read(config.data.train), read(config.data.eval)[: config.eval.max_prompts]


def _newest_checkpoint(run: RunDir, ranks: Ranks, console: Console) -> Path | None:
    """Rank 0 verifies and decides; the others follow."""
    name = ""
    if ranks.rank == 0:
        commit.clean_staging(run.checkpoints)
        whole, remarks = commit.newest_whole(run.checkpoints, put_aside=True)
        for remark in remarks:
            console.warn(remark)
        name = whole.name if whole is not None else ""
    name = broadcast_bytes(name.encode(), ranks.device).decode()
    return run.checkpoints / name if name else None


def _cut_metrics(run: RunDir, checkpoint_dir: Path | None) -> int:
    """Cut metrics.jsonl back to the checkpoint's step; the last step it then holds, -1 for none."""
    step = int(checkpoint_dir.name) if checkpoint_dir is not None else 0
    run.truncate_metrics(step)
    return max((int(record["step"]) for record in run.read_metrics()), default=-1)


def _broadcast_int(value: int, ranks: Ranks) -> int:
    return int(broadcast_bytes(str(value).encode(), ranks.device))


def _new_staging(run: RunDir, step: int, ranks: Ranks) -> Path:
    path = str(commit.begin(run.checkpoints, step)) if ranks.rank == 0 else ""
    return Path(broadcast_bytes(path.encode(), ranks.device).decode())


def _station(
    config: Config,
    ranks: Ranks,
    policy: Policy,
    probe: list[list[int]],
    stop_requested: Callable[[], bool],
    console: Console | None,
) -> Station:
    """Start this rank's engine and graders, if it leads one."""
    per_node = config.rollout.engines_per_node or config.cluster.gpus_per_node // config.rollout.tensor_parallel_size
    spacing = config.cluster.gpus_per_node // per_node
    leads = ranks.local_rank % spacing == 0 and ranks.local_rank // spacing < per_node
    engine = pool = None
    if leads:
        if console is not None:
            _say(ranks, console, "starting the vLLM engine")
        engine = Engine(_engine_settings(config, per_node, policy.arch.experts is not None))
        with signals_default_in_children():
            engine.start()
            pool = RewardPool(config.reward)
    if dist.get_world_size() > 1:
        barrier(ranks.device)

    def give_weights(target: Engine | None) -> EngineDied | None:
        return sync.synchronize(policy, target, probe)[1]

    return Station(
        config=config,
        ranks=ranks,
        store=store(),
        engine=engine,
        pool=pool,
        num_engines=per_node * config.cluster.nodes,
        give_weights=give_weights,
        stop_requested=stop_requested,
    )


def _engine_settings(config: Config, per_node: int, experts: bool) -> EngineSettings:
    rollout = config.rollout
    cores = len(os.sched_getaffinity(0))
    return EngineSettings(
        model_path=str(config.model.path),
        dtype=rollout.dtype or config.model.dtype,
        tensor_parallel_size=rollout.tensor_parallel_size,
        max_model_len=rollout.max_prompt_length + rollout.max_response_length,
        platform=config.cluster.platform,
        kv_cache_gb=rollout.kv_cache_gb,
        threads=max(1, cores // (per_node * rollout.tensor_parallel_size)),
        seed=config.run.seed % 2**32,  # vLLM takes no more; every completion has a seed of its own
        timeout=config.faults.engine_timeout,
        tell_experts=experts and passes.router_replay(config) == "rollout",
        engine_args=dict(rollout.engine),
    )


def _say(ranks: Ranks, console: Console, text: str) -> None:
    if ranks.rank == 0:
        console.note(text)


def _close(station: Station | None, tracker: Tracker | None, code: int) -> None:
    if station is not None:
        if station.pool is not None:
            station.pool.close()
        if station.engine is not None:
            station.engine.close()
    if tracker is not None:
        tracker.close(code)
