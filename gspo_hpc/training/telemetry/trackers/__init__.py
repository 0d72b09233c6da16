"""Trackers: W&B and TensorBoard."""
