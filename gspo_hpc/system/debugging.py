"""The setting tracking.debug, by which the libraries of a rank log what they do.

A rank applies it before it imports them. Without the setting nothing is changed: variables that a user gives in
slurm.environment stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

ENVIRONMENT = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # names ranks that call different collectives, instead of a hang
    "TORCH_CPP_LOG_LEVEL": "INFO",  # without it the one above logs nothing
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "INFO",
    "VLLM_LOGGING_LEVEL": "DEBUG",
}


def switch_on(environment: MutableMapping[str, str]) -> None:
    """Set the variables in `environment`, except those that have a value, and Megatron's log level in this process."""
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.DEBUG)
