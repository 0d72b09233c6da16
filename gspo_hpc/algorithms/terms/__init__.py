"""Terms of which losses are composed: pure functions of tensors, and of arrays of rewards (advantages).

Shapes, here and in every term:

    R   response tokens of a packed micro-batch
    S   samples (completions) in it
    U   units of the ratio: S where there is one ratio per sequence, else R
"""
