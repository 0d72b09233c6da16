"""When a pass is left: before it begins where communication overlaps with it, else between two micro-batches.

It costs nothing. Catches a stop that waits for a whole pass although nothing overlaps, and one in the middle of a pass
whose collectives all ranks have to take part in.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.policy import passes
from gspo_hpc.policy.passes import Abandoned, Pass, PassMonitor

BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}


class Begun(Exception):
    """The pass has gone on to its micro-batches."""


@pytest.mark.parametrize(
    ("parallel", "deterministic", "error"),
    [
        ({}, False, Begun),
        (BOTH, False, Abandoned),
        ({"overlap_grad_reduce": True}, False, Abandoned),
        (BOTH, True, Begun),  # nothing overlaps where ranks are added up in their order
    ],
)
def test_a_stop_is_heeded_before_a_pass_with_which_communication_overlaps(
    parallel: dict[str, bool], deterministic: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*unused: Any, **options: Any) -> None:
        raise Begun

    monkeypatch.setattr(passes, "any_rank", lambda flag, device: flag)
    config = from_dict({"parallel": parallel, "run": {"deterministic": deterministic}})
    policy: Any = SimpleNamespace(
        config=config, ranks=SimpleNamespace(device=None), routing=SimpleNamespace(begin=begin)
    )
    monkeypatch.setattr(passes, "_forward_flops", lambda *a: 0)
    batch: Any = SimpleNamespace(keys=[()], tokens=SimpleNamespace(numel=lambda: 1))
    with pytest.raises(error):
        Pass(policy, "update", PassMonitor(lambda: True)).run(None, [batch], forward_only=False)
