"""Configs in Python: load one, and make others of it that differ in a setting or use code of the user's own.

A config never changes: each function returns another one. Code of the user's own is named as path/to/file.py:NAME, as
in a YAML file, because ranks and reward workers are other processes, on other nodes, that load it by that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.reading import own_code
from gspo_hpc.config.reading.config_files import find_config
from gspo_hpc.config.schema import Config, as_dict


def load_config(config: str | Path, *settings: str) -> Config:
    """Load a config from a YAML file or a preset.

    Args:
        config: The path of a YAML file, or the name of a preset such as ``"tiny_cpu"``.
        *settings: ``"section.key=value"``, as on the command line; they take precedence over the file.

    Returns:
        The config, frozen; ``config.batch.num_generations`` and so on are its settings.

    Raises:
        ValueError: There is no such file, or settings are not valid. The message has a line for each mistake.

    Example:
        >>> config = gspo_hpc.load_config("tiny_cpu", "run.max_steps=4")
        >>> config.run.max_steps, config.batch.num_generations
        (4, 8)
    """
    return loader.load(find_config(str(config)), settings, run_code=True)


def with_settings(config: Config, *settings: str) -> Config:
    """Change settings of a config.

    Args:
        config: A config.
        *settings: ``"section.key=value"``, as on the command line.

    Returns:
        Another config with these settings.

    Raises:
        ValueError: Settings are not valid. The message has a line for each mistake.

    Example:
        >>> config = gspo_hpc.load_config("tiny_cpu")
        >>> gspo_hpc.with_settings(config, "optimizer.lr=3e-5").optimizer.lr
        3e-05
    """
    return loader.with_settings(config, settings)


def with_reward(
    config: Config, function: str, *, weight: float = 1.0, args: Mapping[str, Any] | None = None, add: bool = False
) -> Config:
    """Register a reward function.

    Args:
        config: A config.
        function: ``"path/to/file.py:function"``, or the name of a built-in function. The function has the form
            ``f(completion, *, prompt, fields, ...)`` and returns a finite number.
        weight: The weight of the function in the sum of all rewards.
        args: Arguments of the function itself, by name.
        add: Add the function to those of the config, in place of replacing them.

    Returns:
        Another config with the reward function.

    Raises:
        ValueError: There is no such function, or it cannot be called with these arguments. The file is only read;
            it is run when a run is started.

    Example:
        >>> config = gspo_hpc.load_config("tiny_cpu")
        >>> config = gspo_hpc.with_reward(config, "exact_match", weight=0.5, add=True)
        >>> [(term.function, term.weight) for term in config.reward.functions]
        [('number_match', 1.0), ('exact_match', 0.5)]
    """
    from gspo_hpc.rewards import registry

    term = {"function": function, "weight": weight, "args": dict(args or {})}
    before = [as_dict(one) for one in config.reward.functions] if add else []
    changed = _with(config, "reward", functions=[*before, term])
    registry.check(changed.reward)
    return changed


def with_algorithm(config: Config, name: str, **settings: Any) -> Config:
    """Choose the algorithm, a built-in one or one of your own.

    Args:
        config: A config.
        name: A built-in one (docs/algorithms.md), such as ``"gspo"``, or ``"path/to/file.py:Class"``. The class is
            derived from ``SequenceRatio`` or ``TokenRatio`` of ``gspo_hpc.algorithms.objective``; its file is run.
        **settings: Settings of the algorithm, such as ``clip_low``; others have the algorithm's own defaults.

    Returns:
        Another config with the algorithm.

    Raises:
        ValueError: There is no such algorithm, its file cannot be loaded, or a setting is not valid.

    Example:
        >>> config = gspo_hpc.load_config("tiny_cpu")
        >>> gspo_hpc.with_algorithm(config, "grpo", clip_high=0.28).algorithm.clip_high
        0.28
    """
    raw = loader.given(config) | {"algorithm": {"name": name, **settings}}
    return loader.from_dict(raw, "with_algorithm", run_code=True)


def with_environment(
    config: Config, name: str, *, args: Mapping[str, Any] | None = None, max_turns: int | None = None
) -> Config:
    """Register an environment: a completion becomes a conversation of the model with it.

    What it gives as reward counts through the reward function ``environment`` (:func:`with_reward`).

    Args:
        config: A config.
        name: ``"path/to/file.py:Class"``, or the name of an environment of the package (docs/environments.md). The
            class has the methods ``reset(fields, seed)`` and ``step(state, message)``.
        args: Arguments of the class, by name.
        max_turns: The most messages of the model in a conversation; by default what the config has.

    Returns:
        Another config with the environment.

    Raises:
        ValueError: There is no such environment, or it cannot be made with these arguments. The file is only read.

    Example:
        >>> config = gspo_hpc.with_environment(gspo_hpc.load_config("tiny_cpu"), "guess_number", max_turns=3)
        >>> config = gspo_hpc.with_reward(config, "environment")
        >>> config.environment.name, config.environment.max_turns
        ('guess_number', 3)
    """
    from gspo_hpc.rewards.environments import registry

    turns = {} if max_turns is None else {"max_turns": max_turns}
    changed = _with(config, "environment", name=name, args=dict(args or {}), **turns)
    registry.check(changed.environment)
    return changed


def with_observer(config: Config, function: str) -> Config:
    """Register an observer: a function that is called with the record of every step.

    It runs in a process of its own beside rank 0, so an observer that fails or hangs is reported once and changes
    nothing of the run. A resumed run may give it the records of some steps again.

    Args:
        config: A config.
        function: ``"path/to/file.py:function"``. The function has the form ``f(record)`` or ``f(record, *, run_dir)``;
            a record is an object of metrics.jsonl, and `run_dir` the path of the run directory.

    Returns:
        Another config with the observer besides those that it has.

    Raises:
        ValueError: There is no such function, or it cannot be called so. The file is only read.

    Example:
        >>> _ = Path("watch.py").write_text("def watch(record): print(record['step'], record['reward'])")
        >>> config = gspo_hpc.with_observer(gspo_hpc.load_config("tiny_cpu"), "watch.py:watch")
        >>> config.tracking.observers
        ('watch.py:watch',)
    """
    own_code.check_observer(function)
    return _with(config, "tracking", observers=[*config.tracking.observers, function])


def _with(config: Config, section: str, **keys: Any) -> Config:
    raw = loader.given(config)
    return loader.from_dict(raw | {section: raw.get(section, {}) | keys}, "config", run_code=True)
