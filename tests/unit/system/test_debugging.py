"""The switch that makes libraries talk."""

from __future__ import annotations

import logging

from gspo_hpc.system.debugging import ENVIRONMENT, switch_on


def test_it_sets_what_is_not_set() -> None:
    environment = {"NCCL_DEBUG": "WARN", "HOME": "/"}
    switch_on(environment)
    assert environment["NCCL_DEBUG"] == "WARN"  # the user's
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert environment.keys() == ENVIRONMENT.keys() | {"HOME"}
    assert logging.getLogger("megatron.core").getEffectiveLevel() == logging.DEBUG
