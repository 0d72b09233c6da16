"""Compute log-probs of chosen tokens from hidden states, without ever holding the logits of all tokens.

Shapes: R response tokens, H hidden size, V the true vocabulary, V_local rows of the head on this rank.

The forward pass goes over blocks of (tokens x vocabulary) and keeps, per token, the running maximum, the sum of
exponentials and the target's logit. The backward pass computes each block's logits again and turns them into the two
gradients. At any time one block (two with entropy) of at most BLOCK_BYTES is in memory, in fp32; the backward pass of
16-bit inputs takes up to three and a half, for it has the block in 16 bits, too, and the gradient of its rows twice.
Besides, a backward pass has copies of all hidden states, and all of the head's gradient: planning/estimates/head.py
counts them. On the CPU a block stays in the cache, which makes the element-wise part cheap compared with the matrix
products.

For log-prob l = (x_target - logsumexp(x)), x = W h / temperature and upstream gradient g, with p = softmax(x)::

    dl/dh = g / temperature * (W_target - p W)        dl/dW = g / temperature * (onehot(target) - p)^T h

With an entropy that is differentiated, upstream gradient e, each block holds both: H = -sum p log p has
dH/dx = -p (log p + H), so the gradient of the logits is -(g (p - onehot) + e p (log p + H)). It takes one more block.

Tokens with g = 0 and e = 0 (masked, or in a clipped sequence) are left out of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_hpc.config.constants import LOGITS_BLOCK_BYTES, LOGITS_BLOCK_TOKENS

BLOCK_BYTES = LOGITS_BLOCK_BYTES  # size of a block of logits, by device
TOKENS = LOGITS_BLOCK_TOKENS  # of a block, by device, unless the caller gives another number


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    check: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs [R] of `targets` [R] int64 and, on request, entropies [R] in nats, both fp32.

    Entropies have a gradient only with `entropy_gradient`.

    `hidden` [R, H] and `weight` [V_local, H] have one dtype; products are accumulated in fp32 (float64 stays float64).
    `weight` holds the rows `vocab_start` .. of the whole head. Rows at and beyond `vocab_size`, the true size, are
    padding: they have no probability and no gradient; default: no row is padding. `chunk_tokens` bounds the tokens of
    a block.

    With `tp_group` the head is split by rows over the group (vocabulary-parallel). Conventions: `hidden`, `targets` and
    the gradient that arrives for the log-probs are the same on every rank of the group; the gradient for `hidden` is
    summed over the group in here, so that every rank gets all of it (do not wrap `hidden` in a region that sums it
    again, and behind a sequence-parallel gather use ``tensor_parallel_output_grad=False``); the gradient for `weight`
    is this rank's own rows. All ranks of the group call it together, forward and backward.

    Raises ValueError for a target outside the vocabulary. With `check` False the caller has looked: to ask a GPU here
    would wait for all that it has been given.
    """
    assert hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1], (hidden.shape, weight.shape)
    assert hidden.shape[:1] == targets.shape and hidden.dtype == weight.dtype, (
        targets.shape,
        hidden.dtype,
        weight.dtype,
    )
    assert temperature > 0 and (chunk_tokens is None or chunk_tokens >= 1)
    if vocab_size is None:
        vocab_size = weight.shape[0] * dist.get_world_size(tp_group) if tp_group else vocab_start + weight.shape[0]
    if check:
        check_targets([targets], vocab_size)
    real_rows = max(0, min(weight.shape[0], vocab_size - vocab_start))
    logprobs, entropy = _TokenLogprobs.apply(
        hidden,
        weight,
        targets,
        1.0 / temperature,
        chunk_tokens,
        vocab_start,
        real_rows,
        tp_group,
        with_entropy,
        entropy_gradient,
    )
    return logprobs, entropy if with_entropy else None


