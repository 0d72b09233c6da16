"""Tensor operations without communication: packing, attention, log-probs, weight names."""
