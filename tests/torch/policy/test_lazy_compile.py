"""Megatron's functions are compiled when they are called; ranks import neither torch's compiler nor foreign trackers.

It would catch an import of Megatron past the package's own, which costs every rank two seconds of processor time, a
function that is compiled again at every call, one that is not compiled at all, and one that breaks the graph of the
function that calls it. Takes twenty seconds.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from gspo_hpc.policy.platform import lazy_compile
from gspo_hpc.policy.platform.lazy_compile import compiled_at_first_call

IMPORTED = "import sys, {}; print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules], {})"
BEGUN = (
    "gspo_hpc.training.jobs.train, torch; from gspo_hpc.config.loader import from_dict; "
    "from gspo_hpc.training import bringup; bringup.set_threads(from_dict({'cluster': {'platform': 'cpu'}}))"
)


@pytest.mark.parametrize(
    ("module", "shown", "expected"),
    [
        (BEGUN, "torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()",
         "[] True True"),
        ("gspo_hpc.checkpoint.sharded", "''", "[] "),
    ],
    ids=["train", "checkpoint"],
)  # fmt: skip
def test_a_rank_does_not_import_the_compiler(module: str, shown: str, expected: str) -> None:
    line = IMPORTED.format(module, shown)
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == expected


def test_a_rank_does_not_import_the_trackers_of_megatron_and_may_still_import_its_own() -> None:
    program = (
        "import sys, gspo_hpc.training.jobs.train; from megatron.core import timers; "
        "print([name for name in ('wandb', 'torch.utils.tensorboard', 'tensorboard') if name in sys.modules], "
        "timers.wandb); import wandb, torch.utils.tensorboard; print(wandb.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[] None", "wandb"]


def double(x: torch.Tensor) -> torch.Tensor:
    """Something to compile."""
    return x * 2


def test_a_function_is_compiled_once_and_only_when_it_is_called() -> None:
    with mock.patch.object(lazy_compile, "_compile", wraps=torch.compile) as compiling:
        with compiled_at_first_call():
            plain: Any = torch.compile(double, backend="eager")

            @torch.compile(backend="eager", dynamic=True)
            def called(x: torch.Tensor) -> torch.Tensor:
                """Say something."""
                return plain(x) + 1

        assert not compiling.called and (plain.__name__, called.__doc__) == ("double", "Say something.")
        for _ in range(2):
            assert called(torch.ones(3)).tolist() == [3.0] * 3
        assert [call.kwargs for call in compiling.call_args_list] == [{"backend": "eager", "dynamic": True}]
        assert plain(torch.ones(1)).tolist() == [2.0] and compiling.call_count == 2


def test_a_function_within_another_is_part_of_its_graph() -> None:
    with compiled_at_first_call():
        inner: Any = torch.compile(double)
    assert torch.compile is lazy_compile._compile
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager", fullgraph=True)
    assert outer(torch.ones(2)).tolist() == [3.0, 3.0]
