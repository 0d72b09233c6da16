"""The acceptance of kernels: it passes here, and finds kernels that are wrong (2 s)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gspo_hpc.ops import attention
from tools.acceptance.environment import Environment
from tools.acceptance.parts import kernels
from tools.acceptance.rows import FAIL, NOT_APPLICABLE, PASS, Recorder, Row, read

Attend = Callable[..., Tensor]


def rows(tmp_path: Path) -> list[Row]:
    kernels.run(Environment("cpu", tmp_path), Recorder(tmp_path / "rows", "cpu"))
    return read(tmp_path / "rows")


def failed(found: list[Row]) -> set[str]:
    """Return what failed, without the numbers of a kernel."""
    return {
        row.what.split(", ")[-1] if "attention" not in row.what else "attention" for row in found if row.verdict == FAIL
    }


def test_kernels_of_this_machine_pass(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert not failed(found) and sum(row.verdict == PASS for row in found) > 20
    assert [row.what for row in found if row.verdict == NOT_APPLICABLE] == ["attention, torch.nn.attention.varlen"]


def _louder(attend: Attend) -> Attend:
    return lambda q, k, v, segments, scale: attend(q, k, v, segments, 1.05 * scale)


def _leaking(attend: Attend) -> Attend:
    def wrong(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float) -> Tensor:
        out = attend(q, k, v, segments, scale)
        return torch.cat((out[:-1], out[-1:] + 1e-30 * v.sum()))

    return wrong


def _detached(attend: Attend) -> Attend:
    return lambda q, k, v, segments, scale: attend(q, 0.9 * k + 0.1 * k.detach(), v, segments, scale)


@pytest.mark.parametrize("planted", [_louder, _leaking, _detached])
def test_wrong_attention_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Callable[[Attend], Attend]
) -> None:
    monkeypatch.setattr(attention, "attend", planted(attention.attend))
    assert failed(rows(tmp_path)) == {"attention"}


def test_wrong_log_probs_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.token_logprobs

    def rounded(hidden: Tensor, weight: Tensor, targets: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
        values, entropy = right(hidden, weight, targets, **options)  # type: ignore[arg-type]
        return values + (values.bfloat16().float() - values).detach(), entropy

    monkeypatch.setattr(kernels, "token_logprobs", rounded)
    found = [row.what for row in rows(tmp_path) if row.verdict == FAIL]
    assert len(found) == 2 and all(what.endswith(": largest error") for what in found)
