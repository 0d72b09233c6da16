"""Reward models: models that score completions on engines of the run's own."""
