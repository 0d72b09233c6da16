"""What the ranks of tests/gloo do. A case is a function of keyword arguments that returns arrays; rank 0 saves them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo_hpc import algorithms, checkpoint, model_config, pipeline, sync, update, weights
from gspo_hpc.config import Config
from gspo_hpc.config_file import from_dict
from gspo_hpc.engine import Engine, EngineSettings
from gspo_hpc.pipeline import Abandoned, Policy, StepResult
from gspo_hpc.plan import pass_sizes
from gspo_hpc.process_groups import Ranks, barrier, drop_layout, start, stop
from gspo_hpc.records import Completion, Group, Prompt
from gspo_hpc.saver import Saver

Arrays = dict[str, np.ndarray]


def config(model: str, world: int, model_dtype: str = "float32", **sections: Any) -> Config:
    """A CPU configuration of `world` ranks for the model folder."""
    base: dict[str, Any] = {
        "cluster": {"platform": "cpu", "gpus_per_node": world},
        "model": {"path": model, "dtype": model_dtype},
        "batch": {"global_batch_size": 12, "num_generations": 4, "micro_batch_tokens": 96},
        "run": {"max_steps": 100},
        "optimizer": {"lr": 1e-4, "adam_eps": 1e-4},
        "algorithm": {"clip_low": 0.5, "clip_high": 0.5},  # wide: the later steps too must have a gradient
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return from_dict(base)


def groups(seed: int = 0, count: int = 3, samples: int = 4, vocabulary: int = 90) -> list[Group]:
    """Groups of very different lengths, whose prompts begin alike, with old log-probs near the truth of nobody."""
    rng = np.random.default_rng(seed)
    opening = rng.integers(0, vocabulary, 18)
    made = []
    for slot in range(count):
        own = rng.integers(0, vocabulary, rng.integers(2, 20))
        prompt = Prompt(slot, np.concatenate((opening, own)).astype(np.int32), "", {})
        completions = []
        for index in range(samples):
            length = int(rng.integers(1, 24))
            completions.append(
                Completion(
                    tokens=rng.integers(0, vocabulary, length).astype(np.int32),
                    logprobs=np.full(length, -4.0, np.float32),
                    text="",
                    finish_reason="stop",
                    seed=index,
                    reward=float(rng.integers(0, 2)) if index > 1 else float(index),
                )
            )
        made.append(Group(slot, prompt, tuple(completions)))
    return update.with_advantages(made, True)


def policy(settings: Config) -> tuple[Policy, Ranks]:
    """The model with its weights and an optimizer."""
    ranks = start(settings)
    arch = model_config.read(str(settings.model.path))
    made = Policy(arch, settings, ranks)
    weights.load(made.chunks, arch, str(settings.model.path))
    made.make_optimizer()
    return made, ranks


def logprobs(model: str, world: int, **sections: Any) -> Arrays:
    """Log-probs of all completions, in slot and index order."""
    settings = config(model, world, **sections)
    made, _ = policy(settings)
    values = update.logprob_pass(made, groups(), pass_sizes(settings)["update"], settings)
    return {f"{slot}-{index}": array for (slot, index), array in values.items()}


def steps(model: str, world: int, count: int = 3, nan_rank: int = -1, stop_rank: int = -1, **sections: Any) -> Arrays:
    """Losses, gradient norms and all weights after `count` optimizer steps on one rollout.

    `stop_rank`: a rank that is asked to stop in a log-prob pass and in a step before those, after a micro-batch.
    """
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    objective = algorithms.resolve(settings.algorithm)
    rollout = groups()
    values = update.logprob_pass(made, rollout, pass_sizes(settings)["old_logprobs"], settings)
    rollout = update.with_old_logprobs(rollout, values)
    results: list[StepResult] = []
    scales: list[float] = []
    if stop_rank >= 0:
        _abandon(made, stop_rank, lambda: update.logprob_pass(made, rollout, pass_sizes(settings)["update"], settings))
        _abandon(made, stop_rank, lambda: update.step(made, rollout, objective, settings))
    gradients: Arrays = {}
    if nan_rank < 0 and not settings.optimizer.distributed:  # there no rank has all of a gradient
        gradients = _gradients(made, lambda: update.step(made, rollout, objective, settings))
    for _ in range(count):
        if nan_rank == ranks.rank:
            _poison(made)
        result = update.step(made, rollout, objective, settings)
        assert result is not None
        results.append(result)
        scales.append(float(made.optimizer.get_loss_scale()))
    arrays = {name: tensor.float().numpy().copy() for name, tensor in made.stream()}
    arrays |= gradients
    arrays["loss"] = np.array([r.sums["loss"][0] / r.sums["loss"][1] for r in results])
    arrays["entropy"] = np.array([r.sums["entropy"][0] / r.sums["entropy"][1] for r in results])
    arrays["grad_norm"] = np.array([r.grad_norm for r in results])
    arrays["overflowed"] = np.array([r.overflowed for r in results])
    arrays["loss_scale"] = np.array(scales)
    arrays["skipped"] = np.array([r.skipped for r in results])
    return arrays


def _gradients(made: Policy, step: Callable[[], object]) -> Arrays:
    """Gradients of all Hugging Face tensors in a step that takes place but for its end: put into the place of the
    weights, they are gathered like them."""
    kept = [parameter.detach().clone() for parameter in made.parameters()]

    def keep(policy: Policy) -> tuple[float, bool]:
        for parameter in policy.parameters():
            parameter.data.copy_(parameter.main_grad)
        return 0.0, True

    original, pipeline._apply = pipeline._apply, keep
    try:
        step()
    finally:
        pipeline._apply = original
    found = {f"gradient/{name}": t.float().numpy().copy() for name, t in made.stream()}
    for parameter, values in zip(made.parameters(), kept, strict=True):
        parameter.data.copy_(values)
    return found


def _abandon(made: Policy, rank: int, work: Callable[[], object]) -> None:
    """This rank leaves the work, with all others, once `rank` has computed one of several micro-batches."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return made.ranks.rank == rank and asked > 1

    made.stop_requested = stop
    try:
        work()
        raise AssertionError("it went on to the end")
    except Abandoned:
        assert asked > 1, "there was only one micro-batch"
    finally:
        made.stop_requested = lambda: False


