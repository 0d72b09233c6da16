"""The buffer that weights travel in, and the check of what travels; no engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gspo_hpc.engine.transfer import SharedMemory, checked, checkpoint_shapes

Stream = list[tuple[str, torch.Tensor]]


def read_back(path: str, size: int, info: dict[str, list]) -> dict[str, torch.Tensor]:
    """What another process would see, through a mapping of its own."""
    descriptor = os.open(path, os.O_RDWR)
    view = mmap.mmap(descriptor, size)
    os.close(descriptor)
    found = {}
    for name, dtype, shape, offset in zip(*(info[k] for k in ("names", "dtypes", "shapes", "offsets")), strict=True):
        assert offset % 64 == 0
        count = torch.Size(shape).numel()
        flat = torch.frombuffer(view, dtype=getattr(torch, dtype), count=count, offset=offset)
        found[name] = flat.view(shape).clone()
    return found


def test_a_bucket_stays_readable_while_the_next_one_is_packed() -> None:
    staging = SharedMemory(largest=1000, bucket_bytes=512)
    try:
        where = staging.init_info()
        first = {"a": torch.randn(7, 9), "b": torch.arange(5, dtype=torch.bfloat16), "c": torch.tensor(2.5)}
        for name, tensor in first.items():
            assert staging.fits(tensor)
            staging.put(name, tensor)
        assert not staging.fits(torch.zeros(100))
        one = staging.take()
        second = {"d": torch.randn(25, 10).t()}  # more than a bucket, and not contiguous
        assert staging.fits(second["d"])
        staging.put("d", second["d"])
        two = staging.take()
        for expected, info in ((first, one), (second, two)):
            found = read_back(where["path"], where["size"], info)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    finally:
        staging.close()


@pytest.mark.parametrize(("largest", "kept"), [(1 << 20, True), (1 << 29, False)])
def test_the_buffer_has_no_name_takes_little_room_at_rest_and_closes(largest: int, kept: bool) -> None:
    before = set(os.listdir("/dev/shm"))
    staging = SharedMemory(largest=largest, bucket_bytes=1 << 16)
    path = staging.init_info()["path"]
    assert os.stat(path).st_blocks == 0
    staging.put("a", torch.ones(1 << 18))
    assert os.stat(path).st_blocks > 0
    staging.take()
    staging.rest()
    assert (os.stat(path).st_blocks > 0) == kept
    assert set(os.listdir("/dev/shm")) == before
    staging.put("b", torch.ones(3))  # good for another round
    info = staging.take()
    assert torch.equal(read_back(path, staging.init_info()["size"], info)["b"], torch.ones(3))
    staging.close()
    assert not os.path.exists(path)


SHAPES = {"model.a": (2, 3), "model.b": (4,), "model.c": (1,)}
GOOD: Stream = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [*s, ("model.x", torch.zeros(1))], "no weight 'model.x'"),
        (lambda s: s[:1], "not sent: model.b, model.c"),
        (lambda s: [*s, s[0]], "'model.a' was sent twice"),
        (lambda s: [("model.a", torch.zeros(3, 2)), *s[1:]], r"shape \[3, 2\], but the model needs \[2, 3\]"),
        (lambda s: [*s, ("lm_head.weight", torch.zeros(2, 3))], "no weight 'lm_head.weight'"),
    ],
)
def test_a_stream_that_is_not_the_models_is_refused(change: Callable[[Stream], Stream], message: str) -> None:
    assert len(list(checked(GOOD, SHAPES, tied=False))) == 3
    with pytest.raises(ValueError, match=message):
        list(checked(change(GOOD), SHAPES, tied=False))


def test_a_tied_head_may_be_sent_or_not() -> None:
    head = [("lm_head.weight", torch.zeros(2, 3))]
    assert len(list(checked(GOOD + head, SHAPES, tied=True))) == 4
    assert len(list(checked(GOOD, SHAPES | {"lm_head.weight": (2, 3)}, tied=True))) == 3
    with pytest.raises(ValueError, match="not sent: lm_head.weight"):
        list(checked(GOOD, SHAPES | {"lm_head.weight": (2, 3)}, tied=False))


def test_shapes_come_from_the_files_alone(model_path: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert checkpoint_shapes(model_path) == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with pytest.raises(ValueError, match="no \\*.safetensors files"):
        checkpoint_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        checkpoint_shapes(tmp_path)
