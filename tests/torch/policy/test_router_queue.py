"""Which experts a router is given where a layer is computed again in the backward pass.

It costs nothing. Catches a router that takes those of the newest micro-batch: with pipeline stages, several of them are
under way, and the oldest is computed again first. A run shows that only as a loss that is a little off. Also one that
reads a number from the GPU, for which every layer with experts would wait; and choices that stay on the GPU for all
micro-batches of a pass, or take far more page-locked memory than they have bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gspo_hpc.data.packing import Sample
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.ops.batch import PackedBatch, build
from gspo_hpc.ops.host_memory import HostMemory
from gspo_hpc.policy import router_replay
from gspo_hpc.policy.router_replay import RouterInput, RouterReplay, Routing

LAYERS, TOP_K = 3, 2  # of a model; the layer in the middle has no experts


def own(scores: torch.Tensor, topk: int, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = scores.topk(topk, 1)
    return found.values, found.indices


def chosen(replay: RouterReplay) -> list[list[int]]:
    return replay.get_replay_topk(torch.randn(2, 4), 1, None, None, own)[1].tolist()


def test_a_layer_that_is_computed_again_gets_the_experts_of_its_own_micro_batch() -> None:
    replay = RouterReplay(4, torch.device("cpu"))
    replay.begin(training=True, recording=False)
    given = [[[number], [3 - number]] for number in range(3)]
    with torch.no_grad():  # the forward passes of three micro-batches
        for experts in given:
            replay.next_input = RouterInput(2, torch.tensor(experts))
            assert chosen(replay) == experts
    assert replay.counts.sum() == 0
    assert [chosen(replay) for _ in given] == given
    assert replay.counts.tolist()[:-1] == [1, 2, 2, 1, 6], "each micro-batch counts once"
    replay.begin(training=True, recording=False)
    assert replay.counts.sum() == 0 and replay.next_input == RouterInput(0, None)


def test_nothing_that_a_pass_has_left_is_taken_in_the_next() -> None:
    replay = RouterReplay(4, torch.device("cpu"))
    replay.begin(training=True, recording=False)
    replay.next_input = RouterInput(2, torch.tensor([[0], [0]]))
    with torch.no_grad():
        chosen(replay)  # and the pass is left
    replay.begin(training=True, recording=False)
    replay.next_input = RouterInput(2, torch.tensor([[1], [1]]))
    assert chosen(replay) == [[1], [1]]


def test_no_number_is_read_from_the_gpu() -> None:
    """A tensor without values has none to read, nor a size that depends on one, such as that of torch.bincount."""
    with FakeTensorMode():
        replay = RouterReplay(4, torch.device("cpu"))
        replay.begin(training=True, recording=True)
        replay.next_input = RouterInput(2, torch.zeros(2, 1, dtype=torch.int64))
        values, experts = replay.get_replay_topk(torch.empty(2, 4), 1, None, None, own)
        assert values.shape == experts.shape == (2, 1)


def batch(length: int, *, given: bool) -> PackedBatch:
    """A micro-batch of one completion; the experts of a token follow from its number and the layer."""
    experts = (np.arange((2 + length - 1) * LAYERS * TOP_K) % 4).reshape(-1, LAYERS, TOP_K).astype(np.uint8)
    prompt, own_ones = (experts[:2], experts[2:]) if given else (None, None)
    tokens = np.arange(length, dtype=np.int32)
    one = Completion(tokens, np.zeros(length, np.float32), "", "stop", 0, experts=own_ones)
    groups = {0: Group(0, Prompt(0, np.array([1, 2], np.int32), "", {}), (one,), prompt_experts=prompt)}
    return build(groups, [Sample(0, 0, 2, length)], share_prompts=False)


def test_experts_of_a_micro_batch_stay_in_host_memory_until_it_goes_forward() -> None:
    there = batch(5, given=True).to("meta")  # a device without memory
    assert there.experts is not None and there.tokens.is_meta and there.experts.device.type == "cpu"
    chunk: Any = object()
    replays = [RouterReplay(4, torch.device("cpu")) for _ in range(2)]
    routing = Routing([(chunk, layer, replay) for layer, replay in zip((0, 2), replays, strict=True)], LAYERS, TOP_K)
    here = batch(5, given=True)
    assert here.experts is not None
    routing.begin(training=False, recording=False)
    routing.set_next(chunk, here, (0, 1), (0, 1))
    for layer, replay in zip((0, 2), replays, strict=True):
        given = replay.next_input.given
        assert given is not None and given.dtype == torch.int16 and torch.equal(given, here.experts[:, layer])


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(size=lambda: 1)
    names = ("get_context_parallel_group", "get_pipeline_model_parallel_group")
    monkeypatch.setattr(router_replay, "parallel_state", SimpleNamespace(**{name: lambda: alone for name in names}))


@pytest.mark.usefixtures("one_rank")
def test_recorded_experts_leave_with_their_micro_batch_two_bytes_each() -> None:
    chunk: Any = object()
    replays = [RouterReplay(4, torch.device("cpu")) for _ in range(2)]
    routing = Routing([(chunk, layer, replay) for layer, replay in zip((0, 2), replays, strict=True)], LAYERS, TOP_K)
    batches, expected = [batch(length, given=False) for length in (5, 9)], []
    routing.begin(training=False, recording=True)
    for one in batches:
        routing.set_next(chunk, one, (0, 1), (0, 1))
        whole = torch.zeros(one.tokens.numel(), LAYERS, TOP_K, dtype=torch.int16)
        for layer, replay in zip((0, 2), replays, strict=True):
            whole[:, layer] = replay.get_replay_topk(torch.randn(len(whole), 4), TOP_K, None, None, own)[1].short()
        routing.finish_forward(chunk)
        assert all(replay.recorded is None for replay in replays), "it stays on the GPU until the next micro-batch"
        expected.append(whole)
    kept = [part for parts in routing._recorded.values() for part in parts]
    tokens = sum(one.tokens.numel() for one in batches)
    assert sum(part.nbytes for part in kept) == 2 * tokens * len(replays) * TOP_K
    found = routing.recorded(batches, (0, 1), (0, 1))
    assert all(map(torch.equal, found, expected)) and not routing._recorded


@pytest.mark.usefixtures("one_rank")
def test_recorded_experts_lock_little_more_than_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` counts two bytes for each, and a rank notes some hundred MiB: a block of 256 MiB may be twice that."""
    empty, locked = HostMemory.empty, dict[int, int]()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.update({address: size}) or 0,
        cudaHostUnregister=locked.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(HostMemory, "empty", lambda self, *given, **options: empty(self, *given, locked=True))
    chunk: Any = object()
    replay = RouterReplay(4, torch.device("cpu"))
    routing = Routing([(chunk, 0, replay)], LAYERS, TOP_K)
    one = batch(200_000, given=False)
    routing.begin(training=False, recording=True)
    for _ in range(24):
        routing.set_next(chunk, one, (0, 1), (0, 1))
        replay.recorded = torch.zeros(one.tokens.numel(), TOP_K, dtype=torch.int64)
        routing.finish_forward(chunk)
    noted = sum(part.nbytes for parts in routing._recorded.values() for part in parts)
    assert 16 << 20 < noted <= sum(locked.values()) <= noted + (16 << 20)
    routing.begin(training=False, recording=False)
    assert not locked, "what a pass has noted stays locked after it"
