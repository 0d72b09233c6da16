"""The bare process that reads weights in the acceptance on a GPU: it finds what was sent, bucket by bucket (1 s)."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import torch

from gspo_hpc.engine.transfer import WeightSender
from gspo_hpc.ops.weight_parts import stream_of
from tools.acceptance.parts import ipc

TENSORS = {
    "odd": torch.arange(21).view(7, 3).to(torch.bfloat16),
    "wide": torch.randn(40, 50),
    "scalar": torch.randn(1),
}


def read(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return what the reader's process would find, run as a thread."""
    ours, theirs = Pipe()
    child = threading.Thread(target=ipc.receive, args=(theirs, "cpu"))
    child.start()
    sender = WeightSender("cpu", 1, 1 << 10)  # so that one of the tensors is larger than a bucket
    reader = ipc.Reader(ours)
    sender.send(stream_of(tensors.items()), reader)
    ours.send(None)
    child.join(30)
    sender.close()
    assert not child.is_alive()
    return reader.found


def test_all_tensors_arrive_bit_for_bit() -> None:
    assert read(TENSORS) == {name: int(torch.hash_tensor(tensor).item()) for name, tensor in TENSORS.items()}


def test_other_bits_are_told_apart() -> None:
    other = {name: tensor.clone() for name, tensor in TENSORS.items()}
    other["wide"].view(torch.int32)[3, 7] ^= 1
    one, two = read(TENSORS), read(other)
    assert {name for name in one if one[name] != two[name]} == {"wide"}
