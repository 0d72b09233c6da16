"""Observers of the training loop on rank 0, one job each."""
