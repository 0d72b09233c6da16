"""The memory that log-probs take beside the hidden states that they are computed from, as ops/logprobs.py takes it.

The forward pass takes blocks of logits only. The backward pass has, from its beginning to its end, copies of the hidden
states of all response tokens, their gradient in fp32, and the gradient of this rank's rows of the head. That one
stays until autograd has added it to Megatron's buffer; where the head is the embedding, until the embedding has its
own, at the end of the stage's backward pass. A head that is frozen, since adapters are trained, has no gradient.

Values that there are one of for each token, and not for each of its elements, are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from gspo_hpc.config.constants import LOGITS_BLOCK_BYTES, LOGITS_BLOCK_TOKENS

_FP32 = 4  # bytes


class Head(NamedTuple):
    """The sizes of a head on one rank, and of what it is given: `item` is the bytes of an element."""

    tokens: int  # responses of a micro-batch, on this rank
    hidden: int
    rows: int  # of the vocabulary, on this rank
    item: int
    entropy_gradient: bool = False  # the loss has an entropy bonus
    frozen: bool = False

    @property
    def inputs(self) -> int:
        """Bytes of the hidden states that predict something, and of what is computed of them, in a backward pass.

        They are copied without what does not count, and once more multiplied by the gradient that arrives; their own
        gradient is in fp32. Where the head is frozen, only the first copy is made.
        """
        return self.tokens * self.hidden * ((1 if self.frozen else 2) * self.item + _FP32)

    @property
    def gradient(self) -> int:
        """Bytes of the gradient of the head's weight."""
        return 0 if self.frozen else self.rows * self.hidden * self.item

    @property
    def forward_blocks(self) -> int:
        """Bytes of the blocks of a forward pass: logits, and what the entropy is made of."""
        tokens, rows = self._block
        return 2 * tokens * rows * _FP32

    @property
    def backward_blocks(self) -> int:
        """Bytes of the blocks of a backward pass.

        16-bit logits are multiplied in 16 bits, and both products come in fp32 before they are added: that for rows of
        the head, or for hidden states, to a block of the gradient of these rows in fp32. An entropy that is
        differentiated takes a block of probabilities, too.

        Of a frozen head there is only the product for hidden states. When the last block is gone, their gradient is
        rounded to the 16 bits of the result, which may take more than a block.
        """
        tokens, rows = self._block
        block = tokens * rows * _FP32 * (2 if self.entropy_gradient else 1)
        if self.item == _FP32:
            return block
        block += tokens * rows * self.item
        if self.frozen:
            return max(block + tokens * self.hidden * _FP32, self.tokens * self.hidden * self.item)
        return block + (rows + max(rows, tokens)) * self.hidden * _FP32

    @property
    def _block(self) -> tuple[int, int]:
        """Tokens and rows of a block."""
        tokens = max(1, min(self.tokens, LOGITS_BLOCK_TOKENS["cuda"]))
        per_row = max(tokens, self.hidden) * _FP32
        return tokens, max(1, min(self.rows, LOGITS_BLOCK_BYTES["cuda"] // per_row))