def check_targets(targets: Sequence[Tensor], vocab_size: int) -> None:
    """Raise ValueError for a target outside the vocabulary. A GPU is waited for once, for all tensors together."""
    found = [torch.stack(torch.aminmax(one)) for one in targets if one.numel()]
    if not found:
        return
    lowest, highest = zip(*torch.stack(found).tolist(), strict=True)
    if min(lowest) < 0 or max(highest) >= vocab_size:
        seen = f"{min(lowest)} to {max(highest)}"
        raise ValueError(f"targets are {seen}, the vocabulary has the tokens 0 to {vocab_size - 1}")


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        inverse_temperature: float,
        chunk_tokens: int | None,
        vocab_start: int,
        real_rows: int,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        local = targets - vocab_start
        blocks = _Blocks(hidden, weight, real_rows, inverse_temperature, chunk_tokens)
        tokens = hidden.shape[0]
        # Finite, so that a rank whose rows are all padding contributes 0 and not NaN.
        peak = hidden.new_full((tokens,), torch.finfo(blocks.dtype).min, dtype=blocks.dtype)
        # Per token: sum of exp(x - peak), logit of the target, sum of exp(x - peak) * (x - peak).
        sums = hidden.new_zeros((3, tokens), dtype=blocks.dtype)
        total, chosen, moment = sums
        spare = blocks.buffer() if with_entropy else None
        for rows in blocks.vocabulary():
            head = blocks.head(rows)
            for part in blocks.tokens():
                x = blocks.logits(part, head)
                at, here = _targets_in(local[part], rows)
                chosen[part] += torch.where(here, x.gather(1, at[:, None])[:, 0], 0.0)
                higher = torch.maximum(peak[part], x.amax(1))
                change = peak[part] - higher  # 0 or below
                x.sub_(higher[:, None])
                if spare is None:
                    exponentials = x.exp_()
                else:
                    exponentials = torch.exp(x, out=spare[: x.numel()].view_as(x))
                    moment[part] = _rescaled_moment(moment[part], total[part], change)
                total[part] = total[part] * change.exp() + exponentials.sum(1)
                if spare is not None:
                    moment[part] += exponentials.mul_(x).sum(1)  # torch.linalg.vecdot would take one more block
                peak[part] = higher
        if tp_group is not None and tokens:
            local_peak = peak.clone()
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=tp_group)
            change = local_peak - peak
            moment.copy_(_rescaled_moment(moment, total, change))
            total.mul_(change.exp())
            dist.all_reduce(sums, group=tp_group)
        log_total = peak + total.log()
        entropy = total.log() - moment / total
        ctx.settings = (inverse_temperature, chunk_tokens, real_rows, tp_group)
        if entropy_gradient:
            ctx.save_for_backward(hidden, weight, local, log_total, entropy)
        else:
            ctx.save_for_backward(hidden, weight, local, log_total)
            ctx.mark_non_differentiable(entropy)
        return (chosen - peak) - total.log(), entropy  # in this order: large logits do not swallow the small part

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        all_hidden, weight, all_local, all_log_total, *all_entropy = ctx.saved_tensors
        inverse_temperature, chunk_tokens, real_rows, tp_group = ctx.settings
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        reached = (upstream[0] != 0) | (upstream[1] != 0) if all_entropy else upstream[0]
        counted = reached.nonzero()[:, 0]
        del reached
        hidden, local, log_total = (x.index_select(0, counted) for x in (all_hidden, all_local, all_log_total))
        scale, entropies = upstream[0].index_select(0, counted)[:, None], None
        if all_entropy:
            entropy, its = (x.index_select(0, counted)[:, None] for x in (all_entropy[0], upstream[1]))
            entropies, scale = (entropy, its, scale), torch.ones_like(scale)
        scale = scale * inverse_temperature
        grad_hidden, grad_weight = _gradients(
            hidden,
            weight,
            local,
            log_total,
            scale,
            _Blocks(hidden, weight, real_rows, inverse_temperature, chunk_tokens),
            *(needs_hidden, needs_weight),
            entropies,
        )
        del hidden  # all that is as large as the hidden states, but for their gradient, goes before the result comes
        result = None
        if grad_hidden is not None:
            if tp_group is not None and counted.numel():
                dist.all_reduce(grad_hidden, group=tp_group)
            result = torch.zeros_like(all_hidden).index_copy_(0, counted, grad_hidden.to(all_hidden.dtype))
        return result, grad_weight, *[None] * 8


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    local: Tensor,
    log_total: Tensor,
    scale: Tensor,
    blocks: _Blocks,
    needs_hidden: bool,
    needs_weight: bool,
    entropies: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients for `hidden`, in fp32 and of this rank's rows alone, and for `weight`; `scale` is [R, 1].

    `entropies`: where they have a gradient, they and the upstream gradients of both results, [R, 1] each; `scale` is
    then without that of the log-probs.

    planning/estimates/head.py counts what is in memory here at the worst moment.
    """
    # -g / temperature * h: with it the block itself, p - onehot, needs no scaling. It is made first, in fp32 for a
    # moment, while there is no gradient yet.
    scaled = blocks.operand(-scale * hidden) if needs_weight else None
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=blocks.dtype) if needs_hidden else None
    grad_weight = _gradient_of(weight, blocks.real_rows if hidden.shape[0] else 0) if needs_weight else None
    same = weight.dtype == blocks.dtype
    for rows in blocks.vocabulary():
        head = blocks.head(rows)
        grad_rows = None
        if grad_weight is not None:
            grad_rows = grad_weight[rows] if same else head.new_empty(head.shape, dtype=blocks.dtype)
        for part in blocks.tokens():
            x = blocks.logits(part, head)
            x.sub_(log_total[part, None])
            at, here = _targets_in(local[part], rows)
            if entropies is None:
                x.exp_().scatter_add_(1, at[:, None], -here[:, None].to(x.dtype))
            else:
                entropy, upstream, own = (values[part] for values in entropies)
                p = x.exp()
                x.add_(entropy).mul_(p).mul_(upstream)
                x.add_(p.scatter_add_(1, at[:, None], -here[:, None].to(x.dtype)).mul_(own))
                del p
            block = blocks.operand(x)
            if grad_hidden is not None:
                blocks.add_product(grad_hidden[part], block, head)
            if grad_rows is not None and scaled is not None:
                blocks.add_product(grad_rows, block.t(), scaled[part], first=part.start == 0)
            del block  # before there is the next
        if grad_weight is not None and grad_rows is not None and not same:
            grad_weight[rows] = grad_rows.to(grad_weight.dtype)
    return None if grad_hidden is None else grad_hidden.mul_(-scale), grad_weight


class _Blocks:
    """The blocks of one pass, and matrix products in full precision.

    16-bit inputs are multiplied as they are on CUDA, which accumulates in fp32; the CPU would round the products, so
    there they become fp32 first, a block at a time.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, real_rows: int, inverse_temperature: float, chunk_tokens: int | None
    ) -> None:
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.narrow = hidden.dtype if hidden.is_cuda and hidden.dtype != self.dtype else None
        device = "cuda" if hidden.is_cuda else "cpu"
        self.hidden = self.operand(hidden)
        self.weight = weight
        self.inverse_temperature = inverse_temperature
        self.real_rows = real_rows
        self.block_tokens = max(1, min(hidden.shape[0], chunk_tokens or TOKENS[device]))
        # A row of the head has a gradient of its size: short samples get no larger blocks for all of the head at once.
        per_row = max(self.block_tokens, hidden.shape[1]) * self.dtype.itemsize
        self.block_rows = max(1, min(real_rows, BLOCK_BYTES[device] // per_row))
        self._logits = self.buffer()

    def buffer(self) -> Tensor:
        """Return memory for one block, which every block reuses."""
        return self.weight.new_empty(self.block_tokens * self.block_rows, dtype=self.dtype)

    def vocabulary(self) -> list[slice]:
        """Return slices of the head's rows that are not padding."""
        return [slice(a, min(a + self.block_rows, self.real_rows)) for a in range(0, self.real_rows, self.block_rows)]

    def tokens(self) -> list[slice]:
        """Return slices of the tokens."""
        count = self.hidden.shape[0]
        return [slice(a, min(a + self.block_tokens, count)) for a in range(0, count, self.block_tokens)]

    def head(self, rows: slice) -> Tensor:
        """Return these rows of the head, as :meth:`operand` does."""
        return self.operand(self.weight[rows])

    def operand(self, x: Tensor) -> Tensor:
        """Return `x` in the dtype of the products' operands."""
        return x.to(self.narrow or self.dtype)

    def logits(self, part: slice, head: Tensor) -> Tensor:
        """Return the logits [tokens, rows] of a block, in the buffer: the next call overwrites them."""
        h = self.hidden[part]
        x = self._logits[: h.shape[0] * head.shape[0]].view(h.shape[0], head.shape[0])
        if self.narrow is None:
            torch.mm(h, head.t(), out=x)
        else:
            torch.mm(h, head.t(), out_dtype=self.dtype, out=x)
        return x if self.inverse_temperature == 1.0 else x.mul_(self.inverse_temperature)

    def add_product(self, target: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
        """Add a @ b to `target`, accumulated in its dtype; with `first` replace what it held."""
        if self.narrow is None:
            target.addmm_(a, b, beta=0 if first else 1)
        else:
            product = torch.mm(a, b, out_dtype=self.dtype)
            if first:
                target.copy_(product)
            else:
                target.add_(product)


def _gradient_of(weight: Tensor, written: int) -> Tensor:
    """Return memory for the gradient of `weight`: its first `written` rows are to be written, the others are zero."""
    gradient = torch.empty_like(weight)
    gradient[written:] = 0
    return gradient


def _targets_in(local: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Return each target's column in a block of these rows (0 where it has none), and True where it has one."""
    at = local - rows.start
    here = (at >= 0) & (at < rows.stop - rows.start)
    return torch.where(here, at, 0), here


def _rescaled_moment(moment: Tensor, total: Tensor, change: Tensor) -> Tensor:
    """Return the sum of exp(x - peak) * (x - peak) for a peak that is higher by -change."""
    return change.exp() * (moment + change * total)
