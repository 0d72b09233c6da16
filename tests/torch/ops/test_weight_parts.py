"""The fingerprint says which weights these are, and not how they came."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.ops.weight_parts import Fingerprint, Part, Scratch, stream_of


def fingerprint(parts: list[Part]) -> str:
    made = Fingerprint()
    for part in parts:
        made.add(part)
    return made.text()


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


def test_values_that_change_alike_change_it() -> None:
    """All norms of a new model are one."""
    assert fingerprint([Part("n", (8,), torch.ones(8))]) != fingerprint([Part("n", (8,), torch.full((8,), 1.5))])


def test_tensors_are_copied_into_the_memory() -> None:
    tensors = {"a": torch.randn(3, 5).t(), "b": torch.arange(4, dtype=torch.bfloat16)}
    memory = Scratch(torch.device("cpu"))
    for (part,), (name, tensor) in zip(stream_of(tensors.items())(memory), tensors.items(), strict=True):
        assert part.name == name and torch.equal(part.tensor.reshape(part.shape), tensor)
        assert part.tensor.untyped_storage().data_ptr() == memory.allocate(0).untyped_storage().data_ptr()
