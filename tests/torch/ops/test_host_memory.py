"""Page-locked host memory, with a counterpart of the CUDA runtime that only notes what is locked. Milliseconds.

It would catch memory that overlaps, is locked twice or never unlocked, blocks that grow beyond what is asked for, and a
copy from a GPU that is still under way when its sources may change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.ops import host_memory
from gspo_hpc.ops.host_memory import HostCopy, HostMemory

SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3)
DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])


class Runtime:
    """A counterpart of the CUDA runtime: locked memory, by address."""

    def __init__(self, code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.code = code

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
        assert address % 4096 == 0 and address not in self.locked and flags == 0
        if self.code == 0:
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 8192)
    return made


@given(wanted=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=20))
def test_tensors_do_not_overlap_and_lie_in_locked_memory(wanted: list[tuple[list[int], torch.dtype]]) -> None:
    made = Runtime()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
        monkeypatch.setattr(host_memory, "BLOCK_BYTES", 8192)
        memory = HostMemory()
        found = [memory.empty(shape, dtype, locked=True) for shape, dtype in wanted]
        for number, (tensor, (shape, _)) in enumerate(zip(found, wanted, strict=True)):
            assert list(tensor.shape) == shape
            tensor.fill_(number)
            if tensor.numel():
                begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                assert any(first <= begin and end <= first + size for first, size in made.locked.items())
                assert begin % tensor.dtype.itemsize == 0
        assert all((tensor == number).all() for number, tensor in enumerate(found))
        asked = sum(tensor.nbytes + 256 for tensor in found)
        largest = max(tensor.nbytes for tensor in found)
        assert memory.bytes_locked == sum(made.locked.values()) <= 2 * asked + largest + 2 * 8192
        del memory, found
        assert not made.locked


def test_a_large_tensor_takes_what_it_needs_and_not_a_power_of_two(runtime: Runtime) -> None:
    memory = HostMemory()
    memory.empty([5 * 8192 + 1], torch.uint8, locked=True)
    assert list(runtime.locked.values()) == [5 * 8192 + 4096]


def test_memory_that_is_not_locked_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace())
    assert HostMemory().empty([3, 4], torch.float32, locked=False).shape == (3, 4)


def test_memory_that_cannot_be_locked_is_told(runtime: Runtime) -> None:
    runtime.code = 2
    with pytest.raises(RuntimeError, match=r"did not lock .* GiB of host memory \(error 2\); ulimit -l"):
        HostMemory().empty([10], torch.uint8, locked=True)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_copy_is_whole_for_every_thread_that_has_waited_for_it(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what torch alone can copy: other dtypes, and views with gaps."""
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 24)
    sources = [torch.randn(n) for n in (0, 1, 6, 7, 1000)]
    sources += [torch.randn(8, 6).t(), torch.randn(5, dtype=torch.float64), torch.tensor(3.0)]
    targets = [torch.empty(one.shape) for one in sources]
    copy = HostCopy(list(zip(targets, sources, strict=True)))
    seen: list[bool] = []

    def wait() -> None:
        copy.finish()
        seen.append(all(torch.equal(a, b.float()) for a, b in zip(targets, sources, strict=True)))

    others = [threading.Thread(target=wait) for _ in range(threads)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    wait()
    assert seen == [True] * (threads + 1)


def test_nothing_is_copied_within_host_memory_before_somebody_waits() -> None:
    """Or the loop would do so itself, and training would stand still meanwhile."""
    source, target = torch.ones(4), torch.zeros(4)
    copy = HostCopy([(target, source)])
    assert target.sum() == 0
    copy.finish()
    assert target.sum() == 4


def test_ranks_exchange_once_before_anybody_goes_on() -> None:
    """The loop and the thread of the save both come; what a rank sends must not change before it is sent."""
    begun, may_end, done = threading.Event(), threading.Event(), list[str]()

    def exchange() -> None:
        begun.set()
        assert may_end.wait(60)
        done.append("exchanged")

    copy = HostCopy([(torch.zeros(4), torch.ones(4))], exchange)
    saving = threading.Thread(target=copy.exchange)
    stepping = threading.Thread(target=lambda: (copy.finish(), done.append("stepped")))
    saving.start()
    assert begun.wait(60)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive() and done == []
    may_end.set()
    for thread in (saving, stepping):
        thread.join()
    copy.finish()
    assert done == ["exchanged", "stepped"]


def test_an_exchange_that_failed_fails_for_all() -> None:
    """A thread that wrote the copy all the same would save pieces that never came."""
    tried: list[int] = []

    def exchange() -> None:
        tried.append(1)
        raise RuntimeError("connection closed by peer")

    copy = HostCopy((), exchange)
    for work in (copy.finish, copy.exchange, copy.finish):
        with pytest.raises(RuntimeError, match="closed by peer"):
            work()
    assert len(tried) == 1


def test_what_comes_from_a_gpu_has_been_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is behind: it copies when somebody waits for it. Afterwards the source is another tensor's memory."""
    queue: list[Callable[[], object]] = []
    source = torch.arange(4.0)
    on_gpu: Any = SimpleNamespace(dtype=source.dtype, device=torch.device("cuda", 0), is_cuda=True)
    on_gpu.detach = lambda: on_gpu
    found = torch.zeros(4)

    def copy(given: Any, *, non_blocking: bool) -> None:
        assert given is on_gpu and non_blocking
        queue.append(lambda: found.copy_(source))

    target: Any = SimpleNamespace(dtype=found.dtype, device=found.device, copy_=copy)
    stream = SimpleNamespace(synchronize=lambda: [queue.pop()() for _ in list(queue)])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    copying = HostCopy([(target, on_gpu)])
    source.fill_(-1.0)
    copying.finish()
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0]
