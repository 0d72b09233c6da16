"""Architectures: what a config.json says of a model, and what it costs to compute."""
