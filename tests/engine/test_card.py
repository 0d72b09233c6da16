"""vLLM's own Python for sleeping engines and for weights through GPU memory, around a card that only counts.

`bash tools/lanes.sh vllm` runs this file with other versions of vLLM.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gspo_hpc.engine import engine as engine_module
from gspo_hpc.engine.engine import Engine, EngineDied, EngineSettings
from gspo_hpc.ops.weight_parts import stream_of
from tests.engine.card.memory import PAGE, Card, Misuse, OnCard, Pool
from tests.engine.card.wiring import WIDTH, ClientOnCard, Engines, insert

BUCKET = 3 * WIDTH * WIDTH * 4  # bytes: the largest tensor fills one
SMALL = 1 << 10  # bytes: the largest tensors take more than two of these buckets
SHAPES = {"first.weight": (3 * WIDTH, WIDTH), "second.weight": (WIDTH, 3 * WIDTH), "second.bias": (WIDTH,)}


def version_of_vllm() -> str:
    """Return the version without importing vLLM, which takes long and not every worker of the tests needs."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).with_name("_version.py").read_text()
    found = re.search(r"^__version__ = version = ['\"]([\d.]+)", text, re.MULTILINE)
    assert found is not None
    return found[1]


ASKED = os.environ.get("GSPO_HPC_LANE_VLLM")  # the version that a lane wants to see here
VERSION = tuple(int(part) for part in version_of_vllm().split(".")[:2])
CACHE = 4 << 20  # bytes of the KV cache, in whole pages; the weights take two


@dataclass
class Bench:
    """An engine of ours around vLLM's objects, and what stands below them."""

    engine: Engine
    engines: Engines
    card: Card

    def model(self) -> dict[str, torch.Tensor]:
        """Return the weights that the engine would compute with."""
        return {name: p.data for name, p in self.engines.worker.model_runner.model.named_parameters()}

    def sync(self, seed: int, without: str = "", *, announced: bool = False) -> dict[str, torch.Tensor]:
        """Wake the engine, give it new weights, the smallest first, and return them: the loop's order.

        How large the largest is, is known before only if it is `announced`.
        """
        generator = torch.Generator().manual_seed(seed)
        sent = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items() if name != without}
        sent = dict(sorted(sent.items(), key=lambda one: one[1].nbytes))
        self.engine.wake_up(["weights"])
        self.engine.update_weights(stream_of(sent.items() if announced else iter(sent.items())))
        self.engine.wake_up()
        return sent

    def count_loads(self, fails_at: int | None = None) -> list[int]:
        """Return a list that grows by one entry with each bucket that the model loads; it may refuse one."""
        model, loads = self.engines.worker.model_runner.model, []
        load = model.load_weights

        def counted(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            loads.append(len(loads))
            if len(loads) == fails_at:
                raise RuntimeError("planted")
            return load(weights)

        model.load_weights = counted
        return loads


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Bench]]:
    from safetensors.torch import save_file

    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") and k != "CUDA_VISIBLE_DEVICES"}
    card = Card()
    insert(card, monkeypatch, ray=getattr(request, "param", True))
    made: list[Engine] = []

    def started(**options: Any) -> Bench:
        engines = Engines(card)
        monkeypatch.setattr(engine_module, "Client", type("Client", (ClientOnCard,), {"engines": engines}))
        options = {"bucket_bytes": BUCKET} | options
        made.append(Engine(EngineSettings(str(tmp_path), platform="cuda", **options)))
        made[0].start()
        return Bench(made[0], engines, card)

    gc.freeze()  # vLLM's allocator collects garbage whenever it sleeps, and all of vLLM is in this process
    with OnCard(card), mock.patch.dict(os.environ, environment, clear=True):
        yield started
        for engine in made:
            engine.close()
    gc.unfreeze()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_version_is_the_one_that_was_asked_for() -> None:
    """The version is the one that a lane asks for, or else the installed one."""
    import vllm

    assert vllm.__version__ == version_of_vllm() and ASKED in (None, vllm.__version__)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes_in_the_order_of_the_loop(start: Callable[..., Bench], level: int) -> None:
    """Rounds of sync, rollout and sleep; then one without an update, where the weights must come back by themselves."""
    bench = start(starts_asleep=True)
    card, engine = bench.card, bench.engine
    assert not card.mapped
    for update in range(3):
        sent = bench.sync(update)
        assert same(bench.model(), sent)
        assert bench.engines.cache is not None and bench.engines.cache.data_ptr() in card.mapped
        assert torch.equal(bench.engines.worker.model_runner.model.scale, torch.full((4,), 2.0))
        places = {name: tensor.data_ptr() for name, tensor in bench.model().items()}
        engine.sleep(level)
        assert not card.mapped
    assert places == {name: tensor.data_ptr() for name, tensor in bench.model().items()}
    engine.wake_up()
    assert same(bench.model(), sent) == (level == 1)
    assert bench.engines.scheduler.resets >= 6


def test_memory_comes_back_in_two_stages(start: Callable[..., Bench]) -> None:
    bench = start()
    whole = bench.card.used()
    bench.engine.sleep(1)
    bench.engine.wake_up(["weights"])
    assert bench.card.used() == whole - CACHE
    bench.engine.wake_up(["weights"])  # it is awake: nothing must be mapped again
    bench.engine.wake_up()
    assert bench.card.used() == whole


@pytest.mark.parametrize("start", [False], indirect=True, ids=["without ray"])
def test_weights_arrive_without_ray(start: Callable[..., Bench]) -> None:
    """Through host memory and our own backend, where vLLM's own cannot be imported without it."""
    bench = start(starts_asleep=True)
    for update in range(2):
        sent = bench.sync(update)
        assert same(bench.model(), sent)
        bench.engine.sleep(2)
    assert bench.card.used() == 0


