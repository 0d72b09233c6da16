"""A small project to begin with: a config, data, a reward function and its test."""
