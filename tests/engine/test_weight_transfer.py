"""The memory that weights travel in, the check of what travels, and who waits for whom; no engine."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from gspo_hpc.engine import compat, weight_buffers
from gspo_hpc.engine.transfer import StreamCheck, WeightSender, checkpoint_shapes
from gspo_hpc.engine.weight_buffers import CudaBuffer, HostBuffer
from gspo_hpc.ops.weight_parts import ALIGNMENT, Memory, Part, stream_of

Tensors = dict[str, torch.Tensor]
KIND = ".mlp.experts.{}.gate_proj.weight"


class Workers:
    """An engine that loads a bucket as late as it may: when its owner must know that it is loaded. Or `early`: when it
    is told of it."""

    def __init__(self, count: int, fails: str = "", *, early: bool = False) -> None:
        self.found: list[Tensors] = [{} for _ in range(count)]
        self.calls: list[str] = []
        self._fails, self._early, self._bucket = fails, early, {}
        self._mapped: dict[int, tuple[Any, torch.Tensor]] = {}

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails:
            raise RuntimeError(f"planted in {name}")

    def begin(self) -> None:
        self._called("begin")

    def check(self, part: Part) -> None:
        pass

    def post(self, bucket: dict[str, Any]) -> None:
        assert not self._bucket, "a bucket is posted before the last one is loaded"
        self._called("post")
        self._bucket = bucket
        if self._early:
            self._load()

    def wait_loaded(self) -> None:
        self._load()
        self._called("wait_loaded")

    def _load(self) -> None:
        bucket, self._bucket = self._bucket, {}
        for number, found in enumerate(self.found if bucket else ()):
            address = bucket["memory"][number if len(bucket["memory"]) > 1 else 0]
            if self._mapped.get(number, (None,))[0] != address:
                self._mapped[number] = address, weight_buffers.map_buffer(address)
            for part in bucket["parts"]:
                tensor = weight_buffers.view(self._mapped[number][1], part).clone()
                named = Part(part["name"], tensor.shape, tensor, tuple(part["experts"]))
                for name, one in named.tensors():
                    assert found.setdefault(name, one) is one
            if bucket["unmap"]:
                del self._mapped[number]

    def finish(self) -> None:
        self._called("finish")

    def kill(self) -> None:
        self._fails = ""
        self._called("kill")


@st.composite
def streams(draw: st.DrawFn) -> list[list[int]]:
    """Sizes of tensors, in elements, that are taken together."""
    return draw(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), min_size=1, max_size=8))


def random_stream(sizes: list[list[int]]) -> tuple[Tensors, Callable[[Memory], Iterator[Sequence[Part]]]]:
    """Return tensors, and a stream that puts those of each list into one place, every second one as strided rows."""
    tensors = {f"t{i}.{j}": torch.randn(2, n) for i, row in enumerate(sizes) for j, n in enumerate(row)}

    def stream(memory: Memory) -> Iterator[Sequence[Part]]:
        for i, row in enumerate(sizes):
            total = sum(2 * n for n in row)
            place = memory.allocate(4 * total)
            assert place.numel() == 4 * total and place.data_ptr() % ALIGNMENT == 0
            parts = []
            for j, piece in enumerate(place.view(torch.float32).split([2 * n for n in row])):
                tensor = tensors[f"t{i}.{j}"]
                view = piece.view(-1, 2).t() if j % 2 else piece.view(2, -1)
                parts.append(Part(f"t{i}.{j}", tuple(tensor.shape), view.copy_(tensor)))
            yield parts

    return tensors, stream


@given(streams(), st.integers(1, 40).map(lambda n: ALIGNMENT * n), st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_workers_see_every_tensor_whatever_fits_into_a_bucket(sizes: list[list[int]], half: int, count: int) -> None:
    """Also those that are larger than both halves, and with a second update in the same memory."""
    sender = WeightSender("cpu", count, half)
    try:
        for _ in range(2):
            tensors, stream = random_stream(sizes)
            workers = Workers(count)
            sender.send(stream, workers)
            for found in workers.found:
                assert found.keys() == tensors.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    finally:
        sender.close()


class Threads:
    """The ranks of one engine, as threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=10)
        self._payloads: list[bytes] = [b""] * size

    def of(self, place: int) -> Any:
        threads = self

        class Peers:
            def gather(self, payload: bytes) -> list[bytes]:
                threads._payloads[place] = payload
                threads._barrier.wait()
                found = list(threads._payloads)
                threads._barrier.wait()
                return found

            def wait(self) -> None:
                threads._barrier.wait()

        return Peers()