def test_every_export_is_released_once(start: Callable[..., Bench]) -> None:
    """A counter that stays above 0 keeps a buffer of the trainer for ever, and so does one that falls below."""
    bench = start()
    before = bench.card.used()
    loads = bench.count_loads()
    for update in range(4):
        assert same(bench.model(), bench.sync(update))
        assert bench.card.used() == before
    assert len(loads) == 4 * 3  # or nothing is shown of an export that several buckets share
    bench.engine.close()
    assert bench.card.exports and set(bench.card.counts()) == {0}


def test_a_worker_answers_when_its_gpu_has_read_the_bucket(
    start: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are only begun when the loader returns: the trainer fills this half again once the worker has answered."""
    bench = start()
    model, receiver = bench.engines.worker.model_runner.model, bench.engines.worker.weight_transfer_engine
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            events.append(name)
            return result

        return call

    monkeypatch.setattr(torch.cuda, "synchronize", noted("read", lambda: None))
    model.load_weights = noted("loaded", model.load_weights)
    receiver.receive_weights = noted("answered", receiver.receive_weights)
    monkeypatch.setattr(torch.cuda, "empty_cache", noted("emptied", lambda: None))
    bench.sync(0)
    order = [one for one, next_one in zip(events, [*events[1:], ""], strict=True) if one != next_one]
    assert " ".join(order).count("loaded read") == 3, order
    buckets = [place for place, one in enumerate(order) if one == "answered"]
    assert order[buckets[-1] - 2 : buckets[-1]] == ["read", "emptied"], (
        "layers that were loaded take memory of the cache"
    )
    assert all(order[place - 1] == "read" for place in buckets[:-1]), order


def test_engines_that_die_in_an_update_cost_no_memory(
    start: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps what is logged, with frames
    bench = start()
    before = bench.card.used()
    for update in range(3):
        bench.count_loads(fails_at=2)
        with pytest.raises(RuntimeError, match="planted"):
            bench.sync(update)
        bench.engine.restart()
        sent = bench.sync(update)
        assert same(bench.model(), sent)
    assert bench.card.used() == before


@pytest.mark.parametrize("bucket_bytes", [BUCKET, SMALL])
@pytest.mark.parametrize("fails_at", [1, 2, 3, None], ids=["first", "second", "third", "finish"])
def test_an_engine_is_killed_before_the_memory_that_it_maps_is_freed(
    start: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, bucket_bytes: int, fails_at: int | None
) -> None:
    """Wherever it fails: before memory has grown, after, or at the very end, when it has unmapped it."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    bench = start(bucket_bytes=bucket_bytes)
    before = bench.card.used()
    for update in range(2):
        bench.count_loads(fails_at)
        with pytest.raises((RuntimeError, ValueError), match="planted" if fails_at is not None else "were not sent"):
            bench.sync(update, without="" if fails_at is not None else "second.weight")
        assert bench.card.used() <= before, "of the engine, which is dead, nothing is left"
        assert set(bench.card.counts()) == {0}
        bench.engine.restart()
        assert same(bench.model(), bench.sync(update))
    assert bench.card.used() == before and set(bench.card.counts()) == {0}


@pytest.mark.parametrize(("announced", "exports"), [(True, 1), (False, 2)], ids=["announced", "unknown"])
def test_memory_grows_in_the_middle_of_an_update_only_for_unknown_sizes(
    start: Callable[..., Bench], announced: bool, exports: int
) -> None:
    """For a tensor that is larger than both halves: the worker unmaps the smaller memory first."""
    bench = start(bucket_bytes=SMALL)
    before = bench.card.used()
    for update in range(3):
        assert same(bench.model(), bench.sync(update, announced=announced))
        assert bench.card.used() == before and set(bench.card.counts()) == {0}
    assert len(bench.card.exports) == 3 * exports, [one.nbytes for one in bench.card.exports]


def test_the_card_is_strict() -> None:
    """A second map, memory that is not mapped, more than there is, and an export of freed memory."""
    card, told = Card(total=4 * PAGE), []
    card.init_module(told.append, lambda address: told[0])
    with OnCard(card), card.use(Pool(None)):
        tensor = torch.ones(8, device="cuda")
        assert tensor.is_cuda and not torch.ones(8).is_cuda
    handle = told[0]
    assert card.used() == PAGE
    with pytest.raises(Misuse, match="is mapped already"):
        card.python_create_and_map(*handle)
    card.python_unmap_and_release(*handle)
    assert card.used() == 0 and not (tensor == 1).any()
    with pytest.raises(Misuse, match="is not mapped"):
        card.python_unmap_and_release(*handle)
    with pytest.raises(Misuse, match="ILLEGAL_ADDRESS"):
        card.copy(handle[2], tensor.data_ptr(), 32)
    with OnCard(card), pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 * PAGE, dtype=torch.uint8, device="cuda")
    with OnCard(card):
        buffer = torch.empty(PAGE, dtype=torch.uint8, device="cuda")
    _, values = card.export(buffer)
    del buffer
    assert card.used() == PAGE and card.counts() == [1]
    with pytest.raises(Misuse, match="has freed"):
        card.new_shared(*values[6:10], *values[11:])
    card.release(b"", 0)
    assert card.used() == 0


def test_an_engine_that_is_half_awake_leaves_all_memory_when_it_is_to_sleep(start: Callable[..., Bench]) -> None:
    """As after a stop in the middle of a sync, before a save that needs the memory."""
    bench = start()
    bench.engine.sleep(2)
    bench.engine.wake_up(["weights"])
    assert bench.card.mapped
    bench.engine.sleep(2)
    assert not bench.card.mapped
    with pytest.raises(EngineDied):
        bench.engine.wake_up()
