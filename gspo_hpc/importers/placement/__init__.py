"""Carry over which GPUs train and which generate."""
