"""Floating-point operations of a model, by the arithmetic that MFU is counted with: matrix products only.

A product of [m, k] and [k, n] is 2 m k n operations; norms, activations and the optimizer are
left out, and so is what is computed again for its gradient. The backward pass is twice the forward pass (PaLM,
appendix B, arXiv:2204.02311).
"""

from __future__ import annotations

from gspo_hpc.models.architecture import Architecture

FORWARD, FORWARD_AND_BACKWARD = 1, 3  # in forward passes
FORWARD_AND_BACKWARD_FROZEN = 2  # of a model whose own weights have no gradients, since adapters are trained


def per_token(arch: Architecture) -> int:
    """Forward operations of one token in all layers, but for the scores of attention and the output layer."""
    hidden, size = arch.hidden_size, arch.head_dim
    attention = 2 * hidden * size * (2 * arch.num_attention_heads + 2 * arch.num_key_value_heads)
    dense = 2 * arch.mlp_matrices * hidden * arch.ffn_hidden_size
    total = 0
    for layer in range(arch.num_layers):
        total += 2 * arch.mixers[layer].products if arch.mixers else attention
        if not arch.has_experts(layer):
            total += dense
            continue
        experts = arch.experts
        assert experts is not None
        total += 2 * hidden * experts.count + 6 * hidden * experts.top_k * experts.ffn_hidden_size
        if experts.shared_ffn_hidden_size:
            total += 6 * hidden * experts.shared_ffn_hidden_size + 2 * hidden * experts.shared_gate
    return total


def forward(arch: Architecture, tokens: int, seen: int, outputs: int) -> int:
    """Return the operations of a forward pass over a micro-batch of `tokens` tokens.

    All tokens together see `seen` keys, and `outputs` of their hidden states go through the output layer.
    """
    scores = 4 * seen * arch.num_layers * arch.num_attention_heads * arch.head_dim
    return tokens * per_token(arch) + scores + 2 * outputs * arch.hidden_size * arch.vocab_size
