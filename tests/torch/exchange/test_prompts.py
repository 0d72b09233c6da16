"""Prompts in the job's store, in pieces. Takes milliseconds; catches a prompt that is cut at the edge of a piece.

tests/torch/rollout/test_generation.py has several ranks, a late rank 0, and engines that die.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from gspo_hpc.data.records import Prompt
from gspo_hpc.exchange import prompts
from gspo_hpc.exchange.prompts import PIECE_BYTES, SharedPrompts


def sized(index: int, text_bytes: int) -> Prompt:
    return Prompt(index, np.arange(3, dtype=np.int32), "x" * text_bytes, {"answer": 5})


def edge() -> int:
    """The length of a text with which a prompt fills its first piece exactly."""
    return PIECE_BYTES - sum(map(len, prompts._pieces(sized(0, 0))))


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("beyond", [-8, 0, 8, 104, prompts._HEADER_BYTES])
def test_a_prompt_comes_whole_whatever_its_length(pieces: int, beyond: int) -> None:
    """At the edge of a piece, and where only the header makes it one piece more. Arrays are padded to 8 bytes."""
    prompt = sized(7, edge() + (pieces - 1) * PIECE_BYTES + beyond)
    made = prompts._pieces(prompt)
    assert len(made) == pieces + (beyond > 0) == prompts._count(made[0])
    store = dist.HashStore()
    stored = SharedPrompts(store, "call")
    stored.publish({4: prompt, 5: sized(8, 10)})
    found = stored.fetch([5, 4])
    assert [one.index for one in found] == [8, 7]
    assert found[1].text == prompt.text and found[1].fields == prompt.fields
    assert found[1].tokens.tolist() == prompt.tokens.tolist()
    assert store.num_keys() == 0, "nothing is left of what was fetched"
