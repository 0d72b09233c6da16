"""The Python interface: what `gspo_hpc` offers under its own name. Nothing here imports torch."""

from gspo_hpc.api.configs import load_config, with_algorithm, with_observer, with_reward, with_settings
from gspo_hpc.api.launching import RunFailed, plan, submit, train
from gspo_hpc.api.run import Run, open_run

__all__ = [
    "Run",
    "RunFailed",
    "load_config",
    "open_run",
    "plan",
    "submit",
    "train",
    "with_algorithm",
    "with_observer",
    "with_reward",
    "with_settings",
]
