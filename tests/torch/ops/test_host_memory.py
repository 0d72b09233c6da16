"""Page-locked host memory, with a counterpart of the CUDA runtime that only notes what is locked. Milliseconds.

It would catch memory that overlaps, is locked twice or never unlocked, blocks that grow beyond what is asked for, a
copy from a GPU that is still under way when its sources change, and one that the loop waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
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


def test_a_step_waits_for_a_piece_that_the_thread_of_the_save_still_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is left for it to take, but the last one is not done."""
    begun, may_end, copy_piece = threading.Event(), threading.Event(), ctypes.memmove

    def slowly(*piece: int) -> None:
        begun.set()
        assert may_end.wait(60)
        copy_piece(*piece)

    monkeypatch.setattr(ctypes, "memmove", slowly)
    copying = HostCopy([(torch.zeros(4), torch.ones(4))])
    saving, stepping = threading.Thread(target=copying.finish), threading.Thread(target=copying.before_change)
    saving.start()
    assert begun.wait(60)
    stepping.start()
    stepping.join(0.2)
    waits = stepping.is_alive()
    may_end.set()
    for thread in (saving, stepping):
        thread.join()
    assert waits


class OnGpu:
    """A tensor of a GPU."""

    dtype, device, is_cuda = torch.float32, torch.device("cuda", 0), True

    def detach(self) -> OnGpu:
        return self


class Streams:
    """A counterpart of a GPU's streams, which do nothing before somebody waits for them: a loop that waits is seen."""

    class Stream:
        def __init__(self) -> None:
            self.work: list[Callable[[], object]] = []

        def run(self) -> None:
            while self.work:
                self.work.pop(0)()

        synchronize = run

        def wait_stream(self, other: Streams.Stream) -> None:
            self.wait_event(other.record_event())

        def wait_event(self, event: Any) -> None:
            self.work.append(event.synchronize)

        def record_event(self) -> Any:
            done: list[bool] = []
            self.work.append(lambda: done.append(True))

            def synchronize() -> None:
                while not done:
                    self.work.pop(0)()

            return SimpleNamespace(synchronize=synchronize)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.present = self.of_the_loop = Streams.Stream()
        monkeypatch.setattr(torch.cuda, "Stream", Streams.Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.present)
        monkeypatch.setattr(torch.cuda, "stream", self._within)

    @contextlib.contextmanager
    def _within(self, stream: Streams.Stream) -> Iterator[None]:
        before, self.present = self.present, stream
        yield
        self.present = before

    def pair(self, found: torch.Tensor, source: torch.Tensor) -> tuple[Any, Any]:
        """A tensor in host memory, and one of a GPU to be copied into it."""

        def copy(given: Any, *, non_blocking: bool) -> None:
            assert isinstance(given, OnGpu) and non_blocking
            self.present.work.append(lambda: found.copy_(source))

        return SimpleNamespace(dtype=found.dtype, device=found.device, copy_=copy), OnGpu()


def test_the_step_comes_after_the_copy_from_a_gpu_and_the_loop_waits_for_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a copy that the loop waits for, and a step that overtakes it."""
    streams, source, found = Streams(monkeypatch), torch.zeros(4), torch.zeros(4)
    streams.of_the_loop.work.append(lambda: source.fill_(1.0))  # by the step before
    copying = HostCopy([streams.pair(found, source)])
    copying.before_change()
    streams.of_the_loop.work.append(lambda: source.fill_(2.0))
    assert source.sum() == found.sum() == 0, "the loop has waited for the GPU"
    streams.of_the_loop.run()
    assert source.tolist() == [2.0] * 4 and found.tolist() == [1.0] * 4
    copying.finish()


def test_who_reads_the_copy_from_a_gpu_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the step before, which has made it. What the loop does meanwhile, a forward pass, is not waited for."""
    streams, source, found = Streams(monkeypatch), torch.zeros(4), torch.zeros(4)
    streams.of_the_loop.work.append(lambda: source.fill_(1.0))
    on_host, copied = torch.full((4,), 3.0), torch.zeros(4)  # a reference's weights, for one
    copying = HostCopy([streams.pair(found, source), (copied, on_host)])
    passes: list[str] = []
    streams.of_the_loop.work.append(lambda: passes.append("forward"))
    assert found.sum() == copied.sum() == 0
    copying.finish()
    assert found.tolist() == [1.0] * 4 and copied.tolist() == [3.0] * 4 and passes == []


def test_sources_are_kept_until_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop drops what was made for the copy alone; its memory would be used again, in another stream."""
    streams = Streams(monkeypatch)
    pair = streams.pair(torch.zeros(4), torch.ones(4))
    source = weakref.ref(pair[1])
    copying = HostCopy([pair])
    del pair
    copying.before_change()
    gc.collect()
    assert source() is not None
    streams.of_the_loop.run()
    copying.finish()
    gc.collect()
    assert source() is None
