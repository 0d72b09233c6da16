"""The sync of all engines before a rollout, with a stand-in for what it sends. Takes seconds.

Catches a stop that has to wait until engines that died in the sync are started and filled again.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.config.loader import from_dict
from gspo_hpc.engine.engine import EngineDied
from gspo_hpc.policy.passes import Abandoned
from gspo_hpc.training import sync
from gspo_hpc.training.agreement.gap import Gap
from gspo_hpc.training.sync import EngineWeights, Synced


@pytest.mark.parametrize("stopped_rank", [True, False], ids=["here", "elsewhere"])
def test_a_stop_ends_a_sync_in_which_an_engine_died(stopped_rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[Any] = []
    stops = [False]

    def run(*arguments: Any) -> tuple[Synced, EngineDied | None]:
        syncs.append(arguments)
        stops[0] = True  # with the signal that ended the engine
        return Synced("weights", Gap()), EngineDied("terminated") if len(syncs) == 1 else None

    def any_rank(flag: bool, device: torch.device) -> bool:
        return flag or (not stopped_rank and stops[0])

    monkeypatch.setattr(sync, "any_rank", any_rank)
    monitor = SimpleNamespace(stop_requested=lambda: stopped_rank and stops[0])
    clock: Any = SimpleNamespace(monitor=monitor, phase=lambda name: contextlib.nullcontext())
    ranks = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    policy: Any = SimpleNamespace(config=from_dict({}), ranks=ranks)
    weight_sync: Any = SimpleNamespace(policy=policy, run=run)
    recovery = SimpleNamespace(restart=lambda death: False)
    worker: Any = SimpleNamespace(engine=object(), recovery=recovery)
    with pytest.raises(Abandoned):
        EngineWeights(weight_sync, worker, clock).sync()
    assert len(syncs) == 1
