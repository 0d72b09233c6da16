"""GSPO training of language models on Slurm, with Megatron-Core and vLLM.

The names in ``__all__`` are the Python interface, which docs/notebook.ipynb shows in use. They are imported when they
are first used, so that ``import gspo_hpc`` needs nothing but the standard library.
"""

__version__ = "0.1.0"

__all__ = [
    "Run",
    "RunFailed",
    "load_config",
    "open_run",
    "plan",
    "submit",
    "train",
    "with_algorithm",
    "with_environment",
    "with_observer",
    "with_reward",
    "with_settings",
]

TYPE_CHECKING = False  # as type checkers know it, without the time that importing `typing` takes
if TYPE_CHECKING:
    from gspo_hpc.api.configs import load_config, with_algorithm, with_environment, with_observer, with_reward
    from gspo_hpc.api.configs import with_settings as with_settings
    from gspo_hpc.api.launching import RunFailed, plan, submit, train
    from gspo_hpc.api.run import Run, open_run


def __getattr__(name: str) -> object:
    """Return a public name, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'gspo_hpc' has no attribute {name!r}; it has {', '.join(__all__)}", name=name)
    from gspo_hpc import api

    found = globals()[name] = getattr(api, name)
    return found


def __dir__() -> list[str]:
    """Return the public names, and those that every module has."""
    return sorted({*globals(), *__all__})
