"""Engines of models that score sequences, and of what such a model reads."""
