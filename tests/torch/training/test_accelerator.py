"""Ranges for Nsight Systems. Takes milliseconds; catches a phase without a range, and one that is left open."""

from __future__ import annotations

import time

import pytest
import torch

from gspo_hpc.training.telemetry.accelerator import Accelerator
from gspo_hpc.training.telemetry.collectives import CollectiveTime
from gspo_hpc.training.telemetry.meter import Meter


def test_a_phase_is_a_range_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own context manager calls the two functions of NVTX; here they only note what they are told."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: told.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    accelerator = Accelerator(torch.device("cpu"))
    accelerator._device = torch.device("cuda", 0)
    with accelerator.named_range("gspo_hpc:sync"):
        told.append("work")
    with pytest.raises(KeyError), accelerator.named_range("gspo_hpc:update"):
        raise KeyError
    assert told == ["gspo_hpc:sync", "work", "pop", "gspo_hpc:update", "pop"]


def test_the_meter_names_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(torch.device("cpu"))
    names: list[str] = []
    plain = accelerator.named_range

    def noted(name: str) -> object:
        names.append(name)
        return plain(name)

    monkeypatch.setattr(accelerator, "named_range", noted)
    meter = Meter(CollectiveTime("cpu"), accelerator, torch.device("cpu"))
    meter.begin(watch_memory=False)
    with meter.phase("generate"):
        time.sleep(0.001)
    assert names == ["gspo_hpc:generate"] and meter.seconds["generate"] > 0
