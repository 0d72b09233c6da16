"""What is taken from the output of an engine that ended: lines as vLLM wrote them."""

from __future__ import annotations

import pytest

from gspo_hpc.engine.outputs import one_line, root_cause

CORE = """\
(EngineCore pid=13897) INFO 11-22 18:13:28 [utils.py:347] Using LBHNC KV cache layout.
(EngineCore pid=13897) ERROR 11-22 18:13:28 [core.py:1510] EngineCore failed to start.
(EngineCore pid=13897) ERROR 11-22 18:13:28 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=13897) ERROR 11-22 18:13:28 [core.py:1510]     raise ValueError(
(EngineCore pid=13897) ERROR 11-22 18:13:28 [core.py:1510] ValueError: No available memory for the cache blocks.
Process EngineCore:
Traceback (most recent call last):
ValueError: No available memory for the cache blocks.
(MainProcess pid=7) ERROR 11-22 18:13:29 [x.py:1] RuntimeError: something of the caller
"""
WORKER = """\
(EngineCore pid=5) (Worker_TP1 pid=9) ERROR 11-22 18:13:28 [multiproc.py:1] torch.OutOfMemoryError: CUDA out of memory.
(EngineCore pid=5) ERROR 11-22 18:13:28 [core.py:1510] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (CORE, "ValueError: No available memory for the cache blocks."),
        (WORKER, "torch.OutOfMemoryError: CUDA out of memory."),
        ("(EngineCore pid=5) INFO 11-22 18:13:28 [core.py:1] ValueError: of no weight\n", None),
        ("", None),
    ],
)
def test_the_error_that_ended_an_engine(log: str, cause: str | None) -> None:
    assert root_cause(log) == cause


def test_an_error_on_one_line() -> None:
    pydantic = "1 validation error for VllmConfig\n  Value error, heads (3) do not divide. [type=value_error, input=..]"
    assert one_line(pydantic) == "1 validation error for VllmConfig Value error, heads (3) do not divide."
    assert len(one_line("x" * 1000)) == 300 and one_line("\n \n") == ""
