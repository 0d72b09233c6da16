"""One switch, tracking.debug, by which the libraries of a rank tell what they do.

Floor 1. Set in a rank before it imports them. Without the switch nothing is set: what a user gives in slurm.environment
stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

ENVIRONMENT = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # ranks that call different collectives are named, instead of hanging
    "TORCH_CPP_LOG_LEVEL": "INFO",  # without which the former says nothing
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "INFO",
    "VLLM_LOGGING_LEVEL": "DEBUG",
}


def switch_on(environment: MutableMapping[str, str]) -> None:
    """Into this environment, and Megatron's log level in this process; what is set already is kept."""
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.DEBUG)