def _poison(made: Policy) -> None:
    """One NaN in the gradient of the final norm of this rank, in the next backward pass."""
    parameter = made.chunks[-1].decoder.final_layernorm.weight
    handle = parameter.register_hook(lambda grad: (handle.remove(), torch.full_like(grad, float("nan")))[1])


def roundtrip(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """Weights after 2 + 2 steps, straight through and with a save and a load into a fresh policy in between."""
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    objective = algorithms.resolve(settings.algorithm)
    rollout = groups()

    def advance(which: Policy) -> None:
        for _ in range(2):
            assert update.step(which, rollout, objective, settings) is not None

    advance(made)
    saver = Saver(made)
    for _ in range(2):  # the second into the memory that the first has used
        saver.wait()
        saver.save(_empty(Path(folder), ranks), lambda known: None)
    advance(made)  # while it is written
    saver.wait()
    barrier(ranks.device)
    straight = {f"straight/{name}": t.float().clone().numpy() for name, t in made.stream()}
    fresh = Policy(made.arch, settings, ranks)
    fresh.make_optimizer()
    checkpoint.load(fresh, Path(folder))
    advance(fresh)
    return straight | {f"resumed/{name}": t.float().clone().numpy() for name, t in fresh.stream()}


def saved(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """Weights after two steps, where they are saved, and after two more."""
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    _two_steps(made, settings)
    Saver(made, background=False).save(_empty(Path(folder), ranks), lambda known: None)
    barrier(ranks.device)
    return _before_and_after(made, settings)


def loaded(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """The same from what another case has saved, by ranks of another layout."""
    settings = config(model, world, **sections)
    ranks = start(settings)
    made = Policy(model_config.read(model), settings, ranks)
    made.make_optimizer()
    checkpoint.load(made, Path(folder))
    return _before_and_after(made, settings)


def probed(model: str, world: int, **sections: Any) -> Arrays:
    """What the probe says of weights that two steps have changed and that were then sent into an engine of rank 0."""
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    _two_steps(made, settings)
    _probes.append(model)
    with torch.no_grad():
        for parameter in made.parameters():  # so that no two layouts have the same: all make the same steps
            parameter *= 1.0 + 0.02 * len(_probes)
    engine = _engine(model) if ranks.rank == 0 else None
    probe = np.random.default_rng(1).integers(0, 90, (4, 12)).tolist()
    with contextlib.suppress(sync.ProbeMismatch):  # of the weights that the engine has so far
        sync._check(made, engine, probe, None)
        raise AssertionError("the engine has these weights before it was given them")
    synced, death = sync.synchronize(made, engine, probe)
    assert death is None
    return {"gap": np.array([synced.gap_max, synced.gap_mean])}


_engines: dict[str, Engine] = {}
_probes: list[str] = []


def _engine(model: str) -> Engine:
    """One of this model, kept for the cases to come."""
    if model not in _engines:
        _engines[model] = Engine(EngineSettings(model_path=model, max_model_len=64, kv_cache_gb=0.1, threads=1))
        _engines[model].start()
    return _engines[model]


def _two_steps(made: Policy, settings: Config) -> None:
    objective = algorithms.resolve(settings.algorithm)
    for _ in range(2):
        assert update.step(made, groups(), objective, settings) is not None


def _before_and_after(made: Policy, settings: Config) -> Arrays:
    before = {f"saved/{name}": t.clone().numpy() for name, t in made.stream()}
    _two_steps(made, settings)
    return before | {f"after/{name}": t.clone().numpy() for name, t in made.stream()}


def _empty(folder: Path, ranks: Ranks) -> Path:
    """The folder without what is in it, once all ranks have come this far."""
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    barrier(ranks.device)
    return folder


def full(model: str, world: int, folder: str) -> Arrays:
    """Whether a save that finds no room says so in one line: files may have no more than a page here."""
    made, _ = policy(config(model, world))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        Saver(made, background=False).save(Path(folder), lambda known: None)
        said = ""
    except OSError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return {"said": np.array([said])}


def exported(model: str, world: int, **sections: Any) -> Arrays:
    """Every Hugging Face tensor after a load: equal to the file bit for bit."""
    made, _ = policy(config(model, world, **sections))
    return {name: tensor.numpy().copy() for name, tensor in made.stream()}


def main() -> None:
    """All cases of one file of work on this rank, in turn; rank 0 writes one .npz a case."""
    functions: dict[str, Callable[..., Arrays]] = {
        f.__name__: f for f in (logprobs, steps, roundtrip, saved, loaded, probed, full, exported)
    }
    for out, case, arguments in json.loads(Path(sys.argv[1]).read_text()):
        arrays = functions[case](world=int(os.environ["WORLD_SIZE"]), **arguments)
        drop_layout()
        if os.environ["RANK"] == "0":
            np.savez(out, **arrays)
    for engine in _engines.values():
        engine.close()
    stop()


if __name__ == "__main__":
    main()
