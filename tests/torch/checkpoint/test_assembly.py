"""Tensors of shared optimizers come together while torch's writer asks for them. Ranks are threads here. Seconds.

It would catch ranks that wait for each other for ever where a model has several optimizers, values that stand in the
wrong place, and what is kept in memory after it has been written.
"""

from __future__ import annotations

import io
import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from gspo_hpc.checkpoint import compat, sharded, shared_optimizer
from gspo_hpc.checkpoint.assembly import Assembly, Planner
from gspo_hpc.checkpoint.shared_optimizer import Piece, Share
from tests.torch.checkpoint.mail import Mail, as_ranks

KEYS = ("exp_avg", "exp_avg_sq")
LIMIT = 40  # elements of a bucket


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> Mail:
    found = Mail()
    monkeypatch.setattr(shared_optimizer, "dist", found)
    monkeypatch.setattr(shared_optimizer, "SAVE_TRANSIT_BYTES", 4 * LIMIT)
    return found


class Optimizer:
    """An optimizer that some ranks share: each of its parameters with the elements that each of them holds."""

    def __init__(self, name: str, ranks: list[int], parameters: list[tuple[tuple[int, ...], int, list[int]]]) -> None:
        """Take of each parameter its shape, its owner and how much each of `ranks` holds of it, both by their order."""
        self.name, self.ranks = name, ranks
        self.shares, self.truth = [], dict[tuple[int, str], torch.Tensor]()
        for index, (shape, owner, held) in enumerate(parameters):
            ends = [sum(held[: n + 1]) for n in range(len(held))]
            pieces = tuple(
                Piece(n, end - size, end) for n, (end, size) in enumerate(zip(ends, held, strict=True)) if size
            )
            self.shares.append(Share(index, torch.empty(shape), pieces, owner))
            self.truth |= {(index, key): torch.rand(shape) for key in KEYS}

    def of(self, rank: int) -> Any:
        """The part that this rank has."""
        me = self.ranks.index(rank)

        def held(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            share = next(one for one in self.shares if one.parameter is parameter)
            piece = share.of(me)
            assert piece is not None
            return {key: self.truth[share.index, key].flatten()[piece.begin : piece.end].clone() for key in KEYS}

        group = SimpleNamespace(rank=lambda: me, size=lambda: len(self.ranks), ranks=self.ranks)
        return SimpleNamespace(data_parallel_group=group, _get_main_param_and_optimizer_states=held)


def begin(optimizers: list[Optimizer], rank: int, *, parts: int = 1) -> tuple[Assembly, list[WriteItem]]:
    """An assembly of this rank, which has copied, and what torch would write: every tensor in so many parts."""
    group: Any = SimpleNamespace(rank=lambda: rank)
    assembly = Assembly(group, lambda name, elements: torch.empty(elements))
    state, items = {}, []
    for one in optimizers:
        if rank not in one.ranks:
            continue
        for index, tensors in assembly.add(one.of(rank), KEYS, one.shares).items():
            for key, flat in tensors.items():
                whole, name = flat.view(one.shares[index].parameter.shape), f"{one.name}.{index}.{key}"
                offset, state[name] = 0, list[Any]()
                for part in whole.chunk(parts):
                    sharded = ShardedTensor.from_rank_offsets(
                        name, part, (0, offset // len(part), len(whole) // len(part))
                    )
                    state[name].append(sharded)
                    items.append(write_item(name, sharded))
                    offset += len(part)
    assembly.find(state)
    for target, source in assembly.copies():
        target.copy_(source)
        source.fill_(torch.nan)  # by the next step, which need not wait for what is sent and written
    return assembly, assembly.in_order(reversed(items))


def write_item(name: str, part: ShardedTensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(part.global_offset), torch.Size(part.local_shape))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(part.global_shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def truth(optimizers: list[Optimizer]) -> dict[str, torch.Tensor]:
    return {f"{one.name}.{index}.{key}": value for one in optimizers for (index, key), value in one.truth.items()}


def written(assembly: Assembly, items: list[WriteItem]) -> Iterator[tuple[WriteItem, torch.Tensor]]:
    """Yield all that torch would write, with its values."""
    for item in items:
        found = assembly.values(item.index)
        assert found is not None
        yield item, found[0]


def part_of(values: torch.Tensor, item: WriteItem) -> torch.Tensor:
    """The part of a whole tensor that is written at once."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return values[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]


def some(seed: int) -> list[Optimizer]:
    """Two optimizers of four ranks, the second of which two and two share, as experts are."""
    draw = random.Random(seed)

    def parameters(size: int) -> list[tuple[tuple[int, ...], int, list[int]]]:
        found = []
        for _ in range(draw.randint(2, 12)):
            shape = draw.choice([(2, 3), (8, 20), (2, 90), (100,), (1, 64, 2), (16,)])
            elements = torch.Size(shape).numel()
            cuts = sorted(draw.choices([0, elements, *range(elements)], k=size - 1))
            held = [end - begin for begin, end in itertools.pairwise([0, *cuts, elements])]
            found.append((shape, draw.choice([n for n, one in enumerate(held) if one]), held))
        return found

    experts = [Optimizer(f"experts {ranks}", ranks, parameters(2)) for ranks in ([0, 2], [1, 3])]
    return [Optimizer("dense", [0, 1, 2, 3], parameters(4)), *experts]


def test_ranks_that_need_nothing_more_of_one_optimizer_bring_it_to_an_end_before_the_next(mail: Mail) -> None:
    """As with experts: rank 1 is done with the first one while rank 0 still waits for its pieces of it."""
    dense = Optimizer("dense", [0, 1], [((60,), 1, [30, 30]), ((200,), 0, [100, 100])])
    experts = Optimizer("experts", [0, 1], [((60,), 1, [30, 30]), ((60,), 0, [30, 30])])
    expected = truth([dense, experts])

    def rank(me: int) -> None:
        assembly, items = begin([dense, experts], me)
        for item, values in written(assembly, items):
            assert torch.equal(values, part_of(expected[item.index.fqn], item))
        assembly.rest()

    as_ranks(2, rank)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_torch_writes_all_values_and_keeps_one_bucket(
    parts: int, seed: int, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's own writer, which refers to the last tensor of every name until the file is whole."""
    optimizers = some(seed)
    expected, found, write = truth(optimizers), dict[str, torch.Tensor](), filesystem._write_item
    largest = max(LIMIT, *(values[:1].numel() for values in expected.values()))  # a row is not cut
    mine = threading.local()

    def seeing(transforms: Any, stream: Any, data: Any, *more: Any) -> Any:
        mine.seen.append(data.untyped_storage())
        made = {one.data_ptr(): one.nbytes() for one in mine.seen if one.nbytes()}
        kept = [size for at, size in made.items() if not any(begin <= at < end for begin, end in mine.held)]
        assert sum(kept) <= 4 * largest, "what has been written is kept"
        return write(transforms, stream, data, *more)

    monkeypatch.setattr(filesystem, "_write_item", seeing)

    def rank(me: int) -> None:
        assembly, items = begin(optimizers, me, parts=parts)
        mine.seen = []
        mine.held = [(copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy, _ in assembly.copies()]
        folder = tmp_path / str(me)
        folder.mkdir()
        writer = filesystem.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
        plan = SavePlan(items, storage_data=filesystem._StoragePrefix("_"))
        places = {one.index: one.storage_data for one in writer.write_data(plan, Planner(assembly)).value()}
        assembly.rest()
        for item in items:
            place = places[item.index]
            content = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            whole = found.setdefault(item.index.fqn, torch.full_like(expected[item.index.fqn], torch.nan))
            part_of(whole, item).copy_(torch.load(io.BytesIO(content), weights_only=True))

    as_ranks(4, rank)
    assert set(found) == set(expected)
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


def test_what_torch_would_write_in_another_order_is_refused(mail: Mail) -> None:
    """As it does with several threads, or a copy ahead from a GPU: elements that were passed over are gone."""
    one = Optimizer("dense", [0], [((200,), 0, [200]), ((10,), 0, [10])])
    assembly, items = begin([one], 0)
    with pytest.raises(RuntimeError, match="order of its plan"):
        list(written(assembly, items[::-1]))


def test_a_rank_that_fails_to_write_still_sends_what_others_need(mail: Mail, tmp_path: Path) -> None:
    """As with a full disk. It says so itself once all have written what they can, so nobody waits for a time limit."""
    optimizers = some(1)
    expected = truth(optimizers)

    def rank(me: int) -> None:
        assembly, items = begin(optimizers, me)
        if me != 2:
            for item, values in written(assembly, items):
                assert torch.equal(values, part_of(expected[item.index.fqn], item))
            assembly.rest()
            return
        writer = compat._Writer(tmp_path / "missing", sync_files=False, per_thread_copy_ahead=0)
        writer.afterwards = assembly.rest
        with pytest.raises(FileNotFoundError):
            writer.write_data(SavePlan(items, storage_data=filesystem._StoragePrefix("_")), Planner(assembly))

    as_ranks(4, rank)


def test_nothing_is_written_before_the_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no step comes that helps to copy: the thread would write what the memory held before."""
    done: list[str] = []
    monkeypatch.setattr(sharded, "barrier", lambda device: None)
    monkeypatch.setattr(sharded, "_state", lambda *arguments: {})
    monkeypatch.setattr(sharded, "_rng_state", lambda ranks: {})
    monkeypatch.setattr(compat, "prepare", lambda *arguments, **options: lambda: done.append("written"))
    policy: Any = SimpleNamespace(
        ranks=SimpleNamespace(rank=0, device=torch.device("cpu")),
        state_copy=SimpleNamespace(finish=lambda: done.append("copied")),
        restore=lambda: None,
        settle=lambda: None,
    )
    group: Any = None
    sharded.prepare(policy, tmp_path, group, sharded.Copies())()
    assert done == ["copied", "written"]
