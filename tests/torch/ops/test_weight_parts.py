"""The fingerprint says which weights these are, and not how they came.

A second. Catches rows, columns or blocks that change places on their way, bits that are read as another dtype, and a
fingerprint that depends on the layout.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gspo_hpc.ops import weight_parts
from gspo_hpc.ops.weight_parts import Fingerprint, Part, Scratch, stream_of


def fingerprint(parts: list[Part]) -> str:
    made = Fingerprint()
    for part in parts:
        made.add(part)
    return made.text(made.values())


@given(
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_it_does_not_depend_on_division_and_order(
    ranks: tuple[int, int], each: int, dtype: torch.dtype, chance: object
) -> None:
    owners, shared = ranks
    gathered = torch.randn(owners, shared, each, 8 // shared, 16).to(
        dtype
    )  # as ranks that own experts have gathered them
    view = gathered.transpose(1, 2)
    count = owners * each
    stack = Part("x.experts.{}.up", (count, 8, 16), view, tuple(range(count)))
    norm, head = torch.randn(4, dtype=torch.float64), torch.randn(6, 3)
    others = [Part("norm", (4,), norm), Part("head", (6, 3), head), Part("scale", (), torch.tensor(0.5))]
    one = fingerprint([stack, *others])
    single = [Part(name, (8, 16), tensor) for name, tensor in stack.tensors()] + others
    chance.shuffle(single)
    assert fingerprint(single) == one
    columns = head.view(6, 3).t().contiguous().t()
    assert fingerprint([stack, others[0], Part("head", (6, 3), columns), others[2]]) == one


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
WORDS = st.integers(-(2**63), 2**63 - 1)


@given(st.data(), DTYPES, st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_it_does_not_depend_on_where_rows_and_columns_are_cut(
    data: st.DataObject, dtype: torch.dtype, ranks: int, experts: int, rows: int, columns: int
) -> None:
    """Matrices of any size, in pieces of any number of cached words, as ranks gather them: cut by rows or columns."""
    whole = torch.randn(experts, rows * ranks, columns * ranks).to(dtype)
    shape, numbers = tuple(whole.shape[1:]), tuple(range(experts))
    by_columns = whole.unflatten(2, (ranks, columns)).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    by_rows = whole.unflatten(1, (ranks, rows)).transpose(0, 1).contiguous().transpose(0, 1)
    turned = whole.transpose(1, 2).contiguous().transpose(1, 2)
    found = set()
    for view in (whole, by_columns, by_rows, turned):
        weight_parts._CACHED, kept = data.draw(st.sampled_from([1, 7, 64, 500, 1 << 16])), weight_parts._CACHED
        try:
            found.add(fingerprint([Part("e.{}.w", (experts, *shape), view, numbers)]))
        finally:
            weight_parts._CACHED = kept
    found.add(fingerprint([Part(f"e.{number}.w", shape, whole[number]) for number in numbers]))
    assert len(found) == 1


def matrix(data: st.DataObject, rows: int, columns: int) -> torch.Tensor:
    """Words of which many may be equal, as they are in norms, or differ in their signs only."""
    if data.draw(st.booleans()):
        seed = data.draw(st.integers(0, 2**31))
        return torch.randint(-(2**62), 2**62, (rows, columns), generator=torch.Generator().manual_seed(seed))
    few = data.draw(st.lists(WORDS, min_size=2, max_size=3, unique=True))
    picks = torch.randint(
        len(few), (rows, columns), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    return torch.tensor(few)[picks]


def of_words(words: torch.Tensor, experts: int = 0) -> str:
    """Return the fingerprint of float64 numbers with these words: a matrix, or one in a stack of equal ones."""
    values = words.view(torch.float64)
    if not experts:
        return fingerprint([Part("w", tuple(values.shape), values)])
    stack = torch.stack([*[torch.zeros_like(values)] * experts, values])
    return fingerprint([Part("e.{}.w", tuple(stack.shape), stack, tuple(range(experts + 1)))])


@given(st.data(), st.sampled_from([(1, 6), (8, 1), (4, 4), (40, 40), (7, 200)]), st.integers(0, 2))
@settings(max_examples=200, deadline=None)
def test_two_words_that_change_places_change_it(data: st.DataObject, shape: tuple[int, int], experts: int) -> None:
    """In vectors, and in matrices of which only sums are mixed."""
    words = matrix(data, *shape)
    one, other = data.draw(st.integers(0, words.numel() - 1)), data.draw(st.integers(0, words.numel() - 1))
    flat = words.flatten()
    assume(flat[one] != flat[other])
    swapped = flat.clone()
    swapped[one], swapped[other] = flat[other], flat[one]
    assert of_words(swapped.view(shape), experts) != of_words(words, experts)


@given(st.data(), st.sampled_from([(4, 4), (40, 40), (64, 64)]), st.integers(0, 2), st.integers(1, 39))
@settings(max_examples=200, deadline=None)
def test_shifts_transpositions_and_blocks_that_change_places_change_it(
    data: st.DataObject, shape: tuple[int, int], experts: int, steps: int
) -> None:
    words, half = matrix(data, *shape), shape[0] // 2
    block = words.clone()
    block[:half, half:] = words[:half, half:].t()
    columns = torch.cat([words[:, half:], words[:, :half]], 1)
    whole = of_words(words, experts)
    for other in (words.t().contiguous(), block, columns, columns.t().contiguous(), words.flip(0), words.flip(1)):
        assert torch.equal(other, words) or of_words(other, experts) != whole
    for moved in (words.roll(steps), words.roll(steps, 0), words.roll(steps, 1)):
        assert torch.equal(moved, words) or of_words(moved, experts) != whole


@given(st.integers(1, 5), st.lists(st.integers(1, 60), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_ranks_share_the_work(ranks: int, sizes: list[int]) -> None:
    """Each tensor is hashed by one of them, and all together have the fingerprint of one rank by itself."""
    parts = [Part(f"w{number}", (size, 8), torch.randn(size, 8)) for number, size in enumerate(sizes)]
    parts += [Part("e.{}.w", (3, 4, 4), torch.randn(3, 4, 4), (0, 1, 2))]
    made = [Fingerprint(rank, ranks) for rank in range(ranks)]
    for one in made:
        for part in parts:
            one.add(part)
    values = torch.stack([one.values() for one in made])
    assert ((values != 0).sum(0) == 1).all()
    loads = [sum(part.tensor.nbytes for part, v in zip(parts, row, strict=False) if v) for row in values]
    assert max(loads) - min(loads) <= max(part.tensor.nbytes for part in parts) or len(parts) < ranks
    assert {one.text(values.sum(0)) for one in made} == {fingerprint(parts)}


def test_any_other_bit_name_or_shape_is_another() -> None:
    stack = torch.randn(3, 4, 4)
    parts = [Part("e.{}.w", (3, 4, 4), stack, (0, 1, 2)), Part("n", (2,), torch.tensor([0.0, 1.0]))]
    changed = stack.clone()
    changed[1, 2, 3] = -changed[1, 2, 3]
    found = {
        fingerprint(parts),
        fingerprint([Part("e.{}.w", (3, 4, 4), changed, (0, 1, 2)), parts[1]]),
        fingerprint([Part("e.{}.w", (3, 4, 4), stack, (0, 2, 1)), parts[1]]),
        fingerprint([Part("e.{}.w", (3, 2, 8), stack.view(3, 2, 8), (0, 1, 2)), parts[1]]),
        fingerprint([parts[0], Part("n", (2,), torch.tensor([-0.0, 1.0]))]),
        fingerprint([parts[0], Part("m", (2,), torch.tensor([0.0, 1.0]))]),
        fingerprint(parts[:1]),
    }
    assert len(found) == 7


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float16), (torch.float32, torch.int32), (torch.int8, torch.uint8)]
)
@pytest.mark.parametrize("shape", [(4,), (3, 8), (40, 80)])
def test_the_same_bits_of_another_dtype_are_others(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Numbers of 16 bits that an engine takes for the other kind are other weights, in a tensor or in a stack."""
    whole = torch.randint(-100, 100, (2, *shape), dtype=torch.int8).repeat_interleave(dtypes[0].itemsize, -1)
    kinds = [whole.view(dtype) for dtype in dtypes]
    assert kinds[0].shape == kinds[1].shape == whole[..., :: dtypes[0].itemsize].shape
    assert len({fingerprint([Part("w", shape, kind[0])]) for kind in kinds}) == 2
    assert len({fingerprint([Part("e.{}.w", (2, *shape), kind, (0, 1))]) for kind in kinds}) == 2


