"""When a pass is left: before it begins where communication overlaps with it, else between two micro-batches.

It costs nothing. Catches a stop that waits for a whole pass although nothing overlaps, one in the middle of a pass
where all ranks take part in collectives, ranks with one another's experts that do not decide together, a vote that
is read before it has come from the GPU, and one that is waited for at once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.config.loader import from_dict
from gspo_hpc.policy import passes
from gspo_hpc.policy.passes import Abandoned, Pass, PassMonitor

BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}


class Begun(Exception):
    """The pass has gone on to its micro-batches."""


@pytest.mark.parametrize(
    ("parallel", "deterministic", "forward_only", "error"),
    [
        ({}, False, False, Begun),
        (BOTH, False, False, Abandoned),
        ({"overlap_grad_reduce": True}, False, False, Abandoned),
        ({"overlap_grad_reduce": True}, False, True, Begun),  # no gradients travel: it is left in its middle
        (BOTH, False, True, Abandoned),
        (BOTH, True, False, Begun),  # nothing overlaps where ranks are added up in their order
    ],
)
def test_a_stop_of_any_rank_is_heeded_before_a_pass_with_which_communication_overlaps(
    parallel: dict[str, bool],
    deterministic: bool,
    forward_only: bool,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(*unused: Any, **options: Any) -> None:
        raise Begun

    monkeypatch.setattr(passes, "any_rank", lambda flag, device: True)  # another rank was told
    config = from_dict({"parallel": parallel, "run": {"deterministic": deterministic}})
    policy: Any = SimpleNamespace(
        config=config, has_adapters=False, ranks=SimpleNamespace(device=None), routing=SimpleNamespace(begin=begin)
    )
    monkeypatch.setattr(passes, "_forward_flops", lambda *a: 0)
    batch: Any = SimpleNamespace(keys=[()], tokens=SimpleNamespace(numel=lambda: 1))
    with pytest.raises(error):
        Pass(policy, "update", PassMonitor(lambda: False)).run(None, [batch], forward_only=forward_only)


def test_a_pass_with_which_communication_overlaps_is_not_left_in_its_middle() -> None:
    """A bucket whose last gradient never comes is never sent, and every rank waits for it."""
    policy: Any = SimpleNamespace(config=from_dict({}), ranks=SimpleNamespace(ep_size=1))
    begun = Pass(policy, "update", PassMonitor(lambda: True))
    begun._overlaps = True
    assert not begun._abandons() and not begun.abandoned


@pytest.mark.parametrize(("ep_size", "group"), [(1, "tensor and context"), (2, "tensor and data")])
def test_ranks_with_one_anothers_experts_decide_together(
    ep_size: int, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves alone would leave the others waiting in an exchange of tokens."""

    def of_data(with_context_parallel: bool) -> str:
        assert with_context_parallel
        return "tensor and data"

    monkeypatch.setattr(passes.parallel_state, "get_tensor_and_data_parallel_group", of_data)
    monkeypatch.setattr(passes.parallel_state, "get_tensor_and_context_parallel_group", lambda: "tensor and context")
    policy: Any = SimpleNamespace(config=from_dict({}), ranks=SimpleNamespace(ep_size=ep_size))
    assert Pass(policy, "update")._deciding() == group


def test_a_vote_is_read_once_it_has_come_from_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the passes: the host waits for its copy alone, and only when it needs the answer."""
    under_way: list[Callable[[], Any]] = []
    ready: list[Callable[[], Any]] = []  # what an event that is recorded waits for

    class Event:
        def record(self) -> None:
            ready.extend(under_way)

        def synchronize(self) -> None:
            for copy in ready:
                copy()

    class Pinned:
        value = 0

        def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking
            under_way.append(lambda: setattr(self, "value", int(source)))

        def item(self) -> int:
            return self.value

    def pinned(size: int, dtype: torch.dtype, pin_memory: bool) -> Pinned:
        assert size == 1 and pin_memory
        return Pinned()

    on_gpu = {
        "tensor": lambda values, dtype, device: torch.tensor(values, dtype=dtype),
        "empty": pinned,
        "cuda": SimpleNamespace(Event=Event),
    }
    monkeypatch.setattr(passes, "torch", SimpleNamespace(**vars(torch) | on_gpu))
    monkeypatch.setattr(passes.dist, "all_reduce", lambda value, op, group: value.fill_(1))  # another rank says so
    group: Any = None
    vote = passes._Vote(False, group, torch.device("cuda"))
    assert len(under_way) == 1 and vote.result()


def test_the_answer_to_one_vote_is_read_at_the_next_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read it at once would leave a GPU without work after every micro-batch."""
    events: list[str] = []

    class Vote:
        def __init__(self, answer: bool, group: Any, device: Any) -> None:
            self._number, self._answer = sum(event.startswith("vote") for event in events), answer
            events.append(f"vote {self._number}")

        def result(self) -> bool:
            events.append(f"answer {self._number}")
            return self._answer

    stops = iter([False, False, True, False])
    monkeypatch.setattr(passes, "_Vote", Vote)
    monkeypatch.setattr(Pass, "_deciding", lambda self: SimpleNamespace(size=lambda: 2))
    policy: Any = SimpleNamespace(config=from_dict({}), ranks=SimpleNamespace(ep_size=1, device=None))
    begun = Pass(policy, "update", PassMonitor(lambda: next(stops)))
    left = []
    for number in range(5):
        events.append(f"micro-batch {number}")
        left.append(begun._abandons())
    assert left == [False, False, False, True, True], "what is asked before one micro-batch counts from the next"
    assert events == [
        *("micro-batch 0", "vote 0"),
        *("micro-batch 1", "vote 1", "answer 0"),
        *("micro-batch 2", "vote 2", "answer 1"),
        *("micro-batch 3", "vote 3", "answer 2"),
        "micro-batch 4",
    ]