class Told(HostBuffer):
    """Memory that notes whether the worker is said to have unmapped it, each time that it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.unmapped: list[bool] = []

    def release_unused(self, *, unmapped: bool) -> None:
        self.unmapped.append(unmapped)
        super().release_unused(unmapped=unmapped)


@pytest.mark.parametrize("fails", ["", "begin", "post", "wait_loaded", "finish", "nobody"])
def test_every_rank_of_an_engine_fills_the_memory_of_its_own_worker(fails: str) -> None:
    """No rank overwrites what a worker still reads; all come to the end where the engine fails, or is dead before.

    All learn from the owner whether workers have unmapped the memory: who counts that for one that lives counts twice.
    """
    threads, workers = Threads(3), Workers(3, fails)
    sizes = [[5, 7], [300], [1], [40, 40], [2000], [3, 3], [60]]
    streams = [random_stream(sizes) for _ in range(3)]
    errors: list[Exception] = []
    ended: list[int] = []
    told = [Told() for _ in range(3)]

    def rank(place: int) -> None:
        sender = WeightSender("cpu", 3, 1024, threads.of(place))
        sender._buffer = told[place]
        try:
            sender.send(streams[place][1], workers if place == 0 and fails != "nobody" else None)
        except RuntimeError as error:
            errors.append(error)
        ended.append(place)
        sender.close()

    running = [threading.Thread(target=rank, args=(place,)) for place in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join(20)
    assert sorted(ended) == [0, 1, 2]
    assert told[0].unmapped == told[1].unmapped == told[2].unmapped
    assert told[0].unmapped[-1] == (fails in ("", "finish"))
    assert workers.calls.count("kill") == len(errors) and (not errors or workers.calls[-2:] == [fails, "kill"])
    assert [str(error) for error in errors] == ([f"planted in {fails}"] if fails not in ("", "nobody") else [])
    if not fails:
        for (tensors, _), found in zip(streams, workers.found, strict=True):
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


HALVES = [[100], [90], [110], [80], [120], [70]]  # each fills a half of 1,024 bytes, and none fits beside another


@pytest.mark.parametrize("early", [False, True])
def test_halves_take_turns_on_every_rank_of_an_engine(early: bool) -> None:
    """A half is filled again only when every worker has loaded it, and is announced only when every rank has filled it:
    here workers load late and the owner is the slowest rank, or they load at once and the owner is the fastest."""
    threads, workers = Threads(3), Workers(3, early=early)
    streams = [random_stream(HALVES) for _ in range(3)]

    def rank(place: int) -> None:
        def stream(memory: Memory) -> Iterator[Sequence[Part]]:
            def allocate(size: int) -> torch.Tensor:
                found = memory.allocate(size)
                time.sleep(0.02 * ((place == 0) != early))
                return found

            yield from streams[place][1](SimpleNamespace(allocate=allocate))

        sender = WeightSender("cpu", 3, 1024, threads.of(place))
        sender.send(stream, workers if place == 0 else None)
        sender.close()

    running = [threading.Thread(target=rank, args=(place,)) for place in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join(20)
    assert workers.calls.count("post") == len(HALVES)
    for (tensors, _), found in zip(streams, workers.found, strict=True):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_next_half_is_filled_while_the_last_is_loaded() -> None:
    """Catches a sender that waits for workers as soon as it has told them of a half: then nothing overlaps."""
    workers, (_, filled) = Workers(1), random_stream(HALVES)

    def stream(memory: Memory) -> Iterator[Sequence[Part]]:
        for parts in filled(memory):
            workers.calls.append("filled")
            yield parts

    sender = WeightSender("cpu", 1, 1024)
    sender.send(stream, workers)
    sender.close()
    turns = ["filled", "wait_loaded", "post"] * len(HALVES)
    assert workers.calls == ["begin", *turns, "wait_loaded", "finish"]


def test_the_file_has_no_name_takes_little_room_at_rest_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buffers, "_KEPT_BYTES", 1 << 20)
    before = set(os.listdir("/dev/shm"))
    for size, kept in ((1 << 20, True), (1 << 21, False)):
        made = HostBuffer()
        made.reserve(size).fill_(7)
        address = made.address()
        mapped = weight_buffers.map_buffer(address)
        assert int(mapped[5]) == 7
        made.release_unused(unmapped=True)
        assert (os.stat(address["path"]).st_blocks > 0) == kept
        made.reserve(size).fill_(9)  # good for another round
        assert int(mapped[5]) == 9
        assert set(os.listdir("/dev/shm")) == before
        made.close()
        assert not os.path.exists(address["path"])


def test_a_file_in_the_place_of_another_is_told_apart() -> None:
    """A worker keeps its mapping as long as the address stays the same."""
    one = HostBuffer()
    one.reserve(10)
    first = one.address()
    one.close()
    other = HostBuffer()
    other.reserve(10)
    assert other.address()["path"] == first["path"] and other.address() != first
    other.close()


@pytest.mark.parametrize(
    ("platform", "workers", "peers", "kind"),
    [
        ("cuda", 1, False, CudaBuffer),
        ("cuda", 2, True, CudaBuffer),
        ("cuda", 8, True, CudaBuffer),
        ("cuda", 2, False, HostBuffer),  # the only rank there fills the memory of several workers
        ("cpu", 1, False, HostBuffer),
        ("cpu", 2, True, HostBuffer),
    ],
)
def test_weights_stay_on_gpus_wherever_each_has_a_rank(platform: str, workers: int, peers: bool, kind: type) -> None:
    """A detour over host memory costs minutes of each rollout of a large model."""
    sender = WeightSender(platform, workers, 1 << 20, cast(Any, object()) if peers else None)
    assert type(sender._buffer) is kind


def test_exports_of_gpu_memory_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export is let go once: by the worker at the end of an update, or for a worker that died before."""
    released: list[tuple[bytes, int]] = []
    exports: list[int] = []
    waits: list[int] = []  # for what this rank still writes: how many exports there were

    def reduce(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        exports.append(tensor.numel())
        shared = (0, b"handle", tensor.numel(), 512, False, b"counter", len(exports), b"event", True)
        return None, (
            type(tensor),
            tensor.size(),
            tensor.stride(),
            0,
            torch.storage.TypedStorage,
            tensor.dtype,
            *shared,
        )

    empty = torch.empty
    monkeypatch.setattr(weight_buffers.torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", reduce)
    stream = SimpleNamespace(synchronize=lambda: waits.append(len(exports)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    let_go = classmethod(lambda cls, counter, offset, device: released.append((counter, offset)))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", let_go, raising=False)
    made = CudaBuffer()
    for ended, expected in ((True, []), (False, [(b"counter", 2)]), (True, [(b"counter", 2)])):
        assert made.reserve(4096).numel() == 4096 and made.reserve(100).numel() == 4096
        address = made.address()
        assert made.address() == address and address["size"] == 4096 and address["offset"] == 512
        made.release_unused(unmapped=ended)
        made.release_unused(unmapped=False)  # nothing is exported any more
        assert released == expected
    assert exports == [4096] * 3
    assert waits == [0, 1, 1, 2, 2, 3], "before each address is told, whether it is new or not"


@pytest.mark.parametrize(
    ("given", "meanwhile"),
    [
        ("", None),
        ("max_split_size_mb:64", None),
        ("expandable_segments:True", "expandable_segments:False"),
        (
            "roundup_power2_divisions:[256:1,512:2],expandable_segments: True,garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[256:1,512:2],garbage_collection_threshold:0.8,expandable_segments:False",
        ),
    ],
)
def test_exported_memory_is_ordinary_and_the_trainers_settings_stay(
    given: str, meanwhile: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch sets all of them in each call, so those that are not about segments must be said again."""
    said: list[str] = []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", said.append)
    with compat.ordinary_segments():
        assert said == ([meanwhile] if meanwhile else [])
    assert said == ([meanwhile, given] if meanwhile else [])


SHAPES = {"model.a": (2, 3), "model.b": (4,), "model.c": (1,)} | {f"x{KIND}".format(n): (2, 2) for n in range(3)}
GOOD = [Part(name, shape, torch.zeros(shape)) for name, shape in SHAPES.items() if "experts" not in name]
STACK = Part(f"x{KIND}", (3, 2, 2), torch.zeros(3, 2, 2), (0, 1, 2))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([*GOOD, STACK, Part("model.x", (1,), torch.zeros(1))], "no weight 'model.x'"),
        ([GOOD[0], STACK], "not sent: model.b, model.c"),
        ([*GOOD, STACK, GOOD[0]], "'model.a' was sent twice"),
        (
            [Part("model.a", (3, 2), torch.zeros(3, 2)), *GOOD[1:], STACK],
            r"shape \[3, 2\], but the model needs \[2, 3\]",
        ),
        ([*GOOD, STACK, Part("lm_head.weight", (2, 3), torch.zeros(2, 3))], "no weight 'lm_head.weight'"),
        ([*GOOD, Part(STACK.name, (2, 2, 2), torch.zeros(2, 2, 2), (0, 2))], r"not sent: x.mlp.experts.1.gate_proj"),
        (
            [*GOOD, Part(STACK.name, (4, 2, 2), torch.zeros(4, 2, 2), (0, 1, 2, 1))],
            r"experts.1.gate_proj.weight' was sent",
        ),
        (
            [*GOOD, Part(STACK.name, (3, 2, 1), torch.zeros(3, 2, 1), (0, 1, 2))],
            r"experts.0.gate_proj.weight' has shape",
        ),
    ],
)
def test_a_stream_that_is_not_the_models_is_refused(parts: list[Part], message: str) -> None:
    def check(parts: list[Part]) -> None:
        made = StreamCheck(SHAPES, tied=False)
        for part in parts:
            made.add(part)
        made.finish()

    check([*GOOD, STACK])
    with pytest.raises(ValueError, match=message):
        check(parts)


@pytest.mark.parametrize(
    ("shapes", "sent", "tied", "fine"),
    [
        ({}, True, True, True),
        ({"lm_head.weight": (2, 3)}, False, True, True),
        ({"lm_head.weight": (2, 3)}, False, False, False),
    ],
)
def test_a_tied_head_may_be_sent_or_not(shapes: dict[str, Any], sent: bool, tied: bool, fine: bool) -> None:
    made = StreamCheck(shapes, tied)
    if sent:
        made.add(Part("lm_head.weight", (2, 3), torch.zeros(2, 3)))
    if fine:
        made.finish()
    else:
        with pytest.raises(ValueError, match="not sent: lm_head.weight"):
            made.finish()


def test_tensors_of_any_stride_are_packed() -> None:
    tensors = {"a": torch.randn(7, 9).t(), "b": torch.arange(5, dtype=torch.bfloat16), "c": torch.tensor(2.5)}
    sender, workers = WeightSender("cpu", 1, 1 << 10), Workers(1)
    sender.send(stream_of(tensors.items()), workers)
    for name, tensor in tensors.items():
        found = workers.found[0][name]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    sender.close()


def test_shapes_come_from_the_files_alone(model_path: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert checkpoint_shapes(model_path) == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(ValueError, match="has no model.safetensors and no model.safetensors.index.json"):
        checkpoint_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="model.safetensors: this is not a safetensors file"):
        checkpoint_shapes(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 5}')
    with pytest.raises(ValueError, match="index.json is not readable"):
        checkpoint_shapes(tmp_path)


class Fresh(HostBuffer):
    """Memory that is another each time, as on a GPU: in the middle of an update there must be no two of it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []
        self.sizes: list[int] = []

    def reserve(self, size: int) -> torch.Tensor:
        assert all(one.expired() for one in self.storages), f"{self.sizes[-1]} bytes are kept beside {size}"
        made = torch.empty(size, dtype=torch.uint8)
        self.storages.append(StorageWeakRef(made.untyped_storage()))
        self.sizes.append(size)
        return made


@pytest.mark.parametrize(
    ("announced", "sizes"), [(True, [8000]), (False, [2048, 2400, 8000])], ids=["announced", "unknown"]
)
def test_memory_never_grows_beside_itself(announced: bool, sizes: list[int]) -> None:
    """It is as large as need be from the beginning; where that is not known, the smaller one is freed before."""
    tensors = {f"t{n}": torch.ones(count) for n, count in enumerate((16, 600, 200, 2000, 100))}
    sender = WeightSender("cpu", 1, 1024)
    sender._buffer = made = Fresh()
    gc.collect()
    gc.disable()
    try:
        sender.send(stream_of(tensors.items() if announced else iter(tensors.items())))
    finally:
        gc.enable()
        sender.close()
    assert made.sizes == [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]


def test_an_error_keeps_no_memory_of_the_update() -> None:
    """It lives on while the engine is restarted, which needs the memory; its traceback would hold all frames."""
    sender = WeightSender("cpu", 1, ALIGNMENT)
    sender._buffer = fresh = Fresh()
    receiver: Any = SimpleNamespace(**dict.fromkeys(("begin", "check", "post", "finish", "kill"), lambda *_: None))

    def refuse() -> None:
        try:
            raise ValueError("of the worker")
        except ValueError as error:
            raise RuntimeError("planted") from error

    receiver.wait_loaded = refuse
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="planted") as held:
            sender.send(stream_of({str(n): torch.ones(64) for n in range(4)}.items()), receiver)
        assert fresh.storages and all(one.expired() for one in fresh.storages), held
    finally:
        gc.enable()
        sender.close()
