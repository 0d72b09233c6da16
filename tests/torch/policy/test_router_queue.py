"""Which experts a router is given where a layer is computed again in the backward pass.

It costs nothing. Catches a router that takes those of the newest micro-batch: with pipeline stages, several of them are
under way, and the oldest is computed again first. A run shows that only as a loss that is a little off.
"""

from __future__ import annotations

from typing import Any

import torch

from gspo_hpc.policy.router_replay import RouterInput, RouterReplay


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