@pytest.mark.parametrize("shape", [(7,), (16, 8), (256, 128)])
@pytest.mark.parametrize("experts", [(), (0, 1, 2)])
def test_no_number_is_read_from_a_gpu(shape: tuple[int, ...], experts: tuple[int, ...]) -> None:
    """A tensor without values has none: to read one of each tensor of a mixture would wait thousands of times."""
    whole = (len(experts), *shape) if experts else shape
    with FakeTensorMode():
        fingerprint = Fingerprint()
        fingerprint.add(Part("w.{}" if experts else "w", whole, torch.empty(*whole), experts))
        assert fingerprint.values().shape == (max(1, len(experts)),)


def test_values_that_change_alike_change_it() -> None:
    """All norms of a new model are one."""
    assert fingerprint([Part("n", (8,), torch.ones(8))]) != fingerprint([Part("n", (8,), torch.full((8,), 1.5))])


def test_tensors_are_copied_into_the_memory() -> None:
    tensors = {"a": torch.randn(3, 5).t(), "b": torch.arange(4, dtype=torch.bfloat16)}
    memory = Scratch(torch.device("cpu"))
    for (part,), (name, tensor) in zip(stream_of(tensors.items())(memory), tensors.items(), strict=True):
        assert part.name == name and torch.equal(part.tensor.reshape(part.shape), tensor)
        assert part.tensor.untyped_storage().data_ptr() == memory.allocate(0).untyped_storage().data_ptr()
